"""A Decathlon task as an archive, and a local server that sends it."""

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TASK = "Task00_Test"
FILES = {"dataset.json": b"{}", "imagesTr/a.nii.gz": b"image" * 99_999, "labelsTr/a.nii.gz": b"l"}


def make_archive(files=FILES):
    """Build a tar with a task's folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"{TASK}/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def md5(content):
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


class Server(ThreadingHTTPServer):
    """Serve up to `limit` bytes of one file; `requests` records the range of each request."""

    def __init__(self, content):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.limit, self.requests = content, None, []
        self.url = f"http://127.0.0.1:{self.server_port}/{TASK}.tar"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        requested = self.headers.get("Range")
        self.server.requests.append(requested)
        if not self.path.endswith(f"/{TASK}.tar"):
            self.send_error(404)
            return
        start = int(requested.removeprefix("bytes=").rstrip("-")) if requested else 0
        content = self.server.content[start:]
        if start and not content:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: self.server.limit])

    def log_message(self, *_):
        pass


@contextmanager
def serve(content: bytes) -> Iterator[Server]:
    with Server(content) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
