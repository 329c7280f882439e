import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftstore.decoding.replay import Recording, replay
from draftstore.drafting.drafter import ContextDrafter, Drafter, propose_batch
from draftstore.errors import DraftstoreError, LookupServiceError, TokenRangeError
from draftstore.remote import connection, protocol
from draftstore.remote.client import RemoteStore
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.stores.registry import Store, open_store
from draftstore.trees.batch import Draft
from draftstore.trees.tree import LEVEL_PROBS
from services.common.permissions import Grant, Permissions, hash_token
from tests.fakes import faults
from tests.fakes.clients import connected, contexts_of, decode, follows
from tests.fakes.faults import OTHER, TOKENIZER, Service
from tests.fakes.lookups import serving
from tests.fakes.waiting import SECONDS, in_threads, until

STORES = ("small_store", "small_crest", "wide_store", "wide_crest")
IDENTITY = TokenizerIdentity("small", TOKENIZER)


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    opened = open_store(request.getfixturevalue(request.param))
    yield opened
    opened.close()


@pytest.fixture
def small(small_store: Path) -> Iterator[Store]:
    opened = open_store(small_store)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def stories(small_store: Path, wide_store: Path) -> dict[int, list[int]]:
    """Return ids of the text of each store by the size of its vocabulary."""
    found = {}
    for path in (small_store, wide_store):
        index = open_store(path).index  # type: ignore[attr-defined]
        tokens = index.tokens[:600].astype(np.int64)
        found[index.vocab_size] = tokens[tokens < index.vocab_size].tolist()
    return found


@pytest.fixture
def story(small: Store, stories: dict[int, list[int]]) -> list[int]:
    return stories[small.manifest.vocab_size]


def as_bytes(drafts: list[Draft]) -> list[tuple[bytes, int, int]]:
    return [(draft.tree.to_bytes(), draft.match_length, draft.match_count) for draft in drafts]


PROBABILITIES = [0.0, -1.0, 1e-9, 0.01, 0.05, 0.5, 1.0, 1.5, float("nan"), 1 / 3]
GRID = [2 ** (-level / 16) for level in (1, 16, 33, 80, 150, 254, 255)]


@pytest.mark.parametrize("strategy", ["longest", "backoff", ""])
def test_the_same_drafts_as_the_local_store_byte_for_byte(
    strategy: str, store: Store, stories: dict[int, list[int]]
) -> None:
    local = store.drafter(strategy) if strategy else store.drafter()
    story = stories[local.vocab_size]
    with Service(store) as service, connected(service.address, deadline=SECONDS) as client:
        drafter = client.drafter(strategy)
        drafted = 0
        for batch in (0, 1, 2, 40):
            contexts = contexts_of(local, story, batch, seed=batch)
            for budget in (0, 1, 5, 64, 4096):
                expected = as_bytes(local.draft(contexts, budget))
                assert as_bytes(drafter.draft(contexts, budget)) == expected
                drafted += sum(len(tree) > 4 for tree, _, _ in expected)
        assert drafted > 100
        contexts = contexts_of(local, story, 20, seed=9)
        odd = [value for grid in GRID for value in (grid, np.nextafter(grid, 0.0), np.nextafter(grid, 1.0))]
        for least in [*PROBABILITIES, *odd, *map(float, LEVEL_PROBS[::16])]:
            assert as_bytes(drafter.draft(contexts, 64, least)) == as_bytes(local.draft(contexts, 64, least))


@pytest.mark.parametrize("width", [0, 1, 3, 17, 5000])
def test_contexts_of_any_width(width: int, small: Store, story: list[int]) -> None:
    local = small.drafter()
    contexts = np.array([(story * 10)[start : start + width] for start in (0, 7, 99)], np.int32)
    with Service(small) as service, connected(service.address, deadline=SECONDS) as client:
        assert as_bytes(client.drafter().draft(contexts)) == as_bytes(local.draft(contexts))
        strange: Any = contexts.astype(np.int64)[:, ::-1]
        assert as_bytes(client.drafter().draft(strange)) == as_bytes(local.draft(strange))


@pytest.mark.parametrize(
    ("batch", "width", "requests"), [(512, 16, 1), (513, 16, 2), (1300, 16, 3), (70, 4096, 3)]
)
def test_large_batches_are_asked_in_several_requests(
    batch: int, width: int, requests: int, small: Store, story: list[int]
) -> None:
    local = small.drafter()
    contexts = np.resize(contexts_of(local, story, batch).ravel(), (batch, width)).astype(np.int32)
    with Service(small) as service, connected(service.address, deadline=SECONDS) as client:
        assert as_bytes(client.drafter().draft(contexts, 8)) == as_bytes(local.draft(contexts, 8))
        assert service.requests == requests
        assert client.counters.calls == client.counters["answered"] == 1
        assert client.counters["contexts"] == batch


def test_answers_that_are_longer_than_usual(
    small: Store, story: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_BYTES", 1000)
    local = small.drafter()
    contexts = contexts_of(local, story, 400)
    expected = as_bytes(local.draft(contexts, 4096))
    assert sum(len(tree) for tree, _, _ in expected) > 100_000
    with Service(small) as service, connected(service.address, deadline=SECONDS) as client:
        drafter = client.drafter()
        assert as_bytes(drafter.draft(contexts[:1], 64)) == as_bytes(local.draft(contexts[:1], 64))
        assert as_bytes(drafter.draft(contexts, 4096)) == expected
        assert as_bytes(drafter.draft(contexts[:1], 64)) == as_bytes(local.draft(contexts[:1], 64))


@pytest.mark.parametrize("tcp", [False, True])
def test_with_the_real_service(
    tcp: bool, small_store: Path, small_crest: Path, stories: dict[int, list[int]]
) -> None:
    with serving({"chat": small_store, "compact": small_crest}) as lookups:
        address = "{}:{}".format(*lookups.place.tcp) if tcp else lookups.place.socket
        for name, path in (("chat", small_store), ("compact", small_crest)):
            local_store = open_store(path)
            tokenizer, size = local_store.manifest.tokenizer, local_store.manifest.vocab_size
            with connected(address, name, deadline=SECONDS, tokenizer=tokenizer) as client:
                described = client.check("longest")
                assert described["name"] == name
                assert client.vocab_size == described["vocab_size"] == size
                assert {release["name"] for release in client.releases()} == {"chat", "compact"}
                for strategy in ("longest", "backoff"):
                    local = local_store.drafter(strategy)
                    for batch in (1, 8, 100):
                        contexts = contexts_of(local, stories[size], batch, batch)
                        assert as_bytes(client.drafter(strategy).draft(contexts)) == as_bytes(
                            local.draft(contexts)
                        )
                with pytest.raises(LookupServiceError, match="unknown strategy 'cleverest'"):
                    client.check("cleverest")
            local_store.close()
        with (
            connected(address, "absent") as client,
            pytest.raises(LookupServiceError, match=r"'absent'.*publish a release of that name"),
        ):
            client.check()


def test_tokens_of_the_real_service(small_store: Path, story: list[int]) -> None:
    grants = [Grant("engine", frozenset(["chat"]), hash_token("sésame"))]
    local_store = open_store(small_store)
    local = local_store.drafter()
    contexts = contexts_of(local, story, 300)  # longer than what is read before the greeting
    with serving({"chat": small_store, "code": small_store}, permissions=Permissions(grants)) as lookups:
        address = lookups.place.socket
        with connected(address, deadline=SECONDS, token="sésame") as client:
            assert as_bytes(client.drafter().draft(contexts)) == as_bytes(local.draft(contexts))
            assert [release["name"] for release in client.releases()] == ["chat"]
        for name, token, outcome, message in [
            ("code", "sésame", "forbidden", "the token needs a permission for this release"),
            ("chat", "open", "unauthorized", "give one with token="),
            ("chat", None, "unauthorized", "give one with token="),
        ]:
            with connected(address, name, deadline=SECONDS, token=token) as client:
                assert len(client.drafter().draft(contexts[:1])[0].tree) == 0
                assert client.counters[outcome] == client.counters.calls == 1
                with pytest.raises(LookupServiceError, match=message):
                    client.check()
    local_store.close()


def test_a_replay_counts_what_it_does_with_the_local_store(small: Store, story: list[int]) -> None:
    text = np.array(story, np.int32)
    rows = [Recording(str(i), text[i * 60 : i * 60 + 10], text[i * 60 + 10 : i * 60 + 55]) for i in range(6)]
    with Service(small) as service, RemoteStore(service.address, "chat", deadline=SECONDS) as remote:
        found, expected = replay(remote.drafter(), rows), replay(small.drafter(), rows)
        assert (found.tokens, found.passes, found.nodes, found.misses) == (
            expected.tokens, expected.passes, expected.nodes, expected.misses,
        )  # fmt: skip
        assert found.accepted_length > 2
        assert remote.counters["answered"] == found.passes


def test_decoding_says_the_same_in_fewer_passes(small: Store, story: list[int]) -> None:
    model = follows(story, small.manifest.vocab_size)
    plain, _ = decode(None, story[:20], model, 80)
    with Service(small) as service, connected(service.address, deadline=SECONDS) as client:
        found, passes = decode(client.drafter(), story[:20], model, 80)
        assert found == plain
        assert passes < 60
        assert decode(small.drafter(), story[:20], model, 80) == (plain, passes)


def test_clients_fit_the_protocols(small: Store) -> None:
    with Service(small) as service, RemoteStore(service.address, "chat", deadline=SECONDS) as remote:
        drafter: Drafter = remote.drafter()
        contexts: ContextDrafter = remote.drafter()
        assert drafter.session([1, 2]).propose() == contexts.draft(np.array([[1, 2]], np.int32))[0].tree


def test_many_sessions_propose_in_one_request(small: Store, story: list[int]) -> None:
    with Service(small) as service, RemoteStore(service.address, "chat", deadline=SECONDS) as remote:
        drafter, local = remote.drafter(), small.drafter()
        starts = range(0, 500, 5)
        sessions = [drafter.session(story[start : start + 20]) for start in starts]
        expected = propose_batch(
            local, [local.session(story[start : start + 20]) for start in starts], 9, 0.1
        )
        assert propose_batch(drafter, sessions, 9, 0.1) == expected
        assert service.requests == 1
        assert [session.propose(9, 0.1) for session in sessions] == expected
        assert remote.counters["connections"] == 1


def test_what_a_local_store_refuses_is_refused(small: Store, tmp_path: Path) -> None:
    contexts = np.zeros((1, 16), np.int32)
    wrong: list[tuple[NDArray[np.int32], int]] = [
        (contexts, -1),
        (contexts, 4097),
        (contexts[0], 64),
        (contexts[None], 64),
    ]
    with connected(tmp_path / "absent", vocab_size=small.manifest.vocab_size) as client:
        for drafter in (small.drafter(), client.drafter()):
            for given, budget in wrong:
                with pytest.raises(DraftstoreError):
                    drafter.draft(given, budget)
            with pytest.raises(TokenRangeError):
                drafter.session([small.manifest.vocab_size])
        assert client.counters.calls == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": ""}, "needs the name of a release"),
        ({"name": "x" * 256}, "no request can carry this"),
        ({"deadline": 0.0}, "a deadline of 0.0 seconds"),
        ({"deadline": float("nan")}, "a deadline of nan"),
        ({"deadline": float("inf")}, "a deadline of inf"),
        ({"vocab_size": 0}, "a vocabulary of 0 ids"),
        ({"vocab_size": 2**31 + 1}, "a vocabulary of"),
        ({"context_size": 0}, "a context of 0 tokens"),
        ({"context_size": 5000}, "a context of 5000 tokens"),
        ({"tokenizer": TokenizerIdentity("mine", "none")}, "'mine' has the fingerprint 'none'"),
        ({"address": "nowhere"}, "expected unix:/path"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftstoreError, match=message):
        RemoteStore(**{"address": "/x/y", "name": "chat", **settings})


def test_the_address_is_that_of_the_service_on_this_machine(
    small: Store, monkeypatch: pytest.MonkeyPatch, story: list[int]
) -> None:
    with Service(small) as service:
        monkeypatch.setenv("DRAFTSTORE_SOCKET", service.address)
        with RemoteStore(name="chat", deadline=SECONDS) as remote:
            assert str(remote.address) == f"unix:{service.address}"
            assert len(remote.drafter().session(story[:8]).propose()) > 0


def test_a_token_is_presented_once_on_each_connection(small: Store, story: list[int]) -> None:
    with (
        Service(small, faults.restarts_after(2)) as service,
        connected(service.address, deadline=SECONDS, token="sésame") as client,
    ):
        for _ in range(6):
            client.drafter().draft(contexts_of(small.drafter(), story, 1))
        assert client.counters["answered"] == 6
        assert 3 <= len(service.greetings) <= service.connections
        assert set(service.greetings) == {"sésame".encode()}


def test_the_tokenizer_of_the_first_answer_is_kept_to(small: Store, story: list[int]) -> None:
    contexts = contexts_of(small.drafter(), story, 1)
    with Service(small) as service, connected(service.address, deadline=SECONDS) as client:
        drafter = client.drafter()
        drafter.draft(contexts)
        service.tokenizer = OTHER
        assert len(drafter.draft(contexts)[0].tree) == 0
        assert (client.counters["answered"], client.counters["other_tokenizer"]) == (1, 1)
        with pytest.raises(LookupServiceError, match="publish a build for this model's tokenizer"):
            client.check()
        service.tokenizer = TOKENIZER
        client.check()  # and with that drafts flow at once
        drafter.draft(contexts)
        assert client.counters["answered"] == 2


def test_check_takes_over_the_vocabulary_unless_it_is_given(small: Store) -> None:
    with Service(small) as service:
        with connected(service.address) as client:
            assert client.vocab_size == 2**31
            assert client.check()["name"] == "chat"
            assert client.vocab_size == small.manifest.vocab_size
            with pytest.raises(TokenRangeError):
                client.drafter().session([client.vocab_size])
        with connected(service.address, vocab_size=1000) as client:
            client.check()
            assert client.vocab_size == 1000


def test_check_closes_the_breaker(small: Store, story: list[int]) -> None:
    contexts = contexts_of(small.drafter(), story, 1)
    with Service(small) as service, connected(service.address, deadline=SECONDS) as client:
        drafter = client.drafter()
        service.stop()
        for _ in range(20):
            drafter.draft(contexts)
        assert client.counters["skipped"] > 0
        service.start()
        client.check()
        drafter.draft(contexts)
        assert client.counters["answered"] == 1


def test_a_closed_client_drafts_nothing(small: Store, story: list[int]) -> None:
    contexts = contexts_of(small.drafter(), story, 2)
    with Service(small) as service, connected(service.address, deadline=SECONDS) as client:
        drafter = client.drafter()
        drafter.draft(contexts)
        client.close()
        assert [len(draft.tree) for draft in drafter.draft(contexts)] == [0, 0]
        assert client.counters["skipped"] == 1
        client.close()


def test_threads_work_in_parallel_over_connections_of_their_own(small: Store, story: list[int]) -> None:
    local = small.drafter()
    with Service(small) as service, RemoteStore(service.address, "chat", deadline=SECONDS) as remote:
        drafter = remote.drafter()
        start = threading.Barrier(8)

        def run(seed: int) -> None:
            start.wait()
            for step in range(40):
                contexts = contexts_of(local, story, 1 + step % 3, seed * 1000 + step)
                assert as_bytes(drafter.draft(contexts)) == as_bytes(local.draft(contexts))

        in_threads(partial(run, seed) for seed in range(8))
        assert remote.counters["answered"] == remote.counters.calls == 320
        assert 1 <= remote.counters["connections"] == service.connections <= 8
        assert remote.counters["retries"] == 0


def test_threads_and_a_service_that_comes_and_goes(small: Store, story: list[int]) -> None:
    local = small.drafter()
    done = threading.Event()
    with Service(small) as service, RemoteStore(service.address, "chat", deadline=1.0) as remote:
        drafter = remote.drafter()

        def run(seed: int) -> None:
            step = 0
            while not done.is_set():
                contexts = contexts_of(local, story, 2, seed * 1000 + step % 50)
                found = as_bytes(drafter.draft(contexts))
                assert found in (as_bytes(local.draft(contexts)), [(found[0][0], 0, 0)] * 2)
                step += 1

        def come_and_go() -> None:
            try:
                for _ in range(4):
                    enough = remote.counters["answered"] + 20
                    until(lambda: remote.counters["answered"] > enough)  # noqa: B023
                    service.stop()
                    service.start()
            finally:
                done.set()

        in_threads([come_and_go, *(partial(run, seed) for seed in range(1, 9))])
        assert remote.counters["answered"] > 80


def test_a_forked_process_uses_connections_of_its_own(small: Store, story: list[int]) -> None:
    local = small.drafter()
    contexts = contexts_of(local, story, 3)
    expected = as_bytes(local.draft(contexts))
    with (
        Service(small) as service,
        RemoteStore(service.address, "chat", deadline=SECONDS) as remote,
        connected(service.address, deadline=SECONDS) as client,
    ):
        for each in (remote, client):
            assert as_bytes(each.drafter().draft(contexts)) == expected
        before = service.connections
        child = fork(lambda: drafts_alike(remote, client, contexts, expected))
        for _ in range(50):
            for each in (remote, client):
                assert as_bytes(each.drafter().draft(contexts)) == expected
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert service.connections == before + 2
        for each in (remote, client):
            assert as_bytes(each.drafter().draft(contexts)) == expected
            assert each.counters["connections"] == 1
            assert each.counters["retries"] == 0


def drafts_alike(
    remote: RemoteStore, client: Any, contexts: NDArray[np.int32], expected: list[tuple[bytes, int, int]]
) -> bool:
    """Ask many times in a forked process, the async client in an event loop of that process."""
    if not isinstance(client, RemoteStore):
        import asyncio

        loop = asyncio.new_event_loop()
        client._run = loop.run_until_complete
    return all(
        as_bytes(each.drafter().draft(contexts)) == expected for _ in range(50) for each in (remote, client)
    )


def fork(function: Callable[[], bool]) -> int:
    """Run a function in a forked process, which ends with status 0 if it returns True."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # the parent has threads; the child needs none of them
        child = os.fork()
    if child == 0:
        signal.alarm(int(SECONDS))
        status = 1
        try:
            status = 0 if function() else 2
        finally:
            os._exit(status)
    return child


def test_without_a_fast_way_to_wait(small: Store, story: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_SELECTABLE", 0)  # as with a thousand files open
    contexts = contexts_of(small.drafter(), story, 1)
    with (
        Service(small, faults.hangs) as service,
        RemoteStore(service.address, "chat", deadline=0.0035) as remote,
    ):
        assert len(remote.drafter().draft(contexts)[0].tree) == 0
        assert remote.counters["timeout"] == 1
    with Service(small) as service, RemoteStore(service.address, "chat", deadline=SECONDS) as remote:
        assert as_bytes(remote.drafter().draft(contexts)) == as_bytes(small.drafter().draft(contexts))


def test_an_interrupted_call_leaves_no_trace(
    small: Store, story: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    local = small.drafter()
    contexts = contexts_of(local, story, 2)
    with Service(small) as service, RemoteStore(service.address, "chat", deadline=SECONDS) as remote:
        drafter = remote.drafter()
        drafter.draft(contexts)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(connection.Connection, "_receive", interrupt)
            with pytest.raises(KeyboardInterrupt):
                drafter.draft(contexts)
        for seed in range(3):
            others = contexts_of(local, story, 2, seed + 5)
            assert as_bytes(drafter.draft(others)) == as_bytes(local.draft(others))
        assert remote.counters["connections"] == 2
        assert remote.counters["late"] == 0


def test_no_connection_outlives_its_client(small: Store, story: list[int]) -> None:
    with Service(small) as service:
        remote = RemoteStore(service.address, "chat", deadline=SECONDS)
        remote.drafter().draft(contexts_of(small.drafter(), story, 1))
        pool = remote._pool
        del remote
        assert not pool._all


def test_counters_show_themselves(small: Store, story: list[int]) -> None:
    with Service(small) as service, RemoteStore(service.address, "chat", deadline=SECONDS) as remote:
        remote.drafter().draft(contexts_of(small.drafter(), story, 3))
        text = repr(remote.counters)
        assert text.startswith("Counters(answered=1, contexts=3, drafted=")
        assert remote.counters.as_dict()["timeout"] == 0
        assert set(map(type, remote.counters.as_dict())) == {str}
