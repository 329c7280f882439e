"""A bad service costs speed alone: every fault is counted, and decoding says what it says without drafts."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.drafting.drafter import Drafter
from draftstore.errors import LookupServiceError
from draftstore.remote import client as clients
from draftstore.remote import wire
from draftstore.remote.answers import RequestFailed, check_answer
from draftstore.remote.client import RemoteStore
from draftstore.remote.connection import Connection
from draftstore.remote.counters import Outcome
from draftstore.remote.quiet import Quiet
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.stores.rest.store import RestStore
from tests.examples import examples
from tests.fakes import faults
from tests.fakes.clients import connected, contexts_of, decode, follows
from tests.fakes.faults import FAULTS, TOKENIZER, Service
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
def story(store: RestStore) -> list[int]:
    tokens = store.index.tokens[:400].astype(np.int64)
    return tokens[tokens < store.manifest.vocab_size].tolist()  # type: ignore[no-any-return]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of pauses, which passes only when a test says so."""
    time_now = [100.0]
    monkeypatch.setattr(clients, "Quiet", lambda: Quiet(lambda: time_now[0]))
    return time_now


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every call ask, whatever happened before."""
    monkeypatch.setattr(Quiet, "holds", False)


def client_of(service: Service, deadline: float = SHORT, **more: Any) -> RemoteStore:
    size = service.store.manifest.vocab_size
    return connected(service.address, deadline=deadline, vocab_size=size, tokenizer=IDENTITY, **more)


def patience(outcome: Outcome) -> float:
    """Return a deadline that is over soon if no answer is to come, and never if there is one."""
    return SHORT if outcome is Outcome.TIMEOUT else SECONDS


def check_plain(drafter: Drafter, story: list[int], vocab_size: int, length: int = 60) -> int:
    """Decode with drafts and without, compare, and return the passes with drafts."""
    model = follows(story, vocab_size)
    expected, _ = decode(None, story[:20], model, length)
    found, passes = decode(drafter, story[:20], model, length)
    assert found == expected
    return passes


@pytest.mark.parametrize("fault", FAULTS)
def test_decoding_goes_on_and_the_fault_is_counted(fault: str, store: RestStore, story: list[int]) -> None:
    behave, outcome = FAULTS[fault]
    with Service(store, behave) as service, client_of(service, patience(outcome)) as client:
        assert check_plain(client.drafter(), story, client.vocab_size) == 60  # no draft was of use
        counters = client.counters
        assert counters[outcome] > 0
        assert counters[outcome] + counters["skipped"] == counters.calls == 60
        assert counters["drafted"] == counters["nodes"] == 0
        assert (counters["skipped"] > 0) == (outcome not in OURS)
        asked = OURS | REFUSALS | {Outcome.BUSY, Outcome.UNAVAILABLE}
        assert (counters["pauses"] > 0) == (outcome not in asked)


def assert_recovers(client: RemoteStore, local: Any, story: list[int]) -> None:
    """Ask until there is an answer, which must be the right one."""
    contexts = contexts_of(local, story, 1, 99)
    contexts[0, -8:] = story[:8]
    client.deadline = SECONDS
    before, end = client.counters["answered"], time.monotonic() + SECONDS
    while client.counters["answered"] == before:
        drafts = client.drafter().draft(contexts)
        assert time.monotonic() < end, client.counters
    assert drafts == local.draft(contexts)


@examples(2000)
@given(drawn=st.data())
def test_whatever_the_bytes_only_good_drafts_come_through(drawn: st.DataObject, store: RestStore) -> None:
    size = store.manifest.vocab_size
    client = _clients.setdefault(id(store), RemoteStore("/here", "chat", tokenizer=IDENTITY, vocab_size=size))
    batch = store.drafter().draft_batch(np.array([[1, 2, 3], [9, 9, 9]], np.int32), 8)
    good = bytearray(wire.encode_answer(7, 1, 0xAA, 2, batch))
    if drawn.draw(st.booleans()):
        place = drawn.draw(st.integers(4, len(good) - 1))
        good[place : place + 4] = drawn.draw(st.binary(min_size=1, max_size=4))
    else:
        good[16:] = drawn.draw(st.binary(max_size=200))
    frame = wire.Frame(wire.Header(*wire.HEADER.unpack_from(good)), bytes(good[16:]))
    try:
        drafts = client._read(check_answer(frame, wire.Operation.DRAFT, 7), 2, 8)
    except RequestFailed:
        return
    assert len(drafts) == 2
    for draft in drafts:
        draft.tree.validate()
        assert len(draft.tree) <= 8
        assert (draft.tree.tokens < size).all()


_clients: dict[int, RemoteStore] = {}


def test_a_service_that_is_not_there(store: RestStore, story: list[int], tmp_path: Path) -> None:
    with faults.Service(store, tcp=True) as free:
        pass
    for address in (tmp_path / "absent", tmp_path / "no" / "folder", tmp_path / "*.sock", free.address):
        with connected(address, deadline=SECONDS, vocab_size=50) as client:
            assert check_plain(client.drafter(), [token % 50 for token in story], 50) == 60
            assert client.counters["unreachable"] >= 1
            assert client.counters["unreachable"] + client.counters["skipped"] == 60
            with pytest.raises(
                LookupServiceError, match=r"no drafts of 'chat' .*does `draftstore serve` run there"
            ):
                client.check()


def test_a_service_that_takes_no_connections(store: RestStore, story: list[int]) -> None:
    with faults.deaf_socket() as address, connected(address, deadline=SHORT, vocab_size=50) as client:
        check_plain(client.drafter(), [token % 50 for token in story], 50)
        assert client.counters["unreachable"] >= 1
    with (
        faults.deaf_port() as port,
        connected(f"127.0.0.1:{port}", deadline=SHORT, vocab_size=50) as client,
    ):
        check_plain(client.drafter(), [token % 50 for token in story], 50)
        assert client.counters["timeout"] >= 3
        with pytest.raises(LookupServiceError, match=r"no connection in time"):
            client.check(seconds=0.1)


@pytest.mark.parametrize("tcp", [False, True])
def test_a_service_that_restarts(tcp: bool, store: RestStore, story: list[int]) -> None:
    local = store.drafter()
    with Service(store, tcp=tcp) as service, client_of(service, deadline=SECONDS) as client:
        for _ in range(3):
            assert_recovers(client, local, story)
            service.stop()
            assert check_plain(client.drafter(), story, client.vocab_size) == 60
            service.start()
        assert_recovers(client, local, story)
        assert client.counters["closed"] >= 3


def test_a_late_answer_is_never_taken_for_another(
    store: RestStore, story: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Quiet, "holds", False)
    local = store.drafter()
    with Service(store, faults.is_late) as service, client_of(service) as client:
        for seed in range(4):
            [draft] = client.drafter().draft(contexts_of(local, story, 1, seed))
            assert len(draft.tree) == 0
        assert client.counters["timeout"] == client.counters["connections"] == 4
        service.behave = faults.right
        assert_recovers(client, local, story)


def test_an_answer_that_arrives_in_pieces_is_not_read_beyond_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    with theirs:
        theirs.sendall(wire.frame(wire.Operation.DRAFT | wire.ANSWER, 1, bytes(100_000)))
        with pytest.raises(RequestFailed) as failed:
            connection.receive(1 << 20, time.monotonic())
    assert failed.value.outcome == Outcome.TIMEOUT


def test_no_thread_to_connect_in(story: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with RemoteStore("127.0.0.1:9", "chat") as client:
        [draft] = client.drafter().draft(np.array([story[:4]], np.int32))
    assert len(draft.tree) == 0
    assert client.counters["unreachable"] == 1


@pytest.mark.usefixtures("eager")
def test_more_than_a_service_reads(store: RestStore) -> None:
    contexts = np.full((512, 250), 3, np.int32)  # half a megabyte, more than a socket holds
    with Service(store, faults.reads_nothing) as service, client_of(service) as client:
        for _ in range(4):
            assert all(len(draft.tree) == 0 for draft in client.drafter().draft(contexts))
        assert client.counters["timeout"] == 4


def test_a_busy_service_is_left_alone_as_long_as_it_asks(
    store: RestStore, story: list[int], now: list[float]
) -> None:
    behave = faults.fails_with(wire.Status.BUSY, 3.0)
    with Service(store, behave) as service, client_of(service, SECONDS) as client:
        drafter = client.drafter()
        contexts = contexts_of(drafter, story, 1)
        for _ in range(5):
            drafter.draft(contexts)
        assert service.requests == client.counters["busy"] == 1
        now[0] += 2.99
        drafter.draft(contexts)
        assert service.requests == 1
        now[0] += 0.02
        drafter.draft(contexts)
        assert service.requests == 2


@pytest.mark.parametrize("wanted", [0.0, 1e6])
def test_a_pause_has_its_limits(wanted: float, store: RestStore, story: list[int], now: list[float]) -> None:
    behave = faults.fails_with(wire.Status.UNAVAILABLE, wanted)
    with Service(store, behave) as service, client_of(service, SECONDS) as client:
        drafter = client.drafter()
        contexts = contexts_of(drafter, story, 1)
        for _ in range(10):
            drafter.draft(contexts)
        assert service.requests == (1 if wanted else 3)  # without a time it counts as a failure
        now[0] += clients.LONGEST_PAUSE + 0.1
        drafter.draft(contexts)
        assert service.requests == (2 if wanted else 4)


@pytest.mark.parametrize("fault", ["not found", "unauthorized", "forbidden", "another tokenizer"])
def test_refusals_are_tried_again_after_five_seconds_and_logged_once(
    fault: str, store: RestStore, story: list[int], caplog: pytest.LogCaptureFixture, now: list[float]
) -> None:
    behave, outcome = FAULTS[fault]
    with Service(store, behave) as service, client_of(service, SECONDS) as client:
        drafter = client.drafter()
        contexts = contexts_of(drafter, story, 1)
        for attempt in range(1, 4):
            for _ in range(5):
                drafter.draft(contexts)
            assert service.requests == client.counters[outcome] == attempt
            now[0] += clients.REFUSAL_SECONDS + 0.01
        (record,) = [record for record in caplog.records if record.name == "draftstore.remote.client"]
        text = record.getMessage()
        assert text.startswith(f"no drafts of 'chat' from unix:{service.address} ({outcome})")
        assert text.isprintable()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("hangs", "no answer in time: it hangs, or is overloaded, or this is not its port for drafts"),
        ("closes on request", "the connection was closed"),
        ("http", "is this the draft port"),
        ("broken trees", "broken tree"),
        ("another tokenizer", "come from the tokenizer 00000000000000bb, expected 00000000000000aa: publish"),
        ("busy", "because of"),
    ],
)
def test_check_says_what_is_wrong(fault: str, message: str, store: RestStore) -> None:
    with Service(store, FAULTS[fault][0]) as service, client_of(service) as client:
        with pytest.raises(LookupServiceError, match=rf"no drafts of 'chat' from unix:/.*: .*{message}"):
            client.check(seconds=0.2 if fault == "hangs" else SECONDS)
        assert client.counters.calls == 0


@pytest.mark.parametrize("document", [None, [], {}, {"releases": 3}, {"releases": [1]}, "x"])
def test_an_invalid_list_of_releases(document: Any, store: RestStore) -> None:
    def behave(peer: faults.Peer) -> None:
        number = peer.read().header.request_id
        peer.send(wire.encode_json(wire.Operation.RELEASES, number, document))

    with (
        Service(store, behave) as service,
        client_of(service) as client,
        pytest.raises(LookupServiceError, match="holds no list of releases"),
    ):
        client.releases()
