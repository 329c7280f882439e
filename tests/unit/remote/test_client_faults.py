import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.decoding.replay import Recording, replay
from draftstore.drafting.drafter import Drafter
from draftstore.errors import LookupServiceError, WireError
from draftstore.remote import async_connection, protocol, release, wire
from draftstore.remote.breaker import Breaker
from draftstore.remote.buffer import FrameBuffer
from draftstore.remote.client import RemoteStore
from draftstore.remote.counters import Outcome
from draftstore.remote.protocol import RequestFailed
from draftstore.remote.release import ReleaseClient
from draftstore.remote.requests import prepare_drafts
from draftstore.remote.wire import encode_answer
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.stores.rest.store import RestStore
from draftstore.trees.batch import DraftBatch
from tests.examples import examples
from tests.fakes import faults
from tests.fakes.clients import Client, connected, contexts_of, decode, follows
from tests.fakes.faults import FAULTS, TOKENIZER, Service
from tests.fakes.waiting import SECONDS

SHORT = 0.02
"""Seconds; the deadline where no answer is expected."""
IDENTITY = TokenizerIdentity("small", TOKENIZER)
OURS = {Outcome.BAD_REQUEST, Outcome.TOO_LARGE, Outcome.OTHER_PROJECTION}
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


class Open(Breaker):
    """A breaker that never breaks, so that every call asks."""

    def enter(self) -> int:
        return 0

    def fail(self, ticket: int) -> bool:
        return False

    def pause(self, ticket: int, seconds: float) -> None:
        pass


def client_of(service: Service, deadline: float = SHORT, **more: Any) -> Any:
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


def check_counters(client: Client) -> None:
    counters = client.counters
    assert counters.calls == sum(counters[outcome] for outcome in Outcome)
    assert 0 <= counters["drafted"] <= counters["contexts"]


@pytest.mark.parametrize("fault", FAULTS)
def test_decoding_goes_on_and_the_counters_tell(fault: str, store: RestStore, story: list[int]) -> None:
    behave, outcome = FAULTS[fault]
    with Service(store, behave) as service, client_of(service, patience(outcome)) as client:
        begin = time.monotonic()
        passes = check_plain(client.drafter(), story, client.vocab_size)
        assert passes == 60  # no draft was of use
        assert time.monotonic() - begin < SECONDS
        counters = client.counters
        assert counters[outcome] > 0
        assert counters[outcome] + counters["skipped"] == counters.calls == 60
        assert counters["drafted"] == counters["nodes"] == 0
        assert (counters["skipped"] > 0) == (outcome not in OURS)
        assert (counters["opened"] > 0) == (
            outcome not in OURS | REFUSALS | {Outcome.BUSY, Outcome.UNAVAILABLE}
        )
        assert service.requests <= 2 * (60 - counters["skipped"])


@pytest.mark.parametrize("fault", FAULTS)
def test_every_call_of_a_bad_service_brings_valid_drafts_or_none(
    fault: str, store: RestStore, story: list[int]
) -> None:
    behave, outcome = FAULTS[fault]
    with (
        Service(store, behave) as service,
        client_of(service, patience(outcome), breaker=Open()) as client,
    ):
        drafter = client.drafter("longest")
        for batch in (1, 3, 1, 7):
            drafts = drafter.draft(contexts_of(drafter, story, batch), 5, 0.001)
            assert [len(draft.tree) for draft in drafts] == [0] * batch
        assert client.counters[outcome] == client.counters.calls == 4
        assert client.counters["contexts"] == 12


@pytest.mark.parametrize("tcp", [False, True])
def test_mutated_answers(tcp: bool, store: RestStore, story: list[int]) -> None:
    local = store.drafter()
    with (
        Service(store, faults.mutates(5), tcp=tcp) as service,
        client_of(service, breaker=Open()) as client,
    ):
        drafter = client.drafter()
        for seed in range(150):
            contexts = contexts_of(drafter, story, 1 + seed % 4, seed)
            drafts = drafter.draft(contexts, 16)
            assert len(drafts) == len(contexts)
            for draft in drafts:
                draft.tree.validate()
                assert len(draft.tree) <= 16
                assert (draft.tree.tokens < client.vocab_size).all()
        assert sum(client.counters[name] for name in ("timeout", "garbage", "invalid", "closed")) > 30
        service.behave = faults.right
        service.stop()
        service.start()
        assert_recovers(client, drafter, local, story)


def assert_recovers(client: Client, drafter: Any, local: Any, story: list[int]) -> None:
    """Ask until there is an answer, which must be the right one."""
    contexts = contexts_of(local, story, 1, 99)
    contexts[0, -8:] = story[:8]
    before, end = client.counters["answered"], time.monotonic() + SECONDS
    while client.counters["answered"] == before:
        drafts = drafter.draft(contexts)
        assert time.monotonic() < end, client.counters
    assert drafts == local.draft(contexts)


def client_for(store: RestStore) -> ReleaseClient:
    return ReleaseClient("/here", "chat", tokenizer=IDENTITY, vocab_size=store.manifest.vocab_size)


@examples(2000)
@given(drawn=st.data())
def test_whatever_the_bytes_only_good_drafts_come_through(drawn: st.DataObject, store: RestStore) -> None:
    client = _clients.setdefault(id(store), client_for(store))
    (request,) = prepare_drafts(count(1), "chat", np.array([[1, 2, 3], [4, 5, 6]], np.int32), 8, 0.0, "")
    good = bytearray(
        encode_answer(
            request.id, 1, 0xAA, 2, store.drafter().draft_batch(np.array([[1, 2, 3], [9, 9, 9]], np.int32), 8)
        )
    )
    if drawn.draw(st.booleans()):
        place = drawn.draw(st.integers(4, len(good) - 1))
        good[place : place + 4] = drawn.draw(st.binary(min_size=1, max_size=4))
        if drawn.draw(st.booleans()):
            good[0:4] = (len(good) - 16).to_bytes(4, "little")
    else:
        good[16:] = drawn.draw(st.binary(max_size=200))
        good[0:4] = (len(good) - 16).to_bytes(4, "little")
    try:
        for frame in FrameBuffer().feed(bytes(good)):
            for draft in client._drafts(request, frame):
                draft.tree.validate()
                assert len(draft.tree) <= 8
                assert (draft.tree.tokens < store.manifest.vocab_size).all()
    except (RequestFailed, WireError):
        pass


_clients: dict[int, ReleaseClient] = {}


def test_a_service_that_is_not_there(store: RestStore, story: list[int], tmp_path: Path) -> None:
    with faults.Service(store, tcp=True) as free:
        pass
    for address in (tmp_path / "absent", tmp_path / "no" / "folder", free.address):
        with connected(address, deadline=SHORT, vocab_size=50) as client:
            assert check_plain(client.drafter(), [token % 50 for token in story], 50) == 60
            assert client.counters["unreachable"] >= 3
            assert client.counters["unreachable"] + client.counters["skipped"] == 60
            with pytest.raises(
                LookupServiceError, match=r"no drafts of 'chat' from .*is `draftstore serve` running"
            ):
                client.check()


def test_a_service_that_takes_no_connections(store: RestStore, story: list[int]) -> None:
    with faults.deaf_socket() as address, connected(address, deadline=SHORT, vocab_size=50) as client:
        check_plain(client.drafter(), [token % 50 for token in story], 50)
        assert client.counters["unreachable"] >= 3
    with (
        faults.deaf_port() as port,
        connected(f"127.0.0.1:{port}", deadline=SHORT, vocab_size=50) as client,
    ):
        check_plain(client.drafter(), [token % 50 for token in story], 50)
        assert client.counters["timeout"] >= 3
        with pytest.raises(
            LookupServiceError, match=r"it hangs, or is overloaded|is `draftstore serve` running"
        ):
            client.check(seconds=0.1)


@pytest.mark.parametrize("tcp", [False, True])
def test_a_service_that_restarts(tcp: bool, store: RestStore, story: list[int]) -> None:
    local = store.drafter()
    with Service(store, tcp=tcp) as service, client_of(service, deadline=SECONDS) as client:
        drafter = client.drafter()
        for _ in range(3):
            assert_recovers(client, drafter, local, story)
            service.stop()
            assert check_plain(drafter, story, client.vocab_size) == 60
            service.start()
        assert_recovers(client, drafter, local, story)
        assert client.counters["unreachable"] + client.counters["closed"] >= 3


@pytest.mark.parametrize("answers", [1, 3])
def test_a_connection_that_has_gone_is_replaced_and_no_draft_is_missing(
    answers: int, store: RestStore, story: list[int]
) -> None:
    local = store.drafter()
    with (
        Service(store, faults.restarts_after(answers)) as service,
        client_of(service, deadline=SECONDS) as client,
    ):
        drafter = client.drafter()
        for seed in range(12):
            contexts = contexts_of(local, story, 2, seed)
            assert drafter.draft(contexts) == local.draft(contexts)
        assert client.counters["answered"] == client.counters.calls == 12
        assert service.connections >= 12 // answers


def test_a_service_that_says_goodbye_gets_no_more_requests_on_that_connection(
    store: RestStore, story: list[int]
) -> None:
    local = store.drafter()
    with (
        Service(store, faults.says_goodbye) as service,
        client_of(service, deadline=SECONDS) as client,
    ):
        drafter = client.drafter()
        for seed in range(5):
            contexts = contexts_of(local, story, 2, seed)
            assert drafter.draft(contexts) == local.draft(contexts)
        assert client.counters["answered"] == client.counters["connections"] == 5
        assert client.counters["retries"] == 0


def test_late_answers_are_dropped_and_never_taken_for_others(
    store: RestStore, story: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "SILENCE", SECONDS)
    local, answering = store.drafter(), threading.Event()
    with (
        Service(store, faults.is_late_until(answering)) as service,
        client_of(service, deadline=0.01, breaker=Open()) as client,
    ):
        drafter = client.drafter()
        while service.requests < 5:  # where this thread is held up, a call ends before it has asked
            drafts = drafter.draft(contexts_of(local, story, 1, client.counters.calls))
            assert len(drafts[0].tree) == 0
        assert client.counters["timeout"] == client.counters.calls
        answering.set()
        client_deadline(client, SECONDS)
        contexts = contexts_of(local, story, 3, 77)
        assert drafter.draft(contexts) == local.draft(contexts)
        assert client.counters["late"] == service.requests - 1
        assert client.counters["connections"] == 1


def client_deadline(client: Any, seconds: float) -> None:
    """Give later calls another deadline."""
    getattr(client, "_store", client).deadline = seconds


def test_a_connection_from_which_nothing_comes_is_given_up(
    store: RestStore, story: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "SILENCE", 2.0)
    local = store.drafter()
    with (
        Service(store, faults.reads_nothing) as service,
        client_of(service, deadline=0.03, breaker=Open()) as client,
    ):
        drafter = client.drafter()
        end = time.monotonic() + SECONDS
        while client.counters["connections"] < 2:
            assert len(drafter.draft(contexts_of(local, story, 1))[0].tree) == 0
            assert time.monotonic() < end
        assert client.counters["connections"] < client.counters.calls
        service.behave = faults.right
        client_deadline(client, 1.0)
        assert_recovers(client, drafter, local, story)


def test_more_than_a_service_reads(
    store: RestStore, story: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_connection, "MAX_UNSENT", 1 << 16)
    contexts = np.full((512, 256), 3, np.int32)  # half a megabyte each, more than a socket holds
    with (
        Service(store, faults.reads_nothing) as service,
        client_of(service, breaker=Open()) as client,
    ):
        drafter = client.drafter()
        for _ in range(4):
            assert all(len(draft.tree) == 0 for draft in drafter.draft(contexts))
        assert client.counters["timeout"] == 4


def test_a_busy_service_is_left_alone_as_long_as_it_asks(store: RestStore, story: list[int]) -> None:
    now = [100.0]
    breaker = Breaker(clock=lambda: now[0], chance=lambda: 0.0)
    behave = faults.fails_with(wire.Status.BUSY, 3.0)
    with Service(store, behave) as service, client_of(service, SECONDS, breaker=breaker) as client:
        drafter = client.drafter()
        contexts = contexts_of(drafter, story, 1)
        for _ in range(5):
            drafter.draft(contexts)
        assert service.requests == client.counters["busy"] == 1
        now[0] += 2.99
        drafter.draft(contexts)
        assert service.requests == 1
        now[0] += 0.02
        service.behave = faults.right
        drafter.draft(contexts)  # the connection from before still refuses
        assert service.requests == 2


@pytest.mark.parametrize("wanted", [0.0, 1e6])
def test_a_pause_has_its_limits(wanted: float, store: RestStore, story: list[int]) -> None:
    now = [100.0]
    breaker = Breaker(clock=lambda: now[0], chance=lambda: 0.0)
    behave = faults.fails_with(wire.Status.UNAVAILABLE, wanted)
    with Service(store, behave) as service, client_of(service, SECONDS, breaker=breaker) as client:
        drafter = client.drafter()
        contexts = contexts_of(drafter, story, 1)
        for _ in range(10):
            drafter.draft(contexts)
        assert service.requests == (1 if wanted else 3)  # without a time it counts as a failure
        now[0] += release.LONGEST_PAUSE + 0.1
        drafter.draft(contexts)
        assert service.requests == (2 if wanted else 4)


@pytest.mark.parametrize("fault", ["not found", "unauthorized", "forbidden", "another tokenizer"])
def test_refusals_are_tried_again_after_five_seconds_and_logged_once(
    fault: str, store: RestStore, story: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    breaker = Breaker(clock=lambda: now[0], chance=lambda: 0.0)
    behave, outcome = FAULTS[fault]
    with Service(store, behave) as service, client_of(service, SECONDS, breaker=breaker) as client:
        drafter = client.drafter()
        contexts = contexts_of(drafter, story, 1)
        for attempt in range(1, 4):
            for _ in range(5):
                drafter.draft(contexts)
            assert service.requests == client.counters[outcome] == attempt
            now[0] += release.REFUSAL_SECONDS + 0.01
        (record,) = [record for record in caplog.records if record.name == "draftstore.remote.client"]
        text = record.getMessage()
        assert text.startswith(f"no drafts of 'chat' from {service.address}") or service.address in text
        assert str(outcome) in text
        assert "\n" not in text
        assert "\x1b" not in text


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("hangs", "no answer in time; it hangs, or is overloaded, or this is not its port for drafts"),
        ("closes", "it is stopping, or this is not a lookup service"),
        ("http", "is this the port for drafts"),
        ("broken trees", "broken tree.*does its version fit this client"),
        ("not found", "because of .*; publish a release of that name"),
        ("unauthorized", "give one with token="),
        ("forbidden", "the token needs a permission"),
        ("another tokenizer", "come from the tokenizer 00000000000000bb, expected 00000000000000aa: publish"),
        ("busy", "because of"),
        ("internal", "because of"),
    ],
)
def test_check_says_what_is_wrong(fault: str, message: str, store: RestStore) -> None:
    with Service(store, FAULTS[fault][0]) as service, client_of(service) as client:
        with pytest.raises(LookupServiceError, match=rf"no drafts of 'chat' from unix:/.*: .*{message}"):
            client.check(seconds=2.0 if fault == "hangs" else SECONDS)
        assert client.counters.calls == 0


@pytest.mark.parametrize("document", [None, [], {}, {"releases": 3}, {"releases": [1]}, "x"])
def test_a_list_of_releases_that_is_none(document: Any, store: RestStore) -> None:
    def behave(peer: faults.Peer) -> None:
        number = peer.read().header.request_id
        peer.send(wire.encode_json(wire.Operation.RELEASES, number, document))

    with (
        Service(store, behave) as service,
        client_of(service) as client,
        pytest.raises(LookupServiceError, match="holds no list of releases"),
    ):
        client.releases()


@pytest.mark.parametrize(
    "fault", ["hangs", "closes mid-answer", "garbage", "another tokenizer", "broken trees"]
)
def test_a_replay_goes_on_as_without_drafts(fault: str, store: RestStore, story: list[int]) -> None:
    text = np.array(story, np.int32)
    rows = [Recording(str(i), text[i * 50 : i * 50 + 10], text[i * 50 + 10 : i * 50 + 45]) for i in range(4)]
    behave, outcome = FAULTS[fault]
    with Service(store, behave) as service, client_of(service, patience(outcome)) as client:
        result = replay(client.drafter(), rows)
        assert result.passes == result.tokens == result.misses == sum(len(row.output) - 1 for row in rows)
        assert client.counters[outcome] > 0


def test_empty_drafts_are_not_shared(store: RestStore, tmp_path: Path) -> None:
    with RemoteStore(tmp_path / "absent", "chat") as client:
        first, second = client.drafter().draft(np.zeros((2, 3), np.int32))
        assert first.tree is not second.tree
        assert len(DraftBatch.empty(2).drafts()) == 2
