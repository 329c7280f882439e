import os
import socket
from pathlib import Path

import pytest

from draftstore.errors import DraftstoreError
from draftstore.remote import addresses
from draftstore.remote.addresses import Address, check_owner, default_socket, own_folder


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
    folder.chmod(0o755)
    check_owner(str(folder / "s"))
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    if folder.stat().st_uid != 0:
        with pytest.raises(PermissionError, match="another user"):
            check_owner(str(folder / "s"))
    folder.rename(tmp_path / "real")
    folder.symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError):
        check_owner(str(folder / "s"))
    for name in ("s", "*"):
        with pytest.raises(PermissionError, match="another user"):
            Address.parse(folder / name).places()


def test_a_unix_socket_is_one_place_and_a_pattern_those_that_are_there(tmp_path: Path) -> None:
    assert Address.parse("/x").places() == [(socket.AF_UNIX, "/x")]
    pattern = Address.parse(tmp_path / "lookup-*.sock")
    assert str(pattern) == f"unix:{tmp_path}/lookup-*.sock"
    with pytest.raises(FileNotFoundError, match=r"no socket /.*lookup-\*\.sock"):
        pattern.places()
    for name in ("lookup-3", "lookup-1", "lookup-4", "lookup-2", "other-5"):
        (tmp_path / f"{name}.sock").touch()
    assert pattern.places() == [(socket.AF_UNIX, str(tmp_path / f"lookup-{i}.sock")) for i in (1, 2, 3, 4)]


def test_a_port_is_the_places_of_its_host_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Address.parse("127.0.0.1:5").places() == [(socket.AF_INET, ("127.0.0.1", 5))]
    hosts = ["10.0.0.2", "10.0.0.1", "10.0.0.2"]
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 5)) for host in hosts]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert Address.parse("draft-host:5").places() == [(socket.AF_INET, (host, 5)) for host in hosts[:2]]


def test_a_name_that_no_host_can_have_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="is not a host name"):
        Address.parse("a..b:5").places()
