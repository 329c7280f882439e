import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from draftstore.errors import DraftstoreError
from draftstore.remote import addresses
from draftstore.remote.addresses import Address, Endpoint, check_owner, default_socket, own_folder
from tests.fakes.waiting import SECONDS


@pytest.mark.parametrize(
    ("text", "address", "shown"),
    [
        ("unix:/run/d.sock", Address(path="/run/d.sock"), "unix:/run/d.sock"),
        ("unix:///run/d.sock", Address(path="/run/d.sock"), "unix:/run/d.sock"),
        ("/run/d.sock", Address(path="/run/d.sock"), "unix:/run/d.sock"),
        (Path("/run/a:1"), Address(path="/run/a:1"), "unix:/run/a:1"),
        ("tcp://10.0.0.7:7000", Address(host="10.0.0.7", port=7000), "tcp://10.0.0.7:7000"),
        ("tcp://draft-host/", Address(host="draft-host", port=7781), "tcp://draft-host:7781"),
        ("tls://draft-host", Address(host="draft-host", port=7781, tls=True), "tls://draft-host:7781"),
        ("localhost:1", Address(host="localhost", port=1), "tcp://localhost:1"),
        ("[::1]:65535", Address(host="::1", port=65535), "tcp://[::1]:65535"),
        ("tcp://[fe80::1%eth0]", Address(host="fe80::1%eth0", port=7781), "tcp://[fe80::1%eth0]:7781"),
    ],
)
def test_addresses_are_read_and_shown(text: str | Path, address: Address, shown: str) -> None:
    assert Address.parse(text) == address
    assert str(address) == shown
    assert Address.parse(shown) == address
    assert Address.parse(address) is address


@pytest.mark.parametrize(
    "text",
    [
        "", "host", "host:", ":80", "host:0", "host:65536", "host:x", "host:-1", "tcp://", "tcp://:80", "a b:80",
        "http://host:80", "tcp://host:80/path", "tcp://user@host:80", "host:80?x", "run/d.sock", "./d.sock", "unix:",
        "unix:d.sock", "/run/\0", "[::1", "::1:80:x",
    ],
)  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    expected = "expected unix:/path, /path, tcp://host:port, tls://host:port or host:port"
    with pytest.raises(DraftstoreError, match=expected):
        Address.parse(text)


def test_a_path_that_no_socket_can_have() -> None:
    assert Address.parse("/" + "a" * 106).path
    with pytest.raises(DraftstoreError, match="at most 107 bytes"):
        Address.parse("/" + "ä" * 54)


def test_where_service_and_client_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTSTORE_SOCKET", "/x/y")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_socket() == Path("/x/y")
    monkeypatch.delenv("DRAFTSTORE_SOCKET")
    assert default_socket() == Path("/run/user/7/draftstore.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_socket() == own_folder() / "lookup.sock"
    assert own_folder().name == f"draftstore-{os.getuid()}"


def test_the_folder_of_someone_else_is_not_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "draftstore-x"
    monkeypatch.setattr(addresses, "own_folder", lambda: folder)
    check_owner(str(tmp_path / "elsewhere" / "s"))
    with pytest.raises(FileNotFoundError):
        check_owner(str(folder / "s"))
    folder.mkdir(mode=0o700)
    check_owner(str(folder / "s"))
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="others may write in it"):
        check_owner(str(folder / "s"))
    folder.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    if folder.stat().st_uid != 0:
        with pytest.raises(PermissionError, match="another user"):
            check_owner(str(folder / "s"))
    folder.rename(tmp_path / "real")
    folder.symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError):
        check_owner(str(folder / "s"))
    with pytest.raises(OSError, match="another user"):
        Endpoint(Address(path=str(folder / "s"))).pick()


class Resolver:
    """Stands in for the name service: answers what it is told, when it is let."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.free = threading.Event()
        self.free.set()
        self.asked = 0

    def __call__(self, host: str, port: int, *, type: int, flags: int) -> list[Any]:  # noqa: A002
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror("a name")
        self.asked += 1
        assert self.free.wait(SECONDS)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return [(socket.AF_INET, type, 6, "", (address, port)) for address in answer]


def named(*answers: Any, now: list[float] | None = None) -> tuple[Endpoint, Resolver]:
    resolver = Resolver(*answers)
    clock = [0.0] if now is None else now
    endpoint = Endpoint(Address(host="draft-host", port=5), resolve=resolver, clock=lambda: clock[0])
    endpoint.wait(SECONDS)
    return endpoint, resolver


def settle() -> None:
    for thread in threading.enumerate():
        if thread.name == "draftstore-resolve":
            thread.join(SECONDS)


def test_numbers_need_no_resolving() -> None:
    def resolve(*arguments: Any, **options: Any) -> Any:
        assert options["flags"] & socket.AI_NUMERICHOST
        return socket.getaddrinfo(*arguments, **options)

    assert Endpoint(Address(host="127.0.0.1", port=5), resolve=resolve).pick() == (
        socket.AF_INET,
        ("127.0.0.1", 5),
    )
    assert Endpoint(Address(host="::1", port=5), resolve=resolve).pick()[1][:2] == ("::1", 5)
    assert Endpoint(Address(path="/x")).pick() == (socket.AF_UNIX, "/x")


def test_a_name_is_resolved_without_making_anyone_wait() -> None:
    resolver = Resolver(["10.0.0.1"])
    resolver.free.clear()
    endpoint = Endpoint(Address(host="draft-host", port=5), resolve=resolver)
    with pytest.raises(OSError, match="'draft-host' is not resolved"):
        endpoint.pick()
    resolver.free.set()
    endpoint.wait(SECONDS)
    assert endpoint.pick() == (socket.AF_INET, ("10.0.0.1", 5))
    assert resolver.asked == 1


def test_places_that_fail_are_followed_by_the_next_and_the_last_by_a_new_look() -> None:
    now = [0.0]
    endpoint, resolver = named(["10.0.0.1", "10.0.0.2", "10.0.0.1"], ["10.0.0.3"], now=now)
    assert len(endpoint) == 2
    first = endpoint.pick()
    endpoint.failed(first)
    second = endpoint.pick()
    assert second[1] == ("10.0.0.2", 5)
    endpoint.failed(first)  # what others have noticed already
    assert endpoint.pick() == second
    endpoint.failed(second)
    settle()
    assert endpoint.pick() == first
    assert resolver.asked == 1  # not so soon
    now[0] += 10
    endpoint.failed(first)
    endpoint.failed(second)
    settle()
    assert resolver.asked == 2
    assert endpoint.pick()[1] == ("10.0.0.3", 5)


def test_a_name_that_cannot_be_resolved_is_tried_again() -> None:
    now = [0.0]
    endpoint, resolver = named(
        socket.gaierror("no such host"), UnicodeError("label too long"), ["10.0.0.1"], now=now
    )
    for expected in (2, 3):
        with pytest.raises(OSError, match="not resolved"):
            endpoint.pick()
        now[0] += 10
        with pytest.raises(OSError, match="not resolved"):
            endpoint.pick()
        settle()
        assert resolver.asked == expected
    assert endpoint.pick()[1] == ("10.0.0.1", 5)


def test_what_was_known_stays_while_the_name_service_is_away() -> None:
    now = [0.0]
    endpoint, resolver = named(["10.0.0.1"], socket.gaierror("away"), now=now)
    now[0] += 10
    endpoint.failed(endpoint.pick())
    settle()
    assert resolver.asked == 2
    assert endpoint.pick()[1] == ("10.0.0.1", 5)
