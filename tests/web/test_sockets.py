"""What only a raw socket shows: ambiguous lengths, slow and endless bodies, and that the connection ends well."""

import asyncio
import json
import socket
import struct
import threading
import time

import pytest
import uvicorn

from app.web import incoming, outgoing, wire
from tests.web.stand_in import make_app

GOOD = json.dumps({"queue": "q", "payload": 1}).encode()


@pytest.fixture(scope="module")
def port():
    yield from served(make_app())


def served(app):
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=wire.BoundedHttp, ws="none", log_config=None, lifespan="off", timeout_keep_alive=75
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(10)


def exchange(port: int, *parts: bytes, pause: float = 0.0, timeout: float = 5.0) -> bytes:
    """Send, and read until the answer is whole or the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                if pause:
                    time.sleep(pause)
        except (BrokenPipeError, ConnectionResetError):
            pass
        return whole_answer(connection)


def whole_answer(connection: socket.socket) -> bytes:
    got = b""
    try:
        while chunk := connection.recv(65536):
            got += chunk
            head, _, body = got.partition(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:") and len(body) >= int(line.split(b":")[1]):
                    return got
    except ConnectionResetError:
        pass
    return got


def head(*lines: str, method: str = "POST", path: str = "/v1/things") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *lines, "", ""]).encode("latin-1")


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


AMBIGUOUS = [
    (head("Content-Length: 5", "Content-Length: 6"), b"{}{}{}"),
    (head("Content-Length: 2", "Content-Length: 2"), b"{}"),
    (head("Content-Length: 2, 2"), b"{}"),
    (head("Content-Length: -1"), b"{}"),
    (head("Content-Length: +2"), b"{}"),
    (head("Content-Length: 0x2"), b"{}"),
    (head("Content-Length: 2 2"), b"{}"),
    (head("Content-Length: 99999999999999999999999"), b"{}"),
    (head("Content-Length: 2", "Transfer-Encoding: chunked"), b"2\r\n{}\r\n0\r\n\r\n"),
    (head("Transfer-Encoding: chunked", "Transfer-Encoding: identity"), b"2\r\n{}\r\n0\r\n\r\n"),
    (head("Transfer-Encoding: xchunked"), b"{}"),
    (head("Transfer-Encoding: chunked"), b"zz\r\n{}\r\n0\r\n\r\n"),
    (head("Transfer-Encoding: chunked"), b"-2\r\n{}\r\n0\r\n\r\n"),
    (head("X: a\r\n folded", "Content-Length: 2"), b"{}"),
    (head("X\x00: a"), b""),
    (head("X : a"), b""),
    (head(method="GET", path="//v1/things"), b""),
    (head(method="GET", path="/v1%2fthings/x/y"), b""),
    (head("Host: evil.example", method="GET"), b""),
    (b"GET /v1/things HTTP/1.1\r\n\r\n", b""),
    (b"GET /v1/things HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n", b""),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01", b""),
    (b"GET\r\n\r\n", b""),
]


@pytest.mark.parametrize(("first", "rest"), AMBIGUOUS, ids=range(len(AMBIGUOUS)))
def test_ambiguous_requests_are_refused(port, first, rest):
    answer = exchange(port, first, rest, timeout=2.0)
    assert 400 <= status(answer) < 500 or answer == b"", answer[:300]
    assert status(exchange(port, head(method="GET", path="/livez"))) == 200


def test_413_comes_before_the_rest_is_read(port):
    begun = time.monotonic()
    answer = exchange(port, head(f"Content-Length: {1 << 30}"), b"x" * 1000)
    assert status(answer) == 413
    assert b"connection: close" in answer.lower()
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "too-large"
    assert time.monotonic() - begun < 1


def test_413_without_a_length(port):
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    answer = exchange(port, head("Transfer-Encoding: chunked"), *[chunk] * 20)
    assert status(answer) == 413
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["limit"] == 1 << 20


def test_a_client_that_sends_first_and_reads_later_gets_its_413(port):
    size = 8 << 20
    answer = exchange(port, head(f"Content-Length: {size}"), *[b" " * 65536] * (size // 65536))
    assert status(answer) == 413


def test_an_expectation_is_not_met_for_a_body_too_large(port):
    answer = exchange(port, head(f"Content-Length: {1 << 30}", "Expect: 100-continue"))
    assert status(answer) == 413


def test_a_slow_body_is_ended(port, monkeypatch):
    monkeypatch.setattr(incoming, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(outgoing, "LINGER_SECONDS", 0.1)
    answer = exchange(port, head("Content-Length: 1000"), b"{", b'"', pause=0.05)
    assert status(answer) == 408
    assert b"connection: close" in answer.lower()


def test_a_client_that_goes_in_mid_body_does_no_harm(port):
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(head("Content-Length: 1000") + b"{")
    assert status(exchange(port, head(method="GET", path="/livez"))) == 200


def test_a_connection_is_kept_after_a_refusal(port):
    """Also when the body of the refused call was never looked at."""
    body = b"x" * 5_000
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        for path in ("/nope", "/livez", "/v1/things"):
            connection.sendall(head(f"Content-Length: {len(body)}", path=path) + body)
            assert status(whole_answer(connection)) in (404, 405, 422)
        connection.sendall(head(f"Content-Length: {len(GOOD)}") + GOOD)
        assert status(whole_answer(connection)) == 200


def test_pipelined_requests_are_answered_in_order(port):
    one = head(f"Content-Length: {len(GOOD)}") + GOOD
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(one * 3 + head(method="GET", path="/nope"))
        got = b""
        while got.count(b"HTTP/1.1 ") < 4 or not got.endswith(b"}"):
            got += connection.recv(65536)
    assert [int(part[:3]) for part in got.split(b"HTTP/1.1 ")[1:]] == [200, 200, 200, 404]


class Waiting:
    """Answers `/wait…` when the client is gone or `let_go` is set, all else at once."""

    def __init__(self) -> None:
        self.facts: list[str] = []
        self.let_go = threading.Event()

    async def __call__(self, scope, receive, send):
        if scope["path"].startswith("/wait"):
            self.facts.append("waits")
            while not self.let_go.is_set():
                try:
                    async with asyncio.timeout(0.02):
                        if (await receive())["type"] == "http.disconnect":
                            self.facts.append("gone")
                            return
                except TimeoutError:
                    pass
        content, more = b"", not scope["path"].startswith("/wait")
        while more:
            message = await receive()
            content += message.get("body", b"")
            more = message.get("more_body", False)
        content = f"{scope['path']} {len(content)}".encode()
        length = str(len(content)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": content})

    def until(self, *facts: str) -> None:
        deadline = time.monotonic() + 5
        while self.facts != list(facts):
            assert time.monotonic() < deadline, self.facts
            time.sleep(0.01)


@pytest.fixture
def waiting():
    return Waiting()


@pytest.fixture
def waiting_port(waiting):
    yield from served(waiting)


@pytest.mark.parametrize("more", [1, 3])
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_a_client_that_goes_with_requests_queued_is_noticed(waiting, waiting_port, caplog, more, apart, reset):
    with socket.create_connection(("127.0.0.1", waiting_port), 5) as connection:
        later = head(method="GET", path="/b") * more + b"GET /half HTTP/1.1\r\nX: "
        connection.sendall(head(method="GET", path="/wait") + (b"" if apart else later))
        waiting.until("waits")
        if apart:
            connection.sendall(later)
            time.sleep(0.05)
            connection.sendall(b"y")
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    waiting.until("waits", "gone")
    assert "Exception" not in caplog.text


def test_what_comes_behind_queued_requests_is_served_in_order(waiting, waiting_port):
    """Heads and bodies in pieces, more of them than are held."""
    body = b"x" * 100_000
    with socket.create_connection(("127.0.0.1", waiting_port), 5) as connection:
        connection.sendall(head(method="GET", path="/wait"))
        waiting.until("waits")
        pieces = [
            head(method="GET", path="/b") + b"POST /c HTT",
            b"P/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n12",
            b"345" + head(f"Content-Length: {len(body)}", path="/d") + body[:10],
            body[10:] + head(method="GET", path="/e"),
            head(method="GET", path="/f"),
        ]
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.02)
        waiting.let_go.set()
        got = b""
        while not got.endswith(b"/f 0"):
            part = connection.recv(65536)
            assert part, got
            got += part
    answers = [part.partition(b"\r\n\r\n")[2] for part in got.split(b"HTTP/1.1 ")[1:]]
    assert answers == [b"/wait 0", b"/b 0", b"/c 5", b"/d 100000", b"/e 0", b"/f 0"]


def test_a_head_of_ten_megabytes_is_refused(port):
    answer = exchange(port, head("X: " + "a" * 10_000_000, method="GET"), timeout=10)
    assert status(answer) in (0, 400)  # 0: the reset overtook the answer
    answer = exchange(
        port, *[b"GET /livez HTTP/1.1\r\n" if i == 0 else b"X: " + b"a" * 998 + b"\r\n" for i in range(80)]
    )
    assert status(answer) in (0, 400)
    assert status(exchange(port, b"GET /livez HTTP/1.1\r\nX: " + b"a" * 90_000)) in (0, 400), "in one read"
    assert status(exchange(port, head(method="GET", path="/livez"))) == 200


def test_a_head_within_the_bound_is_taken(port):
    assert status(exchange(port, head("X: " + "a" * 60_000, method="GET", path="/livez"))) == 200


def test_a_slow_head_is_ended(port, monkeypatch):
    monkeypatch.setattr(wire, "HEAD_SECONDS", 0.2)
    for first in (b"", b"GET /livez HT", b"GET /livez HTTP/1.1\r\nHost: 127"):
        answer = exchange(port, first)
        assert status(answer) == 400
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "malformed-request"


def test_what_is_no_http_gets_a_problem_too(port):
    answer = exchange(port, b"\x16\x03\x01\x02\x00\r\n\r\n")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "malformed-request"


def test_a_kept_connection_outlives_the_bound_of_a_head(port, monkeypatch):
    monkeypatch.setattr(wire, "HEAD_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(head(method="GET", path="/livez"))
        assert status(whole_answer(connection)) == 200
        connection.settimeout(0.4)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(5)
        connection.sendall(head(method="GET", path="/livez"))
        assert status(whole_answer(connection)) == 200


def test_many_slow_bodies_keep_nobody_waiting(port):
    slow = []
    try:
        for _ in range(200):
            connection = socket.create_connection(("127.0.0.1", port), 5)
            connection.sendall(head("Content-Length: 1000") + b"{")
            slow.append(connection)
        begun = time.monotonic()
        for _ in range(20):
            assert status(exchange(port, head(method="GET", path="/livez"))) == 200
        assert time.monotonic() - begun < 2
    finally:
        for connection in slow:
            connection.close()
