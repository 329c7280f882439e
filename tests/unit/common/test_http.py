"""The HTTP server of the services and its guard: clients that are slow, numerous, foreign or deceptive."""

import asyncio
import re
import socket
import threading
from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.common import http
from services.common.addresses import ListenAddress
from services.common.http import ProblemError, is_own_host, make_app, own_names, read_body
from tests.fakes.sites import browse, connect, hold, serving
from tests.fakes.waiting import SECONDS, until

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


async def echo(request: Request) -> Response:
    return Response(await read_body(request, 64, "send less"))


async def wait(request: Request) -> Response:
    await read_body(request, 64, "send less")
    while not await request.is_disconnected():
        await asyncio.sleep(0.01)
    return Response()


async def health(_: Request) -> Response:
    return Response("alive")


def show(problem: ProblemError) -> Response:
    return Response(problem.message, problem.status, problem.headers)


@pytest.fixture
def app() -> Starlette:
    routes = [Route("/", echo, methods=["POST"]), Route("/wait", wait, methods=["POST"])]
    return make_app(routes + [Route(path, health) for path in http.HEALTH], show, hosts=("box",))


@pytest.fixture
def address(app: Starlette) -> Iterator[str]:
    with serving(app) as address:
        yield address


def test_health_is_answered_beyond_the_limit_of_requests(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "REQUESTS", 2)
    with hold(address, "/wait") as first, hold(address, "/wait") as second, browse(address) as client:
        for waiting in (first, second):
            waiting.sendall(b"{}")
        until(lambda: client.post("/", json=1).status_code == 503)
        assert client.post("/", json=1).headers["retry-after"] == "1"
        assert {client.get(path).status_code for path in http.HEALTH} == {200}


def test_slow_bodies_get_an_answer(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_SECONDS", 0.2)
    with hold(address, "/") as slow:
        assert slow.recv(65_536).startswith(b"HTTP/1.1 408")


LENGTHS = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
HIDDEN = b"0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        # No more than the server reads: closing with unread bytes would reset the connection.
        (HEAD + b"X: " + b"x" * http.HEADERS, rb".{8} 400 "),
        (HEAD + LENGTHS + HIDDEN, rb".{8} 400 (?!.*HTTP/1.1)"),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n[]", rb".{8} 415 .*'gzip'"),
        # Health checks of proxies need no host.
        (b"GET /healthz HTTP/1.0\r\n\r\n", rb".{8} 200 "),
        (b"GET / HTTP/1.0\r\n\r\n", rb".{8} 400 "),
        (b"GET /healthz HTTP/1.1\r\n\r\n", rb".{8} 400 "),
        (b"GET /healthz HTTP/1.0\r\nHost: evil.example\r\n\r\n", rb".{8} 400 "),
    ],
)
def test_requests_as_bytes(address: str, sent: bytes, answer: bytes) -> None:
    with connect(address, sent) as client:
        client.shutdown(socket.SHUT_WR)
        found = b"".join(iter(lambda: client.recv(65_536), b""))
    assert re.match(answer, found, re.DOTALL)


def test_requests_under_way_are_finished_at_the_end(app: Starlette) -> None:
    with serving(app, drain_seconds=SECONDS) as address:
        begun = hold(address, "/", b"[1]")
        threading.Timer(0.1, begun.sendall, (b"[1]",)).start()
    with begun:
        assert begun.recv(65_536).endswith(b"[1]")


def test_requests_that_do_not_end_are_refused_at_the_end(
    app: Starlette, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(app, drain_seconds=0) as address:
        begun = hold(address, "/")
    with begun:
        assert begun.recv(65_536).startswith(b"HTTP/1.1 503")
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("host", "own"),
    [
        *((host, True) for host in ("LocalHost:80", "a.localhost", "192.168.1.5", "[::1]:7780", "box.:80")),
        *(
            (host, False)
            for host in ("localhost.evil.example", "127.0.0.1.evil.example:80", "notlocalhost", "")
        ),
    ],
)
def test_names_of_this_machine(host: str, own: bool) -> None:
    assert is_own_host(host, {"box"}) == own


@pytest.mark.parametrize(
    ("endpoint", "allowed", "tokens", "names"),
    [
        ("127.0.0.1:1", (), True, ("127.0.0.1",)),
        ("0.0.0.0:1", ("box",), False, ("0.0.0.0", "box")),
        ("0.0.0.0:1", (), True, None),
        ("0.0.0.0:1", ("box",), True, ("0.0.0.0", "box")),
    ],
)
def test_names_that_requests_may_use(
    endpoint: str, allowed: tuple[str, ...], tokens: bool, names: tuple[str, ...] | None
) -> None:
    assert own_names(ListenAddress.parse(endpoint, 1), allowed, tokens=tokens) == names
