"""Serve a page and its data to this machine alone, at an address that nobody can guess."""

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast

ADDRESS = "127.0.0.1"

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page has the rest
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, kw_only=True)
class Content:
    """Bytes and their media type."""

    type: str
    data: bytes


class LocalServer(ThreadingHTTPServer):
    """Serve `contents` by name below a random token; port 0 is any free one.

    A request names one of the contents, never a file, and nothing can be changed. Requests for
    another host are refused: a page elsewhere could give its own name this machine's address.
    """

    daemon_threads = True

    def __init__(self, contents: Mapping[str, Content], port: int = 0):
        super().__init__((ADDRESS, port), _Handler)
        self.contents = contents
        self.token = secrets.token_urlsafe(32)
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}

    @property
    def url(self) -> str:
        """Return the address of the content without a name."""
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def find(self, path: str) -> Content | None:
        """Return what a path names; None without the token."""
        _, _, rest = path.partition("/")
        token, slash, name = rest.partition("/")
        known = hmac.compare_digest(token.encode(), self.token.encode())
        return self.contents.get(name) if known and slash else None


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "unet3d", ""
    timeout = 60  # seconds; a client that says nothing holds a thread

    def do_GET(self) -> None:
        content = self.find_content()
        if content is not None:
            self.wfile.write(content.data)

    def do_HEAD(self) -> None:
        self.find_content()

    def find_content(self) -> Content | None:
        """Send the head of an answer; return what comes after it, if anything is found."""
        server = cast(LocalServer, self.server)
        if self.headers.get("Host") not in server.hosts:
            self.send_error(HTTPStatus.FORBIDDEN)
            return None
        content = server.find(self.path)
        if content is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return None
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content.type)
        self.send_header("Content-Length", str(len(content.data)))
        self.end_headers()
        return content

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the log would hold the token."""
