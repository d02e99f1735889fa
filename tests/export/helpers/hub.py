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
    files = {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }
    tree = [
        {"type": "file", "path": name, "size": len(content), "oid": hash_content(content)}
        for name, content in files.items()
    ]
    answers = {
        f"/api/models/{repository}/revision/main": {"id": repository, "sha": COMMIT},
        f"/api/models/{repository}/tree/{COMMIT}": tree,
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.partition("?")[0]
            name = path.removeprefix(f"/{repository}/resolve/{COMMIT}/")
            is_known = path in answers or name in files
            content = files[name] if name in files else json.dumps(answers.get(path)).encode()
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", hash_content(content))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)
                downloaded.extend([name] if name in files else [])

        do_HEAD = do_GET

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


def hash_content(content: bytes) -> str:
    """Return a digest."""
    return hashlib.sha1(content).hexdigest()
