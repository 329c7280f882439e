"""The listening sockets of services: one service per path, several per port; nothing of others is replaced."""

import socket
from contextlib import closing
from pathlib import Path

import pytest

from draftstore.errors import LookupServiceError
from services.common.addresses import ListenAddress
from services.common.sockets import UnixListener, open_tcp, port_of

LOCAL = ListenAddress("127.0.0.1", 0)


def test_one_service_at_a_time_has_a_path(tmp_path: Path) -> None:
    with (
        closing(UnixListener(tmp_path / "s")),
        pytest.raises(LookupServiceError, match="another lookup service"),
    ):
        UnixListener(tmp_path / "s")
    with closing(UnixListener(tmp_path / "s")) as after:
        assert after.path.is_socket()
    assert not after.path.exists()


def test_the_socket_of_a_dead_service_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))
    with closing(UnixListener(tmp_path / "s")) as unix, socket.socket(socket.AF_UNIX) as client:
        unix.socket.listen()
        client.connect(str(tmp_path / "s"))


def test_files_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "other"))
        other.listen()
        for name, words in (("file", "a file that is not a socket"), ("other", "a program listens there")):
            with pytest.raises(LookupServiceError, match=f"{words}.*choose another --socket"):
                UnixListener(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "other").is_socket()


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_permissions_of_the_socket_and_of_its_folder(tmp_path: Path, mode: int) -> None:
    with closing(UnixListener(tmp_path / "new" / "s", mode)) as unix:
        assert unix.path.stat().st_mode & 0o777 == mode
        assert unix.path.parent.stat().st_mode & 0o777 == 0o700


def test_services_may_share_a_port() -> None:
    [one] = open_tcp(LOCAL, "--listen", shared=True)
    with one:
        [two] = open_tcp(LOCAL._replace(port=port_of([one])), "--listen", shared=True)
        with two:
            assert port_of([two]) == port_of([one]) > 0


def test_a_port_that_is_not_shared_is_taken() -> None:
    [one] = open_tcp(LOCAL, "--http")
    with (
        one,
        pytest.raises(
            LookupServiceError, match="is in use: stop the program there, or choose another --http"
        ),
    ):
        open_tcp(LOCAL._replace(port=port_of([one])), "--http", shared=True)
