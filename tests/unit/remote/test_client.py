import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftstore.errors import DraftstoreError, LookupServiceError, TokenRangeError
from draftstore.remote.client import RemoteStore
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.stores.registry import Store, open_store
from draftstore.trees.batch import Draft
from draftstore.trees.tree import LEVEL_PROBS
from services.common.permissions import Grant, Permissions, hash_token
from tests.fakes import faults
from tests.fakes.clients import connected, contexts_of
from tests.fakes.faults import OTHER, TOKENIZER, Service
from tests.fakes.lookups import serving
from tests.fakes.waiting import SECONDS, in_threads

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


PROBABILITIES = [0.0, -1.0, 1e-9, 0.05, 1.0, 1.5, float("nan"), 1 / 3, *map(float, LEVEL_PROBS[::16])]


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
        near = [np.nextafter(level, other) for level in LEVEL_PROBS[1::50] for other in (0.0, 1.0)]
        for least in [*PROBABILITIES, *near]:
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


@pytest.mark.parametrize("tcp", [False, True])
def test_with_the_real_service(
    tcp: bool, small_store: Path, small_crest: Path, stories: dict[int, list[int]]
) -> None:
    with serving({"chat": small_store, "compact": small_crest}) as lookups:
        address = "{}:{}".format(*lookups.tcp) if tcp else lookups.socket
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
                with pytest.raises(LookupServiceError, match="has no strategy 'cleverest': expected one of"):
                    client.check("cleverest")
            local_store.close()
        with (
            connected(address, "absent") as client,
            pytest.raises(LookupServiceError, match=r"'absent': publish a release of that name"),
        ):
            client.check()


def test_tokens_of_the_real_service(small_store: Path, story: list[int]) -> None:
    grants = [Grant("engine", frozenset(["chat"]), hash_token("sésame"))]
    local_store = open_store(small_store)
    local = local_store.drafter()
    contexts = contexts_of(local, story, 300)  # longer than what is read before the greeting
    with serving({"chat": small_store, "code": small_store}, permissions=Permissions(grants)) as lookups:
        address = lookups.socket
        with connected(address, deadline=SECONDS, token="sésame") as client:
            assert as_bytes(client.drafter().draft(contexts)) == as_bytes(local.draft(contexts))
            assert [release["name"] for release in client.releases()] == ["chat"]
        for name, token, outcome, message in [
            ("code", "sésame", "forbidden", "may not use 'code'"),
            ("chat", "open", "unauthorized", "token is not known here"),
            ("chat", None, "unauthorized", "tokens new` makes one"),
        ]:
            with connected(address, name, deadline=SECONDS, token=token) as client:
                assert len(client.drafter().draft(contexts[:1])[0].tree) == 0
                assert client.counters[outcome] == client.counters.calls == 1
                with pytest.raises(LookupServiceError, match=message):
                    client.check()
    local_store.close()


def test_what_a_local_store_refuses_is_refused(small: Store, tmp_path: Path) -> None:
    contexts = np.zeros((1, 16), np.int32)
    wrong: list[tuple[NDArray[np.int32], int]] = [(contexts, -1), (contexts, 4097), (contexts[0], 64)]
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
        ({"vocab_size": 2**31 + 1}, "a vocabulary of"),
        ({"address": "nowhere"}, "expected unix:/path"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftstoreError, match=message):
        RemoteStore(**{"address": "/x/y", "name": "chat", **settings})


def test_a_token_is_presented_once_on_each_connection(small: Store, story: list[int]) -> None:
    with (
        Service(small, faults.restarts_after(2)) as service,
        connected(service.address, deadline=SECONDS, token="sésame") as client,
    ):
        for _ in range(6):
            client.drafter().draft(contexts_of(small.drafter(), story, 1))
        assert (client.counters["answered"], client.counters["closed"]) == (4, 2)
        assert service.greetings == ["sésame".encode()] * 2


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


def test_check_ends_a_pause(small: Store, story: list[int]) -> None:
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
        assert remote.counters["connections"] == service.connections == 8


def test_a_forked_process_uses_a_connection_of_its_own(small: Store, story: list[int]) -> None:
    contexts = contexts_of(small.drafter(), story, 3)
    expected = as_bytes(small.drafter().draft(contexts))
    with Service(small) as service, RemoteStore(service.address, "chat", deadline=SECONDS) as remote:
        drafter = remote.drafter()

        def drafts_alike() -> bool:
            return all(as_bytes(drafter.draft(contexts)) == expected for _ in range(50))

        assert drafts_alike()
        child = fork(drafts_alike)
        assert drafts_alike()
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert service.connections == 2
        assert drafts_alike()
        assert remote.counters["connections"] == 1


def test_to_close_a_copy_in_a_forked_process_leaves_the_connection_open(
    small: Store, story: list[int]
) -> None:
    contexts = contexts_of(small.drafter(), story, 1)
    with Service(small) as service, RemoteStore(service.address, "chat", deadline=SECONDS) as remote:
        remote.drafter().draft(contexts)
        with remote._lock:  # another thread of the parent may hold it

            def close() -> bool:
                remote.close()
                return True

            _, status = os.waitpid(fork(close), 0)
        assert os.waitstatus_to_exitcode(status) == 0
        remote.drafter().draft(contexts)
        assert remote.counters["answered"] == 2


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


def test_no_connection_outlives_its_client(small: Store, story: list[int]) -> None:
    ended = threading.Event()

    def behave(peer: faults.Peer) -> None:
        with suppress(ConnectionError):
            faults.right(peer)
        ended.set()

    with Service(small, behave) as service:
        remote = RemoteStore(service.address, "chat", deadline=SECONDS)
        remote.drafter().draft(contexts_of(small.drafter(), story, 1))
        del remote
        assert ended.wait(SECONDS)


def test_dense_drafts_are_those_of_the_local_store(small_dense: Path) -> None:
    local_store = open_store(small_dense)
    local = local_store.drafter()
    samples: Any = local_store.samples(100)
    hidden = np.resize(samples.hidden, (300, local.hidden_size)).astype(np.float16)
    hidden[::7] = np.nan
    hidden[3, 0] = np.inf
    contexts = np.resize(samples.contexts[:, -1:], (300, 1)).astype(np.int32)
    with serving({"chat": small_dense}) as lookups, connected(lookups.socket, deadline=SECONDS) as client:
        assert [len(draft.tree) for draft in client.drafter().draft(contexts[:1])] == [0]  # of unknown size
        client.check()
        drafter = client.drafter()
        assert (drafter.hidden_size, drafter.context_size) == (local.hidden_size, 1)
        expected = as_bytes(local.draft(contexts, 32, hidden=hidden))
        assert sum(len(tree) > 4 for tree, _, _ in expected) > 100
        assert as_bytes(drafter.draft(contexts, 32, hidden=hidden)) == expected
        assert len(drafter.draft(contexts[:1])[0].tree) == 0
        first, second = drafter.session([1], hidden=hidden[1]), local.session([1], hidden=hidden[1])
        assert first.needs_hidden
        assert first.propose() == second.propose()
        with pytest.raises(DraftstoreError, match="hidden states of shape"):
            drafter.draft(contexts, hidden=hidden[:, :-1])
    local_store.close()


def test_counters_show_themselves(small: Store, story: list[int]) -> None:
    with Service(small) as service, RemoteStore(service.address, "chat", deadline=SECONDS) as remote:
        remote.drafter().draft(contexts_of(small.drafter(), story, 3))
        text = repr(remote.counters)
        assert text.startswith("Counters(answered=1, contexts=3, drafted=")
