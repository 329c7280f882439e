"""Encrypted frames: the same drafts, and nothing for clients that do not trust the certificate."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from draftstore.errors import DraftstoreError, LookupServiceError
from draftstore.remote.addresses import Address
from draftstore.remote.client import RemoteStore
from draftstore.remote.connection import Connection, client_context
from draftstore.stores.registry import open_store
from services.common.permissions import Grant, Permissions, hash_token
from services.lookup.settings import Limits
from tests.fakes.certificates import Certificate, make_certificate, needs_openssl
from tests.fakes.lookups import Lookups, contexts_of, serving
from tests.fakes.waiting import SECONDS, until
from tests.unit.remote.test_client import as_bytes

pytestmark = needs_openssl
BATCH = 300
"""Contexts of a request of 150 kB, with an answer of more than one record."""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def lookups(small_store: Path, certificate: Certificate) -> Iterator[Lookups]:
    permissions = Permissions([Grant("a", frozenset(["chat"]), hash_token("right"))])
    with serving({"chat": small_store}, permissions=permissions, tls=certificate.context()) as running:
        yield running


def client_of(lookups: Lookups, trusted: Any, **settings: Any) -> RemoteStore:
    return RemoteStore(
        address_of(lookups), "chat", **{"tls": trusted, "token": "right", "deadline": SECONDS, **settings}
    )


def address_of(lookups: Lookups, scheme: str = "tcp") -> str:
    return f"{scheme}://localhost:{lookups.tcp[1]}"


def expected_of(path: Path, contexts: Any) -> list[tuple[bytes, int, int]]:
    with closing(open_store(path)) as store:
        return as_bytes(store.drafter().draft(contexts))


def test_threads_get_the_drafts_of_the_store(
    lookups: Lookups, small_store: Path, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))
    with RemoteStore(address_of(lookups, "tls"), "chat", token="right", deadline=SECONDS) as store:
        assert store.check()["name"] == "chat"

        def ask(seed: int) -> bool:
            wide = contexts_of(small_store, BATCH if seed % 4 == 0 else 3, 128, seed)
            return as_bytes(store.drafter().draft(wide)) == expected_of(small_store, wide)

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(ask, range(12)))
        assert (store.counters["answered"], store.counters["pauses"]) == (12, 0)


def test_nothing_is_read_unencrypted_when_another_thread_closes_the_client(
    lookups: Lookups, certificate: Certificate, small_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Connection.send

    def closed_meanwhile(connection: Connection, data: bytes, end: float) -> None:
        send(connection, data, end)
        if connection in used:
            store.close()
        used.append(connection)

    used: list[Connection] = []
    monkeypatch.setattr(Connection, "send", closed_meanwhile)
    with client_of(lookups, certificate.file) as store:
        store.drafter().draft(contexts_of(small_store, 1), 8)
    assert store.counters["answered"] + store.counters["closed"] == 1


def test_a_handshake_goes_on_in_the_next_call(
    lookups: Lookups, certificate: Certificate, small_store: Path
) -> None:
    contexts = contexts_of(small_store, 1)
    with client_of(lookups, certificate.file, deadline=1e-6) as store:
        for _ in range(20):
            assert len(store.drafter().draft(contexts)) == 1
        store.deadline = SECONDS
        store.check()  # ends the pause
        assert as_bytes(store.drafter().draft(contexts)) == expected_of(small_store, contexts)


def test_a_certificate_that_is_unknown_or_of_another_host_is_not_trusted(
    lookups: Lookups, small_store: Path, tmp_path: Path
) -> None:
    named = make_certificate(tmp_path, host="DNS:elsewhere.example")
    with serving({"chat": small_store}, tls=named.context()) as running:
        for service, trusted in (
            (lookups, True),
            (lookups, make_certificate(tmp_path, "other").file),
            (running, named.file),
        ):
            with client_of(service, trusted) as store:
                with pytest.raises(LookupServiceError, match="certificate verify failed"):
                    store.check()
                [draft] = store.drafter().draft(contexts_of(small_store, 1))
                assert len(draft.tree) == 0


def test_handshakes_that_never_end_are_cut_off(small_store: Path, certificate: Certificate) -> None:
    limits = Limits(patience=0.5)
    with serving({"chat": small_store}, limits=limits, tls=certificate.context()) as running:
        silent = [socket.create_connection(running.tcp) for _ in range(150)]  # more than are waited for
        for connection in silent:
            connection.settimeout(SECONDS)
            assert connection.recv(1) == b""
            connection.close()

        def answers() -> bool:  # unless the machine takes longer for its handshake, too
            with client_of(running, certificate.file) as store, suppress(LookupServiceError):
                return bool(store.check(seconds=SECONDS))
            return False

        until(answers)


def test_what_cannot_be_trusted(tmp_path: Path) -> None:
    (tmp_path / "no.pem").write_text("nothing")
    for wrong in ("no.pem", "none.pem"):
        with pytest.raises(DraftstoreError, match=f"the certificates in .*{wrong} cannot be used"):
            RemoteStore("localhost:1", "chat", tls=tmp_path / wrong)
    with pytest.raises(DraftstoreError, match="needs no encryption"):
        RemoteStore("/tmp/s", "chat", tls=True)
    assert client_context(None, Address.parse("tcp://localhost")) is None
    assert client_context(False, Address.parse("tls://localhost")) is None
