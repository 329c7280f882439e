"""A bad service only costs speed: every fault is counted, and decoding gives the same text as without drafts."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftstore.errors import LookupServiceError
from draftstore.remote import client as clients
from draftstore.remote import wire
from draftstore.remote.client import RemoteStore
from draftstore.remote.connection import Connection, RequestFailed
from draftstore.remote.counters import FAILURES, FIRST, LONGEST, Outcome, Pauses
from draftstore.remote.wire import Status
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.stores.rest.store import RestStore
from tests.fakes import faults
from tests.fakes.faults import FAULTS, TOKENIZER, Service
from tests.fakes.lookups import contexts_of
from tests.fakes.waiting import SECONDS

SHORT = 0.02
"""Seconds; the deadline where no answer is expected."""
IDENTITY = TokenizerIdentity("small", TOKENIZER)
OURS = {Outcome.BAD_REQUEST, Outcome.TOO_LARGE}
REFUSALS = {Outcome.NOT_FOUND, Outcome.UNAUTHORIZED, Outcome.FORBIDDEN, Outcome.OTHER_TOKENIZER}


@pytest.fixture(scope="module")
def store(small_store: Path) -> Iterator[RestStore]:
    opened = RestStore.open(small_store)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def contexts(small_store: Path) -> np.ndarray:
    return contexts_of(small_store, 4)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of pauses, which passes only when a test says so."""
    time_now = [100.0]
    monkeypatch.setattr(clients, "Pauses", lambda: Pauses(lambda: time_now[0]))
    return time_now


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every call ask, whatever happened before."""
    monkeypatch.setattr(Pauses, "holds", False)


def client_of(service: Service, deadline: float = SHORT, **more: Any) -> RemoteStore:
    size = service.store.manifest.vocab_size
    return RemoteStore(
        service.address, "chat", deadline=deadline, vocab_size=size, tokenizer=IDENTITY, **more
    )


def check_plain(client: RemoteStore) -> None:
    """Decode 60 tokens: no draft may come, and nothing may go wrong."""
    session = client.drafter().session([1, 2, 3])
    for token in range(60):
        assert len(session.propose()) == 0
        session.observe([token % 50])


@pytest.mark.parametrize("fault", FAULTS)
def test_decoding_goes_on_and_the_fault_is_counted(fault: str, store: RestStore) -> None:
    behave, outcome = FAULTS[fault]
    patience = SHORT if outcome is Outcome.TIMEOUT else SECONDS
    with Service(store, behave) as service, client_of(service, patience) as client:
        check_plain(client)
        counters = client.counters
        assert counters[outcome] > 0
        assert counters[outcome] + counters["skipped"] == counters.calls == counters["contexts"] == 60
        assert counters["drafted"] == counters["nodes"] == 0
        assert (counters["skipped"] > 0) == (outcome not in OURS)
        asked = OURS | REFUSALS | {Outcome.BUSY, Outcome.UNAVAILABLE}
        assert (counters["pauses"] > 0) == (outcome not in asked)


def check_recovery(client: RemoteStore, store: RestStore, contexts: np.ndarray) -> None:
    """Ask until there is an answer, which must be the right one."""
    client.deadline = SECONDS
    before, end = client.counters["answered"], time.monotonic() + SECONDS
    while client.counters["answered"] == before:
        drafts = client.drafter().draft(contexts)
        assert time.monotonic() < end, client.counters
    assert drafts == store.drafter().draft(contexts)


def test_a_service_that_is_not_there(store: RestStore, tmp_path: Path) -> None:
    with Service(store, tcp=True) as free:
        pass
    for address in (tmp_path / "absent", tmp_path / "*.sock", free.address):
        with RemoteStore(address, "chat", deadline=SECONDS, vocab_size=50) as client:
            check_plain(client)
            assert client.counters["unreachable"] >= 1
            assert client.counters["unreachable"] + client.counters["skipped"] == 60
            with pytest.raises(LookupServiceError, match=r"'chat' .*is `draftstore serve` running there"):
                client.check()


def test_a_host_that_takes_no_connections() -> None:
    with deaf_port() as port, RemoteStore(f"127.0.0.1:{port}", "chat", deadline=SHORT) as client:
        check_plain(client)
        assert client.counters["timeout"] >= 3
        with pytest.raises(LookupServiceError, match=r"no connection in time"):
            client.check(seconds=0.1)


@contextmanager
def deaf_port() -> Iterator[int]:
    """Yield a port of 127.0.0.1 whose queue of connections is full: who connects waits."""
    with ExitStack() as waiting, socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        port = int(listening.getsockname()[1])
        for _ in range(4):
            client = waiting.enter_context(socket.socket(socket.AF_INET))
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(("127.0.0.1", port))
        yield port


@pytest.mark.parametrize("tcp", [False, True])
def test_a_service_that_restarts(tcp: bool, store: RestStore, contexts: np.ndarray) -> None:
    with Service(store, tcp=tcp) as service, client_of(service, SECONDS) as client:
        for _ in range(2):
            check_recovery(client, store, contexts)
            service.stop()
            check_plain(client)
            service.start()
        check_recovery(client, store, contexts)
        assert client.counters["closed"] >= 2


@pytest.mark.usefixtures("eager")
def test_whichever_of_several_services_is_there_answers(store: RestStore, contexts: np.ndarray) -> None:
    with Service(store, faults.restarts_after(1)) as service:
        for dead in ("0", "1"):
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(service.address + dead)
        with RemoteStore(f"{service.address}*", "chat", deadline=SECONDS) as client:
            for _ in range(6):
                client.drafter().draft(contexts)
            assert (client.counters["answered"], client.counters["closed"]) == (3, 3)


@pytest.mark.usefixtures("eager")
def test_a_late_answer_is_never_taken_for_another(store: RestStore, contexts: np.ndarray) -> None:
    with Service(store, faults.is_late) as service, client_of(service) as client:
        for row in range(4):
            [draft] = client.drafter().draft(contexts[row : row + 1])
            assert len(draft.tree) == 0
        assert client.counters["timeout"] == client.counters["connections"] == 4
        service.behave = faults.right
        check_recovery(client, store, contexts)


def test_an_answer_that_arrives_in_pieces_is_not_read_beyond_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    with theirs:
        theirs.sendall(wire.frame(wire.Operation.DRAFT | wire.ANSWER, 1, bytes(100_000)))
        with pytest.raises(RequestFailed) as failed:
            connection.receive(1 << 20, time.monotonic())
    assert failed.value.outcome == Outcome.TIMEOUT


@pytest.mark.usefixtures("eager")
def test_more_than_a_service_reads(store: RestStore) -> None:
    large = np.full((512, 250), 3, np.int32)  # half a megabyte, more than a socket holds
    with Service(store, faults.reads_nothing) as service, client_of(service) as client:
        for _ in range(4):
            assert all(len(draft.tree) == 0 for draft in client.drafter().draft(large))
        assert client.counters["timeout"] == 4


@pytest.mark.parametrize(
    ("status", "asked", "pause"),
    [
        (Status.BUSY, 3.0, 3.0),
        (Status.UNAVAILABLE, 1e6, 30.0),
        (Status.UNAUTHORIZED, 0.0, 5.0),
        (Status.FORBIDDEN, 0.0, 5.0),
        (Status.NOT_FOUND, 0.0, 5.0),
    ],
)
def test_a_service_that_refuses_is_left_alone_for_a_while(
    status: Status, asked: float, pause: float, store: RestStore, contexts: np.ndarray, now: list[float]
) -> None:
    with Service(store, faults.fails_with(status, asked)) as service, client_of(service, SECONDS) as client:
        for wait, requests in [(0.0, 1), (0.0, 1), (pause - 0.01, 1), (0.02, 2), (0.0, 2)]:
            now[0] += wait
            client.drafter().draft(contexts)
            assert service.requests == requests


def test_a_refusal_is_logged_once(
    store: RestStore, contexts: np.ndarray, caplog: pytest.LogCaptureFixture, now: list[float]
) -> None:
    behave, outcome = FAULTS["forbidden"]
    with Service(store, behave) as service, client_of(service, SECONDS) as client:
        for attempt in range(1, 4):
            client.drafter().draft(contexts)
            assert client.counters[outcome] == attempt
            now[0] += 6.0
        (record,) = [record for record in caplog.records if record.name == "draftstore.remote.client"]
        text = record.getMessage()
        assert text.startswith(f"no drafts of 'chat' from unix:{service.address} (forbidden)")
        assert text.isprintable()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("hangs", "no answer in time"),
        ("http", "is this the draft port"),
        ("another tokenizer", "come from the tokenizer 00000000000000bb, expected 00000000000000aa: publish"),
        ("busy", "because of"),
    ],
)
def test_check_says_what_is_wrong(fault: str, message: str, store: RestStore) -> None:
    with Service(store, FAULTS[fault][0]) as service, client_of(service) as client:
        with pytest.raises(LookupServiceError, match=rf"no drafts of 'chat' from unix:/.*: .*{message}"):
            client.check(seconds=0.2 if fault == "hangs" else SECONDS)
        assert client.counters.calls == 0


@pytest.mark.parametrize(
    ("key", "size", "taken"),
    [
        ("hidden_size", 1 << 16, 1 << 16),
        ("hidden_size", (1 << 16) + 1, 0),
        ("vocab_size", 1, 1),
        ("vocab_size", 0, 1 << 31),
        ("vocab_size", (1 << 31) + 1, 1 << 31),
    ],
)
def test_check_takes_over_sizes_that_make_sense(key: str, size: int, taken: int, store: RestStore) -> None:
    def behave(peer: faults.Peer) -> None:
        while True:
            frame = peer.read()
            listed = {"releases": [{"name": "chat", key: size}]}
            answer = wire.encode_json(wire.Operation.RELEASES, frame.header.request_id, listed)
            is_list = frame.header.operation == wire.Operation.RELEASES
            peer.send(answer if is_list else peer.service.answer(frame))

    with Service(store, behave) as service, RemoteStore(service.address, "chat") as client:
        client.check()
        assert getattr(client, key) == taken


def test_a_list_of_releases_has_at_most_a_megabyte(store: RestStore) -> None:
    document = b'{"releases": [{}]}'.ljust(1 << 20)

    def behave(peer: faults.Peer) -> None:
        number = peer.read().header.request_id
        peer.send(wire.frame(wire.Operation.RELEASES | wire.ANSWER, number, document))

    with Service(store, behave) as service, client_of(service) as client:
        assert client.releases() == [{}]
        document += b" "
        with pytest.raises(LookupServiceError, match="expected at most 1,048,576"):
            client.releases()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make() -> tuple[Pauses, Clock]:
    clock = Clock()
    return Pauses(clock), clock


def length_of(pauses: Pauses, clock: Clock) -> float:
    """Return the seconds until the pause is over."""
    start = clock.now
    while pauses.holds:
        clock.now += 0.001
    return clock.now - start


def test_a_pause_begins_after_three_failures_in_a_row_or_a_refused_connection() -> None:
    pauses, _ = make()
    for _ in range(10):  # never three in a row
        assert not any(pauses.fail() for _ in range(FAILURES - 1))
        pauses.succeed()
    assert [pauses.fail() for _ in range(FAILURES)] == [False] * (FAILURES - 1) + [True]
    assert pauses.holds
    assert make()[0].fail(refused=True)


def test_it_doubles_with_every_failure_up_to_the_longest_and_an_answer_starts_over() -> None:
    pauses, clock = make()
    pauses.fail(refused=True)
    for expected in [FIRST * 2**i for i in range(7)] + [LONGEST] * 3:
        assert not pauses.fail()  # of another thread in the same moment
        assert length_of(pauses, clock) == pytest.approx(expected, abs=0.0011)
        assert pauses.fail()
    pauses.succeed()
    assert length_of(pauses, clock) == 0
    assert not pauses.fail()
    assert pauses.fail(refused=True)
    assert length_of(pauses, clock) == pytest.approx(FIRST, abs=0.0011)
