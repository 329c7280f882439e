"""Dense releases through both clients: the drafts of the local store, and what happens when a release moves."""

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from draftstore.drafting.drafter import ContextDrafter, Drafter, projection_of, propose_batch
from draftstore.drafting.projection import Projection
from draftstore.errors import DraftstoreError, LookupServiceError, TokenRangeError
from draftstore.remote import protocol, wire
from draftstore.remote.client import RemoteStore
from draftstore.remote.queries import encode_projection
from draftstore.remote.wire import Operation, Status
from draftstore.stores.dresd.store import DresdStore
from draftstore.stores.registry import open_store
from draftstore.trees.batch import Draft
from draftstore.trees.tree import DraftTree
from services.common.permissions import Grant, Permissions, hash_token
from tests.fakes import faults
from tests.fakes.clients import Client, connected
from tests.fakes.dense_stores import MODEL, make_dense_store, make_projection, make_states
from tests.fakes.faults import Service
from tests.fakes.lookups import Lookups, serving
from tests.fakes.waiting import SECONDS, until

VOCABULARY = 50
DOCUMENTS = [np.random.default_rng(seed).integers(0, 12, 40).tolist() for seed in range(12)]
STATES = make_states(DOCUMENTS)


class Asked(NamedTuple):
    """A batch of contexts with what becomes of the hidden states that predicted their last tokens."""

    contexts: NDArray[np.int32]
    queries: NDArray[np.float32]


def asked_of(projection: Projection, batch: int, seed: int = 0) -> Asked:
    """Return places of the corpus, a little blurred; some contexts are padded, some queries are none."""
    rng = np.random.default_rng(seed)
    contexts = np.full((batch, 4), -1, np.int32)
    queries = np.full((batch, projection.dims), np.nan, np.float32)
    for context, query in zip(contexts, queries, strict=True):
        document, place = int(rng.integers(0, len(DOCUMENTS))), int(rng.integers(3, 38))
        context[:] = DOCUMENTS[document][place - 2 : place + 2]
        context[: int(rng.integers(0, 4))] = -1
        if rng.random() < 0.8:
            state = STATES[document][place] + rng.standard_normal(16).astype(np.float32) / 4
            query[:] = projection.apply(state) * np.float32(rng.uniform(0.1, 10))
        elif rng.random() < 0.5:
            query[int(rng.integers(0, len(query))) :] = 1.0
    return Asked(contexts, queries)


def as_bytes(drafts: list[Draft]) -> list[tuple[bytes, int, int]]:
    return [(draft.tree.to_bytes(), draft.match_length, draft.match_count) for draft in drafts]


def nodes_of(drafts: list[Draft]) -> int:
    return sum(len(draft.tree) for draft in drafts)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return stores of one corpus: of two projections, of both types of vectors, and of another model."""
    folder = tmp_path_factory.mktemp("dense")
    small = make_states(DOCUMENTS, 12)
    return {
        "first": make_dense_store(folder / "first", DOCUMENTS, STATES),
        "second": make_dense_store(
            folder / "second", DOCUMENTS, STATES, projection=make_projection(16, 5, 1)
        ),
        "alike": make_dense_store(folder / "alike", DOCUMENTS, STATES, projection=make_projection(16, 8, 2)),
        "int8": make_dense_store(folder / "int8", DOCUMENTS, STATES, dtype="int8"),
        "model": make_dense_store(
            folder / "model",
            DOCUMENTS,
            STATES,
            projection=make_projection(16, 8, 3),
            target_model="org/other",
        ),
        "size": make_dense_store(folder / "size", DOCUMENTS, small),
    }


@pytest.fixture
def opened(paths: dict[str, Path]) -> Iterator[Callable[[str], DresdStore]]:
    """Return what opens a store by its name."""
    stores: dict[str, DresdStore] = {}

    def open_once(name: str) -> DresdStore:
        if name not in stores:
            stores[name] = DresdStore.open(paths[name])
        return stores[name]

    yield open_once
    for store in stores.values():
        store.close()


@pytest.fixture
def lookups(paths: dict[str, Path]) -> Iterator[Lookups]:
    with serving({"chat": paths["first"], "int8": paths["int8"]}) as running:
        yield running


def checked(lookups: Lookups, name: str = "chat", **settings: Any) -> Any:
    """Return a client that knows its release."""
    return connected(lookups.socket, name, **{"deadline": SECONDS, **settings})


# -- drafts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["wide", "deep", ""])
@pytest.mark.parametrize("name", ["chat", "int8"])
def test_the_same_drafts_as_the_local_store_byte_for_byte(
    strategy: str, name: str, lookups: Lookups, opened: Callable[[str], DresdStore]
) -> None:
    store = opened("first" if name == "chat" else "int8")
    local = store.drafter(strategy) if strategy else store.drafter()
    drafted = 0
    with checked(lookups, name) as client:
        client.check(strategy)
        drafter = client.drafter(strategy)
        for batch in (0, 1, 2, 40):
            contexts, queries = asked_of(store.projection, batch, seed=batch)
            for budget, least in (
                (0, 0.0),
                (1, 0.0),
                (5, 0.0),
                (64, 0.0),
                (4096, 0.0),
                (64, 0.05),
                (64, 1.5),
            ):
                expected = as_bytes(local.draft(contexts, budget, least, queries=queries))
                assert as_bytes(drafter.draft(contexts, budget, least, queries=queries)) == expected
                drafted += sum(len(tree) > 4 for tree, _, _ in expected)
        contexts, queries = asked_of(store.projection, 20)
        assert as_bytes(drafter.draft(contexts)) == as_bytes(local.draft(contexts))
        strange: Any = np.asfortranarray(queries.astype(np.float64))
        assert as_bytes(drafter.draft(contexts, queries=strange)) == as_bytes(
            local.draft(contexts, queries=strange)
        )
    assert drafted > 50


@pytest.mark.parametrize(("batch", "most", "requests"), [(512, 1 << 17, 1), (1300, 1 << 17, 3), (50, 120, 5)])
def test_large_batches_are_asked_in_several_requests(
    batch: int, most: int, requests: int, lookups: Lookups, opened: Callable[[str], DresdStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    store = opened("first")
    contexts, queries = asked_of(store.projection, batch)
    with checked(lookups) as client:
        client.check()
        before = lookups.totals("chat").queries
        monkeypatch.setattr("draftstore.remote.requests.MAX_NUMBERS", most)
        found = client.drafter().draft(contexts, 8, queries=queries)
        assert as_bytes(found) == as_bytes(store.drafter().draft(contexts, 8, queries=queries))
        assert client.counters.calls == client.counters["answered"] == 1
        until(lambda: lookups.totals("chat").queries == before + requests)


def test_a_session_follows_its_text(lookups: Lookups, opened: Callable[[str], DresdStore]) -> None:
    store = opened("first")
    text, states = DOCUMENTS[3], store.projection.apply(STATES[3])
    with checked(lookups) as client:
        client.check()
        drafter = client.drafter()
        assert drafter.projection.digest == store.projection.digest
        session = drafter.session(text[:5], hidden=states[3])
        local = store.drafter().session(text[:5], hidden=states[3])
        assert session.needs_hidden
        assert session.projection is drafter.projection
        nodes = 0
        for place in range(5, 30):
            tree = session.propose(16, 0.01)
            assert tree == local.propose(16, 0.01)
            nodes += len(tree)
            for each in (session, local):
                each.observe([text[place]], hidden=states[place - 1] if place % 5 else None)
        assert nodes > 50
        with pytest.raises(TokenRangeError):
            session.observe([client.vocab_size], hidden=states[0])
        with pytest.raises(DraftstoreError, match="projected state of shape"):
            session.observe([1], hidden=STATES[3][0])


def test_nothing_is_asked_where_no_state_is_known(lookups: Lookups) -> None:
    with checked(lookups) as client:
        client.check()
        drafter = client.drafter()
        assert len(drafter.session([1, 2, 3]).propose()) == 0
        assert nodes_of(drafter.draft(np.ones((3, 1), np.int32))) == 0
        assert client.counters.calls == 0


def test_what_a_local_store_refuses_is_refused(lookups: Lookups, opened: Callable[[str], DresdStore]) -> None:
    store = opened("first")
    contexts, queries = asked_of(store.projection, 3)
    with checked(lookups) as client:
        client.check()
        for drafter in (store.drafter(), client.drafter()):
            for rows in (queries[:2], queries[:, :7], queries[0], np.hstack([queries, queries])):
                with pytest.raises(
                    DraftstoreError, match=r"queries of shape .* for 3 contexts: expected \(3, 8\)"
                ):
                    drafter.draft(contexts, queries=rows)
            with pytest.raises(DraftstoreError, match="a budget of 4097"):
                drafter.draft(contexts, 4097, queries=queries)
            with pytest.raises(TokenRangeError):
                drafter.session([VOCABULARY])
        assert client.counters.calls == 0


def test_many_sessions_propose_in_one_request(
    lookups: Lookups, paths: dict[str, Path], opened: Callable[[str], DresdStore]
) -> None:
    local, projection = opened("first").drafter(), opened("first").projection
    with RemoteStore(lookups.socket, "chat", deadline=SECONDS) as remote:
        remote.check()
        drafter: Any = remote.drafter()

        def begin(each: Any, place: int) -> Any:
            hidden = projection.apply(STATES[1][place - 2]) if place % 3 else None
            return each.session(DOCUMENTS[1][:place], hidden=hidden)

        expected = [begin(local, place).propose(9, 0.01) for place in range(3, 30)]
        assert sum(map(len, expected)) > 50
        for each in (drafter, local):
            sessions = [begin(each, place) for place in range(3, 30)]
            assert propose_batch(each, sessions, 9, 0.01) == expected
        assert remote.counters.calls == 1
        other = opened("second").drafter().session([1], hidden=np.ones(5, np.float32))
        assert propose_batch(drafter, [sessions[1], other], 9, 0.01) == [expected[1], DraftTree.empty()]


def test_clients_fit_the_protocols(lookups: Lookups, opened: Callable[[str], DresdStore]) -> None:
    contexts, queries = asked_of(opened("first").projection, 1, seed=1)
    with RemoteStore(lookups.socket, "chat", deadline=SECONDS) as remote:
        remote.check()
        found = remote.drafter()
        assert found.projection is remote.projection is not None
        drafter: Drafter = found
        dense: ContextDrafter = found
        tree = dense.draft(contexts, queries=queries)[0].tree
        assert drafter.session(contexts[0, -1:], hidden=queries[0]).propose() == tree
        assert len(tree) > 0


# -- check -----------------------------------------------------------------------------------------------------


def test_check_learns_the_projection(lookups: Lookups, opened: Callable[[str], DresdStore]) -> None:
    store = opened("first")
    with checked(lookups, target_model=MODEL) as client:
        assert projection_of(client.drafter()) is None
        contexts, queries = asked_of(store.projection, 20)
        assert nodes_of(client.drafter().draft(contexts)) == 0
        told = client.check()
        assert (told["kind"], told["target_model"]) == ("dresd", MODEL)
        assert told["projection"] == {"digest": store.projection.digest, "dims": 8, "hidden_size": 16}
        found = client.projection
        assert found is not None
        assert found.digest == store.projection.digest
        assert nodes_of(client.drafter().draft(contexts, queries=queries)) > 0
        client.check("deep")
        assert client.projection is found  # it is not fetched again
        with pytest.raises(LookupServiceError, match="unknown strategy 'backoff'"):
            client.check("backoff")


def test_a_release_of_another_model_is_refused_with_both_names(lookups: Lookups) -> None:
    with (
        checked(lookups, target_model="org/mine") as client,
        pytest.raises(LookupServiceError, match=f"made for the model '{MODEL}', expected 'org/mine'"),
    ):
        client.check()


def test_a_release_of_text_is_for_any_model(small_store: Path) -> None:
    with serving({"chat": small_store}) as lookups, checked(lookups, target_model="org/mine") as client:
        assert client.check()["target_model"] is None
        assert client.projection is None


def test_a_projection_that_is_longer_than_other_answers(tmp_path: Path) -> None:
    projection = make_projection(9000, 64)
    assert len(encode_projection(projection)) > 2 * protocol.MAX_BYTES
    states = make_states(DOCUMENTS[:2], 9000)
    path = make_dense_store(tmp_path / "store", DOCUMENTS[:2], states, projection=projection)
    with serving({"chat": path}) as lookups, checked(lookups) as client:
        client.check()
        assert client.projection is not None
        assert client.projection.digest == projection.digest


def test_tokens(paths: dict[str, Path]) -> None:
    grants = [Grant("engine", frozenset(["chat"]), hash_token("secret"))]
    stores = {"chat": paths["first"], "code": paths["first"]}
    with serving(stores, permissions=Permissions(grants)) as lookups:
        with checked(lookups, token="secret") as client:
            client.check()
            contexts, queries = asked_of(client.projection, 20)
            assert nodes_of(client.drafter().draft(contexts, queries=queries)) > 0
        for name, token, message in (
            ("code", "secret", "the token needs a permission"),
            ("chat", None, "give one with token="),
        ):
            with checked(lookups, name, token=token) as client:
                with pytest.raises(LookupServiceError, match=message):
                    client.check()
                assert client.projection is None


# -- a release that moves --------------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def session_of(client: Client, drafter: Any, projection: Projection, place: int = 5) -> Any:
    """Start a text as a decoder does: with a state that was projected as the drafter wants it."""
    return drafter.session(DOCUMENTS[2][:place], hidden=projection.apply(STATES[2][place - 2]))


@pytest.mark.parametrize("move", ["second", "alike"])
def test_the_next_text_takes_the_projection_that_the_release_has_by_then(
    move: str,
    lookups: Lookups,
    paths: dict[str, Path],
    opened: Callable[[str], DresdStore],
    caplog: pytest.LogCaptureFixture,
) -> None:
    before, after = opened("first").projection, opened(move).projection
    with checked(lookups) as client:
        client.check()
        drafter = client.drafter()
        running = session_of(client, drafter, before)
        assert len(running.propose()) > 0
        lookups.put("chat", paths[move])
        for _ in range(5):  # the text that is being decoded goes on without
            assert len(running.propose()) == 0
            running.observe([DOCUMENTS[2][5]], hidden=before.apply(STATES[2][4]))
        assert client.counters["other_projection"] == 5
        assert client.counters["skipped"] == client.counters["opened"] == 0
        [warning] = warnings_of(caplog)
        assert before.digest[:16] in warning
        assert after.digest[:16] in warning
        until(lambda: running.propose() is not None and client.projection.digest == after.digest)
        assert drafter.projection.digest == before.digest
        session = session_of(client, drafter, drafter.projection)  # its state was projected too early
        assert drafter.projection.digest == session.projection.digest == after.digest
        assert len(session.propose()) == 0
        session.observe([DOCUMENTS[2][5]], hidden=after.apply(STATES[2][4]))
        local = opened(move).drafter().session(DOCUMENTS[2][:6], hidden=after.apply(STATES[2][4]))
        assert session.propose() == local.propose()
        assert len(local.propose()) > 0
        assert len(running.propose()) == 0
        session = session_of(client, drafter, drafter.projection)
        assert len(session.propose()) > 0
        lookups.put("chat", paths["first"])
        assert len(running.propose()) > 0  # rolled back


@pytest.mark.parametrize(
    ("move", "settings", "words"),
    [
        ("model", {"target_model": MODEL}, "made for the model 'org/other', expected 'org/model'"),
        ("size", {}, "hidden states of 12 numbers now, expected 16"),
    ],
)
def test_a_release_that_moves_to_another_model_drafts_no_more(
    move: str,
    settings: dict[str, Any],
    words: str,
    lookups: Lookups,
    paths: dict[str, Path],
    opened: Callable[[str], DresdStore],
    caplog: pytest.LogCaptureFixture,
) -> None:
    projection = opened("first").projection
    with checked(lookups, **settings) as client:
        client.check()
        drafter = client.drafter()
        lookups.put("chat", paths[move])
        session = session_of(client, drafter, projection)

        def warned() -> bool:
            assert len(session.propose()) == 0
            return len(warnings_of(caplog)) == 2

        until(warned)
        assert words in warnings_of(caplog)[1]
        with pytest.raises(LookupServiceError, match=words):
            client.check()
        session = session_of(client, drafter, projection)
        assert len(session.propose()) == 0
        assert session.projection.digest == projection.digest
        lookups.put("chat", paths["first"])
        assert len(session.propose()) > 0


def test_a_release_that_becomes_one_of_text(
    lookups: Lookups, small_store: Path, opened: Callable[[str], DresdStore]
) -> None:
    projection = opened("first").projection
    with checked(lookups) as client:
        client.check()
        drafter = client.drafter()
        lookups.put("chat", small_store)
        session = session_of(client, drafter, projection)
        with closing(open_store(small_store)) as store:
            expected = store.drafter().draft(np.array([[DOCUMENTS[2][4]]], np.int32))[0].tree
        assert session.propose() in (expected, expected.prefix(0))  # none if the tokenizer is another one


def test_threads_that_decode_while_the_release_moves_to_and_fro(
    lookups: Lookups, paths: dict[str, Path], opened: Callable[[str], DresdStore]
) -> None:
    names = ("first", "second", "alike")
    stores = {opened(name).projection.digest: opened(name) for name in names}
    problems: list[BaseException] = []
    seen: set[str] = set()
    done = threading.Event()

    def run(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not done.is_set():
                number, start = int(rng.integers(0, len(DOCUMENTS))), int(rng.integers(3, 30))
                text, states = DOCUMENTS[number], STATES[number]
                known = drafter.projection
                session = drafter.session(text[:start], hidden=known.apply(states[start - 2]))
                store = stores[session.projection.digest]
                first = True
                for place in range(start, start + 6):
                    tree = session.propose(16)
                    query = session.projection.apply(states[place - 2])
                    local = store.drafter().session(text[:place], hidden=query).propose(16)
                    # Of the first state another thread may have seen the projection change in between.
                    assert first or tree in (local, DraftTree.empty())
                    if len(tree) and not first:
                        seen.add(session.projection.digest)
                    first = False
                    session.observe([text[place]], hidden=session.projection.apply(states[place - 1]))
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    with RemoteStore(lookups.socket, "chat", deadline=SECONDS) as remote:
        remote.check()
        drafter: Any = remote.drafter()
        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for turn in range(1, 5):
            seen.clear()
            lookups.put("chat", paths[names[turn % 3]])
            until(lambda: problems or opened(names[turn % 3]).projection.digest in seen)  # noqa: B023
        done.set()
        for thread in threads:
            thread.join(SECONDS)
        assert not problems
        counters = remote.counters
        assert counters["answered"] + counters["other_projection"] == counters.calls


# -- services that do wrong ------------------------------------------------------------------------------------


def answers(projection: Callable[[], bytes], digest: str, model: Any = MODEL) -> faults.Behaviour:
    """Draft nothing, and tell of a projection."""

    def behave(peer: faults.Peer) -> None:
        while True:
            frame = peer.read()
            number, operation = frame.header.request_id, frame.header.operation
            if operation == Operation.RELEASES:
                told = {"name": "chat", "target_model": model, "projection": {"digest": digest}}
                peer.send(wire.encode_json(operation, number, {"releases": [told]}))
            elif operation == Operation.PROJECTION:
                peer.send(wire.frame(operation | wire.ANSWER, number, projection()))
            elif wire.decode_request(frame.payload).sections:
                failure = wire.Failure(Status.OTHER_PROJECTION, 0.0, "moved")
                peer.send(wire.encode_failure(operation, number, failure))
            else:
                peer.send(peer.service.answer(frame))

    return behave


BAD = {
    "cut": encode_projection(make_projection())[:-1],
    "empty": b"",
    "no dims": bytes(8),
    "large": b"\xff" * 100,
    "nan": encode_projection(make_projection())[:-4] + b"\xff" * 4,
}


def refuse(behave: Callable[[faults.Peer], None], path: Path, message: str) -> None:
    """See that a client refuses such a service at its start, and has no projection then."""
    with (
        closing(open_store(path)) as store,
        Service(store, behave) as service,
        connected(service.address, deadline=SECONDS) as client,
    ):
        with pytest.raises(LookupServiceError, match=message):
            client.check()
        assert client.projection is None


@pytest.mark.parametrize("fault", BAD)
def test_projections_that_are_none(fault: str, small_store: Path) -> None:
    behave = answers(lambda: BAD[fault], make_projection().digest)
    refuse(behave, small_store, "a version that fits this client")


def test_a_release_that_moves_all_the_time(small_store: Path) -> None:
    seeds = iter(range(1000))
    behave = answers(
        lambda: encode_projection(make_projection(seed=next(seeds) + 1)), make_projection().digest
    )
    refuse(behave, small_store, "keeps moving to another build")


@pytest.mark.parametrize("told", ["text", 7, None, {"digest": 7}, {"digest": None}, []])
def test_what_is_told_of_a_projection_may_be_anything(told: Any, small_store: Path) -> None:
    def behave(peer: faults.Peer) -> None:
        while True:
            frame = peer.read()
            if frame.header.operation == Operation.RELEASES:
                entry = {"name": "chat", "target_model": told, "projection": told}
                peer.send(
                    wire.encode_json(Operation.RELEASES, frame.header.request_id, {"releases": [entry]})
                )
            else:
                peer.send(peer.service.answer(frame))

    with (
        closing(open_store(small_store)) as store,
        Service(store, behave) as service,
        connected(service.address, deadline=SECONDS, target_model="mine\n") as client,
    ):
        if told is None:
            client.check()
        else:
            with pytest.raises(LookupServiceError, match="made for the model"):
                client.check()
        assert client.projection is None


def test_a_service_that_refuses_every_query_is_asked_for_its_projection_now_and_then(
    small_store: Path,
) -> None:
    projection = make_projection()
    with (
        closing(open_store(small_store)) as store,
        Service(store, answers(lambda: encode_projection(projection), projection.digest)) as service,
        connected(service.address, deadline=SECONDS) as client,
    ):
        client.check()
        before = service.requests
        session = client.drafter().session([1, 2], hidden=np.ones(8, np.float32))
        for _ in range(50):
            assert len(session.propose()) == 0
        assert client.counters["other_projection"] == 50
        assert service.requests - before <= 50 + 2 * 2  # it still has the same one, so nothing is fetched


def test_a_service_that_hangs(small_store: Path) -> None:
    projection = make_projection()
    with (
        closing(open_store(small_store)) as store,
        Service(store, answers(lambda: encode_projection(projection), projection.digest)) as service,
        connected(service.address, deadline=SECONDS) as client,
    ):
        client.check()
        service.stop()
        service.behave = faults.hangs
        service.start()
        drafter = client.drafter()
        client_deadline(client, 0.02)
        session = drafter.session([1, 2], hidden=np.ones(8, np.float32))
        for _ in range(5):
            assert len(session.propose()) == 0
        assert client.counters["timeout"] >= 1


def client_deadline(client: Any, seconds: float) -> None:
    getattr(client, "_store", client).deadline = seconds


def test_a_copied_store_is_the_same_release(paths: dict[str, Path], lookups: Lookups, tmp_path: Path) -> None:
    """A build with the projection that the release had goes on without a gap."""
    shutil.copytree(paths["first"], tmp_path / "again")
    with RemoteStore(lookups.socket, "chat", deadline=SECONDS) as remote:
        remote.check()
        drafter = remote.drafter()
        assert remote.projection is not None
        session = session_of(remote, drafter, remote.projection)
        lookups.put("chat", tmp_path / "again")
        assert len(session.propose()) > 0
        assert remote.counters["other_projection"] == 0
