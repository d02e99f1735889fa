import http.client
import socket
import threading

import pytest

from unet3d.report.html.local_server import Content, LocalServer

CONTENTS = {
    "": Content(type="text/html", data=b"page"),
    "0": Content(type="application/octet-stream", data=b"volume"),
}


@pytest.fixture
def server():
    with LocalServer(CONTENTS) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path, method="GET", **headers):
    """Return the status, the headers and the body of an answer to a path, sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=5)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def test_the_page_and_the_volumes_are_served_below_the_token(server):
    status, headers, body = ask(server, f"/{server.token}/")
    assert (status, body, headers["Content-Type"]) == (200, b"page", "text/html")
    assert headers["Cache-Control"] == "no-store"
    assert headers["Server"].strip() == "unet3d"
    assert ask(server, f"/{server.token}/0")[2] == b"volume"
    status, headers, body = ask(server, f"/{server.token}/0", "HEAD")
    assert (status, headers["Content-Length"], body) == (200, "6", b"")
    assert server.url == f"http://127.0.0.1:{server.server_port}/{server.token}/"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/0",
        "/{token}",
        "/{token}x/",
        "/{other}/0",
        "/{token}/1",
        "/{token}/0/",
        "/{token}/00",
        "/{token}/0?x=1",
        "/{token}/../0",
        "/{token}/./0",
        "/{token}/../../../etc/passwd",
        "/{token}/%2e%2e/%2e%2e/etc/passwd",
        "/{token}//etc/passwd",
        "/{token}/..\\\\0",
        "/{token}/__init__.py",
    ],
)
def test_no_other_path_has_anything(server, path):
    other = server.token[:-1] + ("a" if server.token[-1] != "a" else "b")
    status, headers, body = ask(server, path.format(token=server.token, other=other))
    assert status == 404
    assert server.token not in str(headers) + body.decode()
    assert b"volume" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT"])
def test_nothing_can_be_changed(server, method):
    status, headers, _ = ask(server, f"/{server.token}/0", method)
    assert status == 501
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost", ""])
def test_another_host_is_refused_even_with_the_token(server, host):
    assert ask(server, f"/{server.token}/", Host=host)[0] == 403


def test_localhost_is_this_machine(server):
    assert ask(server, f"/{server.token}/", Host=f"localhost:{server.server_port}")[0] == 200


def test_other_machines_cannot_connect_and_tokens_differ(server):
    assert server.server_address[0] == "127.0.0.1"
    with socket.socket() as probe, pytest.raises(OSError):
        probe.connect(("127.0.0.2", server.server_port))
    with LocalServer(CONTENTS) as other:
        assert other.token != server.token
        assert len(other.token) >= 43  # 256 bits
