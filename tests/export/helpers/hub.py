"""A stand-in for Hugging Face's hub: the requests that a download makes, for one repository."""

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40


@contextmanager
def serve_hub(repository: str, folder: Path) -> Generator[tuple[str, list[str]]]:
    """Yield the address, and the names of the files that have been downloaded."""
    downloaded: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(with_body=False)

        def do_GET(self):
            self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            path, code, headers, content = self.path.partition("?")[0], 200, {}, b""
            api, files = f"/api/models/{repository}", f"/{repository}/resolve/{COMMIT}/"
            if path == f"{api}/revision/main":
                content = json.dumps({"id": repository, "sha": COMMIT}).encode()
            elif path == f"{api}/tree/{COMMIT}":
                content = json.dumps(list_tree(folder)).encode()
            elif path.startswith(files):
                name = path.removeprefix(files)
                content = (folder / name).read_bytes()
                headers = {"X-Repo-Commit": COMMIT, "ETag": hash_content(content)}
                if with_body:
                    downloaded.append(name)
            else:
                code = 404
            self.send_response(code)
            for key, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", downloaded
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def list_tree(folder: Path) -> list[dict[str, object]]:
    """Describe all files, as the hub does."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return [
        {
            "type": "file",
            "path": file.relative_to(folder).as_posix(),
            "size": file.stat().st_size,
            "oid": hash_content(file.read_bytes()),
        }
        for file in files
    ]


def hash_content(content: bytes) -> str:
    """Return a digest."""
    return hashlib.sha1(content).hexdigest()
