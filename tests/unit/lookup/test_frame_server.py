import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from draftstore.drafting.drafter import StoreDrafter
from draftstore.remote import wire
from draftstore.remote.wire import Status
from draftstore.stores.registry import open_store
from draftstore.trees.frontier import MAX_BUDGET
from services.common.permissions import Grant, Permissions, hash_token
from services.lookup.frames import server, turns
from services.lookup.limits import Limits
from services.lookup.stores.served import OpenStores, ServedStore, open_served
from services.lookup.stores.targets import Target
from tests.fakes.lookups import Caller, Lookups, contexts_of, failure, serving
from tests.fakes.waiting import SECONDS, until


@pytest.fixture(scope="module")
def stores(small_store: Path, small_crest: Path, wide_store: Path, wide_crest: Path) -> dict[str, Path]:
    return {"rest": small_store, "crest": small_crest, "wide-rest": wide_store, "wide-crest": wide_crest}


@pytest.fixture(scope="module")
def lookups(stores: dict[str, Path]) -> Iterator[Lookups]:
    with serving(stores, limits=Limits(shared_budget=MAX_BUDGET)) as running:
        yield running


@pytest.fixture
def caller(lookups: Lookups) -> Iterator[Caller]:
    with lookups.caller() as caller:
        yield caller


def expected(
    path: Path, contexts: np.ndarray, budget: int = 64, min_prob: float = 0.0, strategy: str = ""
) -> bytes:
    """Return the payload behind build, tokenizer and duration that a local store answers with."""
    store = open_store(path)
    drafter = store.drafter(strategy) if strategy else store.drafter()
    drafts = drafter.draft_batch(contexts, budget, min_prob)
    data = wire.encode_answer(0, 0, 0, 0, drafts)[wire.HEADER.size + 24 :]
    store.close()
    return data


@pytest.mark.parametrize("name", ["rest", "crest", "wide-rest", "wide-crest"])
@pytest.mark.parametrize("tcp", [False, True])
def test_the_answer_is_that_of_the_local_store_byte_for_byte(
    lookups: Lookups, stores: dict[str, Path], name: str, tcp: bool
) -> None:
    with lookups.caller(tcp=tcp) as caller:
        nodes = 0
        for seed, (batch, width) in enumerate(
            [(1, 16), (1, 3), (2, 40), (7, 16), (64, 16), (300, 5), (512, 16)]
        ):
            contexts = contexts_of(stores[name], batch, width, seed)
            for strategy, budget, min_prob in [
                ("", 64, 0.0),
                ("longest", 7, 0.0),
                ("backoff", 300, 0.01),
                ("", 0, 0.0),
            ]:
                frame = caller.draft_frame(name, contexts, budget, min_prob, strategy)
                assert frame.payload[24:] == expected(stores[name], contexts, budget, min_prob, strategy)
                nodes += sum(len(draft.tree) for draft in wire.decode_answer(frame.payload).drafts)
        assert nodes > 1000


def test_an_answer_names_build_tokenizer_and_duration(
    lookups: Lookups, stores: dict[str, Path], caller: Caller
) -> None:
    answer = caller.draft("crest", contexts_of(stores["crest"], 50))
    served = lookups.open_stores.get("crest")
    assert (answer.build, answer.tokenizer) == (served.build, served.tokenizer)
    assert 0 < answer.micros < 10e6


@pytest.mark.parametrize("shape", [(0, 16), (0, 0), (1, 0), (3, 0), (1, 1)])
@pytest.mark.parametrize("name", ["rest", "crest"])
def test_odd_shapes(stores: dict[str, Path], caller: Caller, name: str, shape: tuple[int, int]) -> None:
    contexts = np.full(shape, 5, np.int32)
    assert len(caller.draft(name, contexts).drafts) == shape[0]


def test_ids_outside_the_vocabulary(caller: Caller) -> None:
    for name in ("rest", "crest", "wide-rest", "wide-crest"):
        contexts = np.array([[-1, 70_000, 2**31 - 1, -(2**31)], [5, -7, 400, 65_535]], np.int32)
        assert len(caller.draft(name, contexts).drafts) == 2


def test_plain_asyncio_serves_as_well(stores: dict[str, Path]) -> None:
    contexts = contexts_of(stores["rest"], 100)
    with serving(stores, loop="asyncio") as running, running.caller() as caller:
        frame = caller.draft_frame("rest", contexts)
        assert frame.payload[24:] == expected(stores["rest"], contexts)


def test_pipelined_requests_are_all_answered(stores: dict[str, Path], caller: Caller) -> None:
    contexts = contexts_of(stores["crest"], 2000)
    requests = [
        wire.encode_request(i, "crest" if i % 3 else "rest", contexts[i : i + 1 + 40 * (i % 100 == 0)], 64)
        for i in range(2000)
    ]
    sender = threading.Thread(target=caller.send, args=(b"".join(requests),))
    sender.start()
    answers = [caller.receive() for _ in requests]
    sender.join()
    found = {frame.header.request_id: frame for frame in answers if frame}
    assert sorted(found) == list(range(2000))
    for i in range(0, 2000, 97):
        name = "crest" if i % 3 else "rest"
        assert found[i].payload[24:] == expected(stores[name], contexts[i : i + 1 + 40 * (i % 100 == 0)])


def test_frames_may_arrive_in_any_pieces(stores: dict[str, Path], caller: Caller) -> None:
    contexts = contexts_of(stores["crest"], 3)
    request = wire.encode_request(7, "crest", contexts, 64)
    answer = caller.ask(request).payload[24:]
    for size in (1, 5, 15, 16, 17, len(request) - 1, len(request) + 3):
        stream = request * 3
        for start in range(0, len(stream), size):
            caller.send(stream[start : start + size])
            if size > 4:
                time.sleep(0.0005)  # so that the pieces stay pieces
        for _ in range(3):
            frame = caller.receive()
            assert frame
            assert frame.payload[24:] == answer


class SlowDrafter:
    """Takes its time for every context, and notes how many it was asked for at a time, and for how many nodes."""

    context_size, vocab_size = 16, 384

    def __init__(self, drafter: StoreDrafter, seconds: float, gate: threading.Event | None = None) -> None:
        self._drafter = drafter
        self._seconds = seconds
        self._gate = gate
        self.batches: list[int] = []
        self.budgets: list[int] = []
        self.fail: Exception | None = None

    def draft_batch(self, contexts: np.ndarray, budget: int = 64, min_prob: float = 0.0) -> object:
        self.budgets.append(budget)
        self.batches.append(len(contexts))
        if self._gate:
            assert self._gate.wait(SECONDS)
        time.sleep(self._seconds * len(contexts))
        if self.fail:
            raise self.fail
        return self._drafter.draft_batch(contexts, budget, min_prob)


def slow_shelf(
    path: Path, seconds: float, gate: threading.Event | None = None, blocking: bool = False
) -> tuple[OpenStores, ServedStore, SlowDrafter]:
    """Return the open stores with one store whose drafts take a while."""
    open_stores, served = OpenStores(), open_served(Target("slow", path))
    drafter = SlowDrafter(served.drafter(), seconds, gate)
    served._drafters[""] = drafter  # type: ignore[assignment]
    served.blocking = blocking
    open_stores.put("slow", served)
    return open_stores, served, drafter


def test_a_large_batch_is_cut_and_does_not_hold_up_others(small_crest: Path) -> None:
    gate = threading.Event()
    open_stores, served, drafter = slow_shelf(small_crest, 0.0002, gate)
    contexts = contexts_of(small_crest, 512)
    with serving(open_stores) as running, running.caller() as large, running.caller() as small:
        gate.set()
        for _ in range(20):
            small.draft("slow", contexts[:1], 65)  # it learns what a context costs
        gate.clear()
        drafter.batches.clear()
        drafter.budgets.clear()
        large.send(wire.encode_request(1, "slow", contexts, 64))
        until(lambda: drafter.batches)  # the service stands still in the first piece
        small.send(b"".join(wire.encode_request(i, "slow", contexts[:1], 65) for i in range(10)))
        gate.set()
        assert all(small.receive() for _ in range(10))
        frame = large.receive()
        assert frame
        assert frame.payload[24:] == expected(small_crest, contexts)
        assert max(drafter.batches) < 100
        assert sum(drafter.batches) == 512 + 10
        pieces = drafter.budgets
        assert pieces.count(65) == 10
        assert pieces[-1] == 64  # those that came in between went before its last piece
        assert served.readers == 0


def test_large_batches_take_turns(small_crest: Path) -> None:
    gate = threading.Event()
    open_stores, _, drafter = slow_shelf(small_crest, 0.0002, gate)
    contexts = contexts_of(small_crest, 400)
    with serving(open_stores) as running, running.caller() as first, running.caller() as second:
        first.send(b"".join(wire.encode_request(1, "slow", contexts, budget) for budget in (64, 65)))
        until(lambda: drafter.batches)  # the service stands still in the first piece
        second.send(wire.encode_request(1, "slow", contexts[:50], 66))
        gate.set()
        assert all(caller.receive() for caller in (second, first, first))
        pieces = drafter.budgets
        assert 64 in pieces[pieces.index(66) :]  # it did not have to wait for all of the first
        assert 66 not in pieces[pieces.index(65) :]  # one of the two at most was done before


def test_a_release_that_moves_does_not_mix_builds(small_crest: Path, small_store: Path) -> None:
    gate = threading.Event()
    open_stores, served, drafter = slow_shelf(small_crest, 0.0002, gate)
    contexts = contexts_of(small_crest, 300)
    with serving(open_stores) as running, running.caller() as caller, running.caller() as other:
        caller.send(wire.encode_request(1, "slow", contexts, 64))
        until(lambda: drafter.batches)
        gate.set()
        running.put("slow", small_store)
        answer = other.draft("slow", contexts[:1])
        assert answer.build == open_stores.get("slow").build != served.build
        frame = caller.receive()
        assert frame
        assert wire.decode_answer(frame.payload).build == served.build
        assert frame.payload[24:] == expected(small_crest, contexts)
        until(lambda: served.closed)


def test_swaps_under_load(small_crest: Path, small_store: Path) -> None:
    contexts = contexts_of(small_crest, 40)
    right = {}
    for path in (small_crest, small_store):
        served = open_served(Target("x", path))
        right[served.build] = expected(path, contexts)
        served.close()
    seen = set()
    stop = threading.Event()

    def load(running: Lookups) -> None:
        with running.caller() as caller:
            while not stop.is_set():
                frame = caller.draft_frame("moving", contexts)
                build = int.from_bytes(frame.payload[:8], "little")
                assert frame.payload[24:] == right[build]
                seen.add(build)

    failures: list[BaseException] = []

    def guarded(running: Lookups) -> None:
        try:
            load(running)
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            failures.append(error)

    with serving({"moving": small_crest}) as running:
        threads = [threading.Thread(target=guarded, args=(running,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for turn in range(20):
            running.put("moving", small_crest if turn % 2 else small_store)
            if turn in (9, 10):  # both are seen, however slow the others are
                build = running.open_stores.get("moving").build
                until(lambda build=build: build in seen or failures)  # type: ignore[misc]
        stop.set()
        for thread in threads:
            thread.join(SECONDS)
    assert not failures
    assert seen == right.keys()


@pytest.mark.parametrize(
    ("batch", "width", "budget", "words"),
    [(9, 4, 8, "9 contexts"), (1, 33, 8, "33 tokens"), (1, 4, 17, "budget of 17")],
)
def test_limits_of_a_request(small_crest: Path, batch: int, width: int, budget: int, words: str) -> None:
    limits = Limits(batch=8, context=32, budget=16, waiting_each=8, waiting=8)
    with serving({"crest": small_crest}, limits=limits) as running, running.caller() as caller:
        refused = failure(caller.draft_frame("crest", np.zeros((batch, width), np.int32), budget))
        assert refused.status == Status.TOO_LARGE
        assert words in refused.message
        assert len(caller.draft("crest", np.zeros((8, 32), np.int32), 16).drafts) == 8
        assert running.totals().failures[Status.TOO_LARGE] == 1


def test_a_frame_beyond_the_limit_is_refused_by_its_header_alone(small_crest: Path) -> None:
    limits = Limits(payload=1000)
    with serving({"crest": small_crest}, limits=limits) as running, running.caller() as caller:
        assert caller.draft("crest", np.zeros((1, 16), np.int32))
        caller.send(wire.HEADER.pack(1001, 1, wire.Operation.DRAFT, 0, 0, 77))
        frame = caller.receive()
        assert failure(frame).status == Status.TOO_LARGE
        assert frame
        assert frame.header.request_id == 77
        assert caller.ended()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        bytes(16),
        b"\xff" * 64,
        wire.HEADER.pack(0, 2, 2, 0, 0, 1),
    ],
)
def test_bytes_that_are_no_frame_get_one_answer_and_the_end(
    lookups: Lookups, caller: Caller, data: bytes
) -> None:
    good = wire.encode_request(4, "crest", np.zeros((1, 16), np.int32), 8)
    caller.send(good + data + good * 100)
    first, second = caller.receive(), caller.receive()
    assert first
    assert first.header.status == Status.OK
    assert failure(second).status == Status.BAD_REQUEST
    assert second
    assert (second.header.request_id, second.header.operation) == (0, wire.ANSWER)
    assert caller.ended()


def test_a_broken_request_ends_neither_connection_nor_others(caller: Caller) -> None:
    good = wire.encode_request(4, "crest", np.zeros((1, 16), np.int32), 8)
    for payload in (b"", b"x", good[16:-1], good[16:] + b"\0", bytes(16), b"\xff" * 100):
        refused = caller.ask(wire.frame(wire.Operation.DRAFT, 9, payload))
        if payload != bytes(16):
            assert failure(refused).status == Status.BAD_REQUEST
        assert refused.header.request_id == 9
    for operation in (0, 5, 77, 0x82, 255):
        assert failure(caller.ask(wire.frame(operation, 9))).status == Status.BAD_REQUEST
    projection = caller.ask(wire.frame(wire.Operation.PROJECTION, 9, b"crest"))
    assert failure(projection).status == Status.NOT_FOUND  # no dense store
    assert caller.ask(good).header.status == Status.OK


def test_unknown_names_and_strategies(lookups: Lookups, caller: Caller) -> None:
    contexts = np.zeros((1, 16), np.int32)
    for name in ("", "../../etc/passwd", "no' OR 1=1 --", "x" * 255, "ü"):
        refused = failure(caller.draft_frame(name, contexts))
        assert refused.status == Status.NOT_FOUND
    refused = failure(caller.draft_frame("crest", contexts, strategy="fastest"))
    assert refused.status == Status.NOT_FOUND
    assert "backoff" in refused.message
    assert lookups.figures.totals().keys() == {"", "rest", "crest", "wide-rest", "wide-crest"}


def test_sections_and_flags_of_later_versions_are_skipped(stores: dict[str, Path], caller: Caller) -> None:
    contexts = contexts_of(stores["crest"], 2)
    sections = {1: np.zeros((2, 64), "<f4").tobytes(), 2: np.zeros(2, "<i4").tobytes(), 900: b"abc"}
    data = bytearray(wire.encode_request(3, "crest", contexts, 64, sections=sections))
    data[7] = 0xFF
    assert caller.ask(bytes(data)).payload[24:] == expected(stores["crest"], contexts)


def test_releases_are_listed(lookups: Lookups, caller: Caller) -> None:
    import json

    frame = caller.ask(wire.frame(wire.Operation.RELEASES, 5))
    assert frame.header.status == Status.OK
    document = json.loads(frame.payload)
    assert [entry["name"] for entry in document["releases"]] == ["crest", "rest", "wide-crest", "wide-rest"]
    assert "/" not in frame.payload.decode()


def test_long_drafts_are_for_the_unix_socket_and_for_tokens_that_allow_them(small_crest: Path) -> None:
    contexts = np.zeros((1, 4), np.int32)
    with (
        serving({"crest": small_crest}) as running,
        running.caller() as local,
        running.caller(tcp=True) as other,
    ):
        assert len(local.draft("crest", contexts, 4096).drafts) == 1
        assert len(other.draft("crest", contexts, 256).drafts) == 1
        refused = failure(other.draft_frame("crest", contexts, 257))
        assert (refused.status, "budget of 256" in refused.message) == (Status.TOO_LARGE, True)
        assert [budget_of(caller.hello()) for caller in (local, other)] == [4096, 256]
    grants = [
        Grant(name, frozenset(["*"]), hash_token(name), most)
        for name, most in (("plain", None), ("more", 1024), ("less", 16))
    ]
    with serving({"crest": small_crest}, permissions=Permissions(grants)) as running:
        for token, most in (("plain", 256), ("more", 1024), ("less", 16)):
            with running.caller(tcp=True) as caller:
                assert budget_of(caller.hello(token)) == most
                assert len(caller.draft("crest", contexts, most).drafts) == 1
                assert failure(caller.draft_frame("crest", contexts, most + 1)).status == Status.TOO_LARGE
                running.call(running.server.change_permissions, Permissions(grants))
                assert failure(caller.draft_frame("crest", contexts, most + 1)).status == Status.TOO_LARGE


def budget_of(hello: wire.Frame) -> int:
    return int(json.loads(hello.payload)["limits"]["budget"])


def test_hello_tells_the_limits(caller: Caller) -> None:
    frame = caller.hello("whatever")
    document = json.loads(frame.payload)
    assert document == {
        "version": 1,
        "limits": {"payload": 1 << 20, "batch": 512, "context": 4096, "budget": 4096},
    }


def keyed(*grants: tuple[str, str, list[str]]) -> Permissions:
    return Permissions(
        [Grant(name, frozenset(releases), hash_token(token)) for name, token, releases in grants]
    )


def test_tokens(stores: dict[str, Path]) -> None:
    permissions = keyed(("one", "secret-1", ["crest"]), ("all", "secret-2", ["*"]))
    contexts = np.zeros((1, 16), np.int32)
    with serving(stores, permissions=permissions) as running:
        with running.caller() as caller:
            assert failure(caller.draft_frame("crest", contexts)).status == Status.UNAUTHORIZED
            assert failure(caller.ask(wire.frame(wire.Operation.RELEASES, 1))).status == Status.UNAUTHORIZED
            assert caller.hello("secret-1").header.status == Status.OK
            assert caller.draft("crest", contexts)
            for name in ("rest", "unheard-of"):
                refused = failure(caller.draft_frame(name, contexts))
                assert refused.status == Status.FORBIDDEN  # whether it exists or not
            listed = caller.ask(wire.frame(wire.Operation.RELEASES, 1)).payload
            assert b'"crest"' in listed
            assert b'"rest"' not in listed.replace(b'"kind": "rest"', b"")
            assert caller.hello("secret-2").header.status == Status.OK
            assert caller.draft("rest", contexts)
        for token in ("", "secret-3", "SECRET-1", "\0"):
            with running.caller() as caller:
                assert failure(caller.hello(token)).status == Status.UNAUTHORIZED
                assert caller.ended()  # one guess a connection
        assert running.totals().failures[Status.UNAUTHORIZED] == 6


def test_strangers_cannot_send_much(stores: dict[str, Path]) -> None:
    with serving(stores, permissions=keyed(("one", "s", ["*"]))) as running, running.caller() as caller:
        caller.send(wire.HEADER.pack(5000, 1, wire.Operation.HELLO, 0, 0, 1))
        assert failure(caller.receive()).status == Status.TOO_LARGE
        assert caller.ended()


def test_strangers_have_to_say_who_they_are_in_time(stores: dict[str, Path]) -> None:
    permissions = keyed(("one", "s", ["*"]))
    limits = Limits(hello_seconds=0.2)

    def held_up(running: Lookups) -> Caller:
        """Return a connection that said who it is while the service was held up, and so in time."""
        greeted = threading.Event()
        running.loop.call_soon_threadsafe(greeted.wait)
        caller = running.caller()
        caller.send(wire.frame(wire.Operation.HELLO, 1, b"s"))
        greeted.set()
        frame = caller.receive()
        assert frame
        assert frame.header.status == Status.OK
        return caller

    with (
        serving(stores, permissions=permissions, limits=limits) as running,
        held_up(running) as known,
        running.caller() as silent,
    ):
        assert failure(silent.receive()).status == Status.UNAUTHORIZED
        assert silent.ended()
        time.sleep(0.3)
        assert known.draft("crest", np.zeros((1, 16), np.int32))


def test_a_token_that_is_taken_back_ends_its_connections(stores: dict[str, Path]) -> None:
    contexts = np.zeros((1, 16), np.int32)
    before = keyed(("one", "s1", ["*"]), ("two", "s2", ["*"]))
    with (
        serving(stores, permissions=before) as running,
        running.caller() as one,
        running.caller() as two,
        running.caller() as nobody,
    ):
        one.hello("s1")
        two.hello("s2")
        assert failure(nobody.draft_frame("crest", contexts)).status == Status.UNAUTHORIZED
        running.call(running.server.change_permissions, keyed(("two", "s2", ["rest"])))
        assert failure(one.receive()).status == Status.UNAUTHORIZED
        assert one.ended()
        assert failure(two.draft_frame("crest", contexts)).status == Status.FORBIDDEN
        assert two.draft("rest", contexts)
        running.call(running.server.change_permissions, Permissions.open_to_all())
        assert two.draft("crest", contexts)
        assert nobody.draft("crest", contexts)
        running.call(running.server.change_permissions, before)
        assert failure(nobody.receive()).status == Status.UNAUTHORIZED


def test_too_many_connections(stores: dict[str, Path]) -> None:
    contexts = np.zeros((1, 16), np.int32)
    with serving(stores, limits=Limits(connections=2)) as running:
        with running.caller() as first, running.caller() as second:
            assert first.draft("crest", contexts)
            assert second.draft("crest", contexts)
            with running.caller() as third:
                refused = failure(third.receive())
                assert refused.status == Status.BUSY
                assert refused.retry_after > 0
                assert third.ended()
            assert first.draft("crest", contexts)
            assert running.figures.snapshot()[0].connections == 2
        until(lambda: running.figures.snapshot()[0].connections == 0)
        with running.caller() as again:
            assert again.draft("crest", contexts)


def test_busy_when_too_much_waits(small_crest: Path) -> None:
    gate = threading.Event()
    open_stores, served, drafter = slow_shelf(small_crest, 0.0, gate)
    contexts = contexts_of(small_crest, 100)
    limits = Limits(waiting=250, waiting_each=150)
    with (
        serving(open_stores, limits=limits) as running,
        running.caller() as first,
        running.caller() as second,
    ):
        request = [wire.encode_request(i, "slow", contexts, 64) for i in range(4)]
        first.send(request[0])
        until(lambda: drafter.batches)  # the loop stands still in the first piece
        first.send(request[1])
        second.send(request[2] + request[3])
        until(lambda: sum(running.figures.snapshot()[0][5:8]) >= 0)
        gate.set()
        frames = [first.receive(), first.receive(), second.receive(), second.receive()]
        for frame in frames:
            assert frame
            if frame.header.status == Status.OK:
                assert frame.payload[24:] == expected(small_crest, contexts)
            else:
                refused = failure(frame)
                assert refused.status == Status.BUSY
                assert 0 < refused.retry_after < 10
        until(lambda: running.server.waiting == 0)
        assert served.readers == 0


def test_a_database_that_hangs_delays_its_own_readers_alone(
    small_crest: Path, small_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "QUEUE_SECONDS", SECONDS)
    gate = threading.Event()
    open_stores, served, drafter = slow_shelf(small_crest, 0.0, gate, blocking=True)
    open_stores.put("rest", open_served(Target("rest", small_store)))
    contexts = contexts_of(small_crest, 5)
    limits = Limits(threads=2, waiting=30, waiting_each=25)
    with (
        serving(open_stores, limits=limits) as running,
        running.caller() as caller,
        running.caller() as other,
    ):
        for number in range(5):
            caller.send(wire.encode_request(number, "slow", contexts, 64))
        until(lambda: len(drafter.batches) == 2)
        assert other.draft("rest", contexts)  # on another connection
        caller.send(wire.encode_request(50, "rest", contexts, 64))
        overtaken = caller.receive()  # and on the same one
        assert overtaken
        assert overtaken.header.request_id == 50
        assert failure(caller.draft_frame("slow", contexts)).status == Status.BUSY
        assert running.figures.snapshot()[0].waiting == 25
        assert running.figures.snapshot()[0].in_flight == 5
        gone = running.caller()
        gone.send(wire.encode_request(1, "slow", contexts[:1], 64))
        until(lambda: running.server.waiting == 26)
        gone.close()
        until(lambda: running.server.waiting == 25)  # what nobody waits for does not wait either
        gate.set()
        frames = [caller.receive() for _ in range(5)]
        assert sorted(frame.header.request_id for frame in frames if frame) == list(range(5))
        for frame in frames:
            assert frame
            assert frame.payload[24:] == expected(small_crest, contexts)
        until(lambda: served.readers == 0)


def test_what_waits_too_long_for_a_thread_is_refused(
    small_crest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "QUEUE_SECONDS", 0.0)
    open_stores, _, _ = slow_shelf(small_crest, 0.0, blocking=True)
    with serving(open_stores) as running, running.caller() as caller:
        refused = failure(caller.draft_frame("slow", np.zeros((2, 16), np.int32)))
        assert refused.status == Status.BUSY
        until(lambda: running.totals("slow").failures[Status.BUSY] == 1)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("batch", [1, 300])
def test_errors_of_a_lookup_end_the_request_alone(
    small_crest: Path, caplog: pytest.LogCaptureFixture, blocking: bool, batch: int
) -> None:
    from draftstore.errors import StoreError

    open_stores, served, drafter = slow_shelf(small_crest, 0.00001, blocking=blocking)
    contexts = contexts_of(small_crest, batch)
    with serving(open_stores) as running, running.caller() as caller:
        drafter.fail = ZeroDivisionError("at /secret/place")
        with caplog.at_level(logging.ERROR):
            refused = failure(caller.draft_frame("slow", contexts))
        assert refused.status == Status.INTERNAL
        assert "secret" not in refused.message
        assert "ZeroDivisionError" in caplog.text
        drafter.fail = StoreError("/secret/place is damaged")
        refused = failure(caller.draft_frame("slow", contexts))
        assert refused.status == Status.UNAVAILABLE
        assert "secret" not in refused.message
        assert refused.retry_after == 1.0
        drafter.fail = None
        assert len(caller.draft("slow", contexts).drafts) == batch
        until(lambda: running.totals("slow").failures[Status.INTERNAL] == 1)
        until(lambda: served.readers == 0)


def test_a_client_that_reads_nothing_is_not_read_either(small_store: Path) -> None:
    limits = Limits(write_buffer=100_000, stall_seconds=60)
    contexts = contexts_of(small_store, 64)
    with (
        serving({"rest": small_store}, limits=limits) as running,
        running.caller() as lazy,
        running.caller() as other,
    ):
        request = wire.encode_request(1, "rest", contexts, 64)
        lazy.socket.setblocking(False)
        sent, stream = 0, request * 2000

        def send() -> bool:
            """Send what is taken; tell whether that was nothing."""
            nonlocal sent
            try:
                sent += lazy.socket.send(stream[sent : sent + 65536])
            except BlockingIOError:
                return True
            return False

        def held_up() -> bool:
            return send() and any(not link._open for link in list(running.server.connections))

        until(held_up, "the server takes more and more")
        time.sleep(0.2)
        while not send():  # what still fits into the sockets
            pass
        assert sent < len(stream)  # the server takes no more
        [held] = [link for link in running.server.connections if not link._open]
        assert running.call(held.transport.get_write_buffer_size) < 1_000_000
        assert other.draft("rest", contexts)
        lazy.socket.setblocking(True)
        right, statuses = expected(small_store, contexts), set()
        for _ in range(sent // len(request)):
            frame = lazy.receive()  # nothing was lost
            assert frame
            assert frame.header.status != Status.OK or frame.payload[24:] == right
            statuses.add(frame.header.status)
        assert Status.OK in statuses
        assert statuses <= {Status.OK, Status.BUSY}


def test_a_client_that_never_reads_is_cut_off(small_store: Path) -> None:
    limits = Limits(write_buffer=10_000, stall_seconds=0.3)
    contexts = contexts_of(small_store, 64)
    with serving({"rest": small_store}, limits=limits) as running, running.caller() as lazy:
        lazy.socket.setblocking(False)
        try:
            for _ in range(10_000):
                lazy.socket.send(wire.encode_request(1, "rest", contexts, 64))
        except (BlockingIOError, ConnectionResetError, BrokenPipeError):
            pass
        until(lambda: not running.server.connections)
        assert running.server.waiting == 0


def test_a_client_that_leaves_takes_its_requests_along(small_crest: Path) -> None:
    gate = threading.Event()
    open_stores, served, drafter = slow_shelf(small_crest, 0.0001, gate)
    contexts = contexts_of(small_crest, 400)
    with serving(open_stores) as running:
        caller = running.caller()
        caller.send(wire.encode_request(1, "slow", contexts, 64) * 2)
        until(lambda: drafter.batches)
        caller.close()
        gate.set()
        until(lambda: not running.server.connections)
        until(lambda: served.readers == 0)
        assert running.server.waiting == 0


def test_small_requests_are_answered_though_no_more_is_sent(small_crest: Path) -> None:
    contexts = contexts_of(small_crest, 1)
    with serving({"crest": small_crest}) as running, running.caller() as caller:
        caller.send(b"".join(wire.encode_request(i, "crest", contexts, 64) for i in range(500)))
        caller.socket.shutdown(socket.SHUT_WR)
        frames = [caller.receive() for _ in range(500)]
        assert [frame.header.request_id for frame in frames if frame] == list(range(500))
        assert caller.ended()


def test_drain_finishes_what_was_asked(small_crest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_QUIET_LOOKS", 10**9)  # this thread may be held up between two requests
    gate = threading.Event()
    open_stores, _, drafter = slow_shelf(small_crest, 0.0001, gate)
    contexts = contexts_of(small_crest, 300)
    with (
        serving(open_stores) as running,
        running.caller() as busy,
        running.caller() as idle,
        running.caller() as steady,
    ):
        busy.send(wire.encode_request(1, "slow", contexts, 64))
        until(lambda: drafter.batches)
        gate.set()
        frame = steady.draft_frame("slow", contexts[:1])
        assert not frame.header.flags
        drained = running.start_drain(SECONDS)
        until(lambda: running.server.flags)
        frame = steady.draft_frame("slow", contexts[:1])
        assert frame.header.flags == wire.CLOSING
        assert frame.payload[24:] == expected(small_crest, contexts[:1])
        with pytest.raises((ConnectionRefusedError, FileNotFoundError)):
            running.caller().hello()
        answer = busy.receive()
        assert answer
        assert answer.payload[24:] == expected(small_crest, contexts)
        for _ in range(20):
            assert steady.draft("slow", contexts[:1])
            time.sleep(0.02)
        monkeypatch.undo()
        assert idle.ended()
        steady.close()
        assert busy.ended()
        drained.result(SECONDS)  # type: ignore[call-arg]
        assert not running.server.connections


def test_drain_ends_in_time_whatever_clients_do(small_crest: Path) -> None:
    with serving({"crest": small_crest}) as running, running.caller() as caller:
        stop = threading.Event()

        def go_on() -> None:
            try:
                while not stop.is_set():
                    caller.draft("crest", np.zeros((1, 16), np.int32))
            except (AssertionError, OSError):
                pass

        thread = threading.Thread(target=go_on)
        thread.start()
        running.start_drain(0.3).result(SECONDS)  # type: ignore[call-arg]
        stop.set()
        thread.join(SECONDS)
        assert not running.server.connections


def test_a_server_may_listen_elsewhere_later(small_crest: Path) -> None:
    with serving({"crest": small_crest}) as running:
        running.caller().close()
        running.call(running.server.stop_listening)

        listening = socket.socket(socket.AF_INET)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        running.call(running.server.share, [listening], running.figures, 0)
        with Caller(listening.getsockname()) as caller:
            assert caller.draft("crest", np.zeros((1, 16), np.int32))


def test_what_is_counted(stores: dict[str, Path]) -> None:
    contexts = contexts_of(stores["crest"], 30)
    with serving(stores) as running, running.caller() as caller:
        local = open_store(stores["crest"])
        drafts = local.drafter().draft(contexts)
        local.close()
        frames = [caller.draft_frame("crest", contexts), caller.draft_frame("crest", contexts[:1])]
        until(lambda: running.totals("crest").queries == 2)  # counted when the answer is on its way
        totals = running.totals("crest")
        assert totals.contexts == 31
        assert totals.nodes == sum(len(draft.tree) for draft in [*drafts, drafts[0]])
        assert totals.misses == sum(not len(draft.tree) for draft in [*drafts, drafts[0]])
        assert totals.matched == sum(draft.match_length for draft in [*drafts, drafts[0]])
        assert totals.answer_bytes == sum(16 + len(frame.payload) for frame in frames)
        assert totals.request_bytes > 31 * 64
        assert totals.seconds > 0


def test_a_slice_is_short() -> None:
    assert turns.time_slice(2) == turns.time_slice(9) <= 0.001 < turns.time_slice(1) <= 0.02
