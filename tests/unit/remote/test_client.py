"""The client drafts like the local store, from the given services and with the given tokens."""

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftstore.errors import DraftstoreError, LookupServiceError, TokenRangeError
from draftstore.remote.client import RemoteStore
from draftstore.stores.registry import Store, open_store
from draftstore.trees.batch import Draft
from draftstore.trees.frontier import MAX_BUDGET
from draftstore.trees.tree import LEVEL_PROBS
from services.common.permissions import Grant, Permissions, hash_token
from tests.fakes import faults
from tests.fakes.faults import OTHER, TOKENIZER, Service
from tests.fakes.lookups import Lookups, contexts_of, serving
from tests.fakes.waiting import SECONDS, in_threads

STORES = ("small_store", "small_crest", "wide_store", "wide_crest")
PROBABILITIES = [0.0, -1.0, 1e-9, 0.05, 1.0, 1.5, float("nan"), 1 / 3, *map(float, LEVEL_PROBS[::16])]


@pytest.fixture(scope="module")
def paths(request: pytest.FixtureRequest) -> dict[str, Path]:
    return {name: request.getfixturevalue(name) for name in STORES}


@pytest.fixture(scope="module")
def lookups(paths: dict[str, Path]) -> Iterator[Lookups]:
    with serving(paths, max_budget=MAX_BUDGET) as running:
        yield running


@pytest.fixture(scope="module")
def small(small_store: Path) -> Iterator[Store]:
    with closing(open_store(small_store)) as opened:
        yield opened


@pytest.fixture(scope="module")
def contexts(small_store: Path) -> NDArray[np.int32]:
    return contexts_of(small_store, 3)


def client_of(address: object, name: str = "chat", **settings: Any) -> RemoteStore:
    return RemoteStore(str(address), name, **{"deadline": SECONDS, **settings})


def as_bytes(drafts: list[Draft]) -> list[tuple[bytes, int, int]]:
    return [(draft.tree.to_bytes(), draft.match_length, draft.match_count) for draft in drafts]


@pytest.mark.parametrize(
    ("name", "tcp"),
    [("small_store", False), ("small_crest", True), ("wide_store", True), ("wide_crest", False)],
)
def test_the_same_drafts_as_the_local_store_byte_for_byte(
    name: str, tcp: bool, lookups: Lookups, paths: dict[str, Path]
) -> None:
    address = "{}:{}".format(*lookups.tcp) if tcp else lookups.socket
    with closing(open_store(paths[name])) as store, client_of(address, name) as client:
        drafted = 0
        for strategy in ("", *store.strategies):
            local = store.drafter(strategy) if strategy else store.drafter()
            drafter = client.drafter(strategy)
            for seed, (batch, width) in enumerate([(1, 16), (2, 40), (40, 3), (300, 16)]):
                contexts = contexts_of(paths[name], batch, width, seed)
                for budget in (1, 5, 64, 4096 if batch < 10 else 256):
                    expected = as_bytes(local.draft(contexts, budget))
                    assert as_bytes(drafter.draft(contexts, budget)) == expected
                    drafted += sum(len(tree) > 4 for tree, _, _ in expected)
        assert drafted > 100
        near = [np.nextafter(level, other) for level in LEVEL_PROBS[1::50] for other in (0.0, 1.0)]
        for least in [*PROBABILITIES, *near]:
            assert as_bytes(drafter.draft(contexts, 64, least)) == as_bytes(local.draft(contexts, 64, least))


@pytest.mark.parametrize("width", [0, 1, 5000])
def test_contexts_of_any_width(width: int, lookups: Lookups, small: Store) -> None:
    tokens = np.resize(small.samples(50).contexts, 5200).astype(np.int64)
    contexts = np.array([tokens[start : start + width] for start in (0, 7, 99)])[:, ::-1][:, ::-1]
    with client_of(lookups.socket, "small_store") as client:
        drafts = client.drafter().draft(contexts)
        assert as_bytes(drafts) == as_bytes(small.drafter().draft(contexts.astype(np.int32)))
        assert client.counters["answered"] == 1


@pytest.mark.parametrize(
    ("batch", "width", "requests"), [(512, 16, 1), (513, 16, 2), (1300, 16, 3), (96, 4096, 3)]
)
def test_large_batches_are_sent_in_several_requests(
    batch: int, width: int, requests: int, small: Store, small_store: Path
) -> None:
    contexts = contexts_of(small_store, batch, width)
    with Service(small) as service, client_of(service.address) as client:
        assert as_bytes(client.drafter().draft(contexts, 8)) == as_bytes(small.drafter().draft(contexts, 8))
        assert service.requests == requests
        assert client.counters.calls == client.counters["answered"] == 1
        assert client.counters["contexts"] == batch


def test_nothing_is_sent_where_nothing_is_wanted(
    small: Store, contexts: NDArray[np.int32], tmp_path: Path
) -> None:
    with client_of(tmp_path / "absent", vocab_size=small.manifest.vocab_size) as client:
        drafter = client.drafter()
        assert drafter.draft(contexts[:0]) == []
        for budget, least in ((0, 0.0), (64, 1.5)):
            assert [len(draft.tree) for draft in drafter.draft(contexts, budget, least)] == [0, 0, 0]
        assert client.counters.calls == 0


def test_what_a_local_store_refuses_is_refused(small: Store, tmp_path: Path) -> None:
    contexts = np.zeros((1, 16), np.int32)
    wrong: list[tuple[NDArray[np.int32], int]] = [(contexts, -1), (contexts, 4097), (contexts[0], 64)]
    with client_of(tmp_path / "absent", vocab_size=small.manifest.vocab_size) as client:
        for drafter in (small.drafter(), client.drafter()):
            for given, budget in wrong:
                with pytest.raises(DraftstoreError):
                    drafter.draft(given, budget)
            with pytest.raises(TokenRangeError):
                drafter.session([small.manifest.vocab_size])
        assert client.counters.calls == 0


def test_settings_have_their_limits() -> None:
    for setting, limits, beyond in [
        ("name", ("x", "x" * 255), ("", "x" * 256)),
        ("context_size", (1, 4096), (0, 4097)),
        ("deadline", (1e-6, 1e6), (0, -1, float("nan"), float("inf"))),
        ("vocab_size", (1, 2**31 - 1), (0, 2**31)),
        ("address", ("/x/y",), ("nowhere",)),
    ]:
        settings: dict[str, Any] = {"address": "/x/y", "name": "chat"}
        for value in limits:
            RemoteStore(**{**settings, setting: value})
        for value in beyond:
            with pytest.raises(DraftstoreError):
                RemoteStore(**{**settings, setting: value})


def test_a_token_opens_its_releases_alone(small: Store, small_store: Path) -> None:
    grants = [Grant("engine", frozenset(["chat"]), hash_token("sésame"))]
    contexts = contexts_of(small_store, 300)  # longer than what is read before the greeting
    with serving({"chat": small_store, "code": small_store}, permissions=Permissions(grants)) as lookups:
        with client_of(lookups.socket, token="sésame") as client:
            assert as_bytes(client.drafter().draft(contexts)) == as_bytes(small.drafter().draft(contexts))
            assert [release["name"] for release in client.releases()] == ["chat"]
        for name, token, outcome, message in [
            ("code", "sésame", "forbidden", "may not use 'code'"),
            ("chat", "open", "unauthorized", "token is not known here"),
            ("chat", None, "unauthorized", "tokens new` creates one"),
        ]:
            with client_of(lookups.socket, name, token=token) as client:
                assert len(client.drafter().draft(contexts[:1])[0].tree) == 0
                assert client.counters[outcome] == client.counters.calls == 1
                with pytest.raises(LookupServiceError, match=message):
                    client.check()


def test_a_token_is_presented_once_on_each_connection(small: Store, contexts: NDArray[np.int32]) -> None:
    with (
        Service(small, faults.restarts_after(2)) as service,
        client_of(service.address, token="sésame") as client,
    ):
        for _ in range(6):
            client.drafter().draft(contexts)
        assert (client.counters["answered"], client.counters["closed"]) == (4, 2)
        assert service.greetings == ["sésame".encode()] * 2


def test_the_tokenizer_of_the_first_answer_is_that_of_all(small: Store, contexts: NDArray[np.int32]) -> None:
    with Service(small) as service, client_of(service.address) as client:
        drafter = client.drafter()
        drafter.draft(contexts)
        service.tokenizer = OTHER
        assert not any(len(draft.tree) for draft in drafter.draft(contexts))
        assert (client.counters["answered"], client.counters["other_tokenizer"]) == (1, 1)
        with pytest.raises(LookupServiceError, match="publish a build for this model's tokenizer"):
            client.check()
        service.tokenizer = TOKENIZER
        client.check()  # and with that drafts flow at once
        drafter.draft(contexts)
        assert client.counters["answered"] == 2


def test_check_describes_a_release_and_takes_over_its_vocabulary(lookups: Lookups, small: Store) -> None:
    size = small.manifest.vocab_size
    with client_of(lookups.socket, "small_store", tokenizer=small.manifest.tokenizer) as client:
        assert client.vocab_size == 2**31
        described = client.check("longest")
        assert (described["name"], described["vocab_size"], client.vocab_size) == ("small_store", size, size)
        with pytest.raises(TokenRangeError):
            client.drafter().session([size])
        with pytest.raises(LookupServiceError, match="has no strategy 'cleverest': expected one of"):
            client.check("cleverest")
    with client_of(lookups.socket, "small_store", vocab_size=1000) as client:
        client.check()
        assert client.vocab_size == 1000
    with pytest.raises(LookupServiceError, match=r"'absent': publish a release of that name"):
        client_of(lookups.socket, "absent").check()


def test_a_closed_client_drafts_nothing(small: Store, contexts: NDArray[np.int32]) -> None:
    with Service(small) as service:
        with client_of(service.address) as client:
            drafter = client.drafter()
            drafter.draft(contexts)
        assert [len(draft.tree) for draft in drafter.draft(contexts)] == [0, 0, 0]
        assert client.counters["skipped"] == 1
        client.close()


def test_threads_work_in_parallel_over_connections_of_their_own(small: Store, small_store: Path) -> None:
    local = small.drafter()
    with Service(small) as service, client_of(service.address) as client:
        drafter = client.drafter()
        start = threading.Barrier(8)

        def run(seed: int) -> None:
            contexts = contexts_of(small_store, 60, seed=seed)
            start.wait()
            for step in range(40):
                rows = contexts[step : step + 1 + step % 3]
                assert as_bytes(drafter.draft(rows)) == as_bytes(local.draft(rows))

        in_threads(partial(run, seed) for seed in range(8))
        assert client.counters["answered"] == client.counters.calls == 320
        assert client.counters["connections"] == service.connections == 8
        assert repr(client.counters).startswith("Counters(answered=320, contexts=632, drafted=")


def test_a_forked_process_has_a_connection_of_its_own_and_leaves_that_of_its_parent(
    small: Store, contexts: NDArray[np.int32]
) -> None:
    expected = as_bytes(small.drafter().draft(contexts))
    with Service(small) as service, client_of(service.address) as client:
        drafter = client.drafter()

        def drafts_alike() -> bool:
            return all(as_bytes(drafter.draft(contexts)) == expected for _ in range(50))

        def drafts_and_closes() -> bool:
            alike = drafts_alike()
            client.close()
            return alike

        assert drafts_alike()
        with client._connections._lock:  # another thread of the parent may hold it
            child = fork(drafts_and_closes)
            assert drafts_alike()
            _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert drafts_alike()
        assert (service.connections, client.counters["connections"]) == (2, 1)


def fork(function: Callable[[], bool]) -> int:
    """Run a function in a forked process, which ends with status 0 if it returns True."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child needs none of the parent's threads
        child = os.fork()
    if child == 0:
        signal.alarm(int(SECONDS))
        status = 1
        try:
            status = 0 if function() else 2
        finally:
            os._exit(status)
    return child


def test_dense_drafts_are_those_of_the_local_store(small_dense: Path) -> None:
    with (
        closing(open_store(small_dense)) as store,
        serving({"chat": small_dense}) as lookups,
        client_of(lookups.socket) as client,
    ):
        local, samples = store.drafter(), store.samples(100)
        assert samples.hidden is not None
        hidden = np.repeat(samples.hidden, 3, axis=0)
        hidden[::7] = np.nan
        hidden[3, 0] = np.inf
        contexts = np.repeat(samples.contexts[:, -1:], 3, axis=0)
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
        client_of(lookups.socket, target_model=store.manifest.target_model).check()
        with pytest.raises(LookupServiceError, match="expected 'another': publish a build for this model"):
            client_of(lookups.socket, target_model="another").check()
