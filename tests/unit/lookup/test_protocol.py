import dataclasses
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import numpy as np
import pytest

from draftstore.drafting.contexts import ContextDrafter
from draftstore.errors import StoreError
from draftstore.remote import wire
from draftstore.remote.wire import Status
from draftstore.stores.registry import open_store
from services.common.permissions import Grant, Permissions, hash_token
from services.lookup.metrics import read
from services.lookup.settings import Limits
from tests.fakes.lookups import Caller, Lookups, contexts_of, failure, serving
from tests.fakes.waiting import SECONDS, until

ONE = np.zeros((1, 16), np.int32)


@pytest.fixture(scope="module")
def stores(small_store: Path, small_crest: Path, wide_store: Path) -> dict[str, Path]:
    return {"rest": small_store, "crest": small_crest, "wide": wide_store}


@pytest.fixture(scope="module")
def lookups(stores: dict[str, Path]) -> Iterator[Lookups]:
    with serving(stores) as running:
        yield running


@pytest.fixture
def caller(lookups: Lookups) -> Iterator[Caller]:
    with lookups.caller() as caller:
        yield caller


def expected(path: Path, contexts: np.ndarray) -> bytes:
    """Return the payload behind build, tokenizer and duration that a local store answers with."""
    with closing(open_store(path)) as store:
        data = wire.encode_answer(0, 0, 0, 0, store.drafter().draft_batch(contexts))
    return data[wire.HEADER.size + 24 :]


class SlowDrafter:
    """Waits for a gate before it drafts, or fails."""

    context_size, vocab_size, hidden_size = 16, 384, 0

    def __init__(self, drafter: ContextDrafter) -> None:
        self._drafter = drafter
        self.gate = threading.Event()
        self.begun = 0
        self.fail: Exception | None = None

    def draft_batch(self, contexts: np.ndarray, budget: int, min_prob: float, hidden: object) -> object:
        self.begun += 1
        assert self.gate.wait(SECONDS)
        if self.fail:
            raise self.fail
        return self._drafter.draft_batch(contexts, budget, min_prob)


def slow_down(running: Lookups, name: str) -> SlowDrafter:
    """Put a slow drafter before that of a release."""
    served = running.releases.get(name)
    drafter = SlowDrafter(served._drafters[""])
    served._drafters[""] = drafter  # type: ignore[assignment]
    served.pace = 100e-6
    return drafter


def keyed(*grants: tuple[str, str, list[str]]) -> Permissions:
    return Permissions(
        [Grant(name, frozenset(releases), hash_token(token)) for name, token, releases in grants]
    )


def test_pipelined_requests_are_answered_in_order(stores: dict[str, Path], caller: Caller) -> None:
    contexts = contexts_of(stores["crest"], 1000)
    asked = [("crest" if i % 3 else "rest", contexts[i : i + 1 + 40 * (i % 100 == 0)]) for i in range(1000)]
    requests = [wire.encode_request(i, *one, 64) for i, one in enumerate(asked)]
    sender = threading.Thread(target=caller.send, args=(b"".join(requests),))
    sender.start()
    for i, (name, rows) in enumerate(asked):
        frame = caller.answer()
        assert frame.header.request_id == i
        if i % 97 == 0:
            assert frame.payload[24:] == expected(stores[name], rows)
    sender.join()


def test_frames_may_arrive_in_any_pieces(stores: dict[str, Path], caller: Caller) -> None:
    request = wire.encode_request(7, "crest", contexts_of(stores["crest"], 3), 64)
    answer = caller.ask(request).payload[24:]
    for size in (5, 15, 16, 17, len(request) - 1, len(request) + 3):
        stream = request * 3
        for start in range(0, len(stream), size):
            caller.send(stream[start : start + size])
            time.sleep(0.0005)  # so that the pieces stay pieces
        assert [caller.answer().payload[24:] for _ in range(3)] == [answer] * 3


def test_limits_of_a_request(small_crest: Path) -> None:
    grants = Permissions([Grant("one", frozenset("*"), hash_token("s"), max_budget=16)])
    limits = Limits(batch=8, context=32)
    with (
        serving({"crest": small_crest}, limits=limits, permissions=grants) as running,
        running.caller() as caller,
    ):
        shown = json.loads(caller.hello("s").payload)["limits"]
        assert shown == {"payload": 1 << 20, "batch": 8, "context": 32, "budget": 16}
        for batch, width, budget in [(9, 4, 8), (1, 33, 8), (1, 4, 17)]:
            refused = failure(caller.draft_frame("crest", np.zeros((batch, width), np.int32), budget))
            assert refused.status == Status.TOO_LARGE
        assert len(caller.draft("crest", np.zeros((8, 32), np.int32), 16).drafts.sizes) == 8


def test_long_drafts_are_for_the_unix_socket_and_for_tokens_that_allow_them(small_crest: Path) -> None:
    def budget_of(hello: wire.Frame) -> int:
        return int(json.loads(hello.payload)["limits"]["budget"])

    with (
        serving({"crest": small_crest}) as running,
        running.caller() as local,
        running.caller(tcp=True) as other,
    ):
        assert [budget_of(caller.hello()) for caller in (local, other)] == [4096, 256]
        assert local.draft("crest", ONE, 4096)
        assert failure(other.draft_frame("crest", ONE, 257)).status == Status.TOO_LARGE
    plain, more = keyed(("plain", "plain", ["*"]), ("more", "more", ["*"])).grants or ()
    grants = Permissions([plain, dataclasses.replace(more, max_budget=1024)])
    with serving({"crest": small_crest}, permissions=grants) as running:
        for token, most in (("plain", 256), ("more", 1024)):
            with running.caller(tcp=True) as caller:
                assert budget_of(caller.hello(token)) == most
                assert caller.draft("crest", ONE, most)
                assert failure(caller.draft_frame("crest", ONE, most + 1)).status == Status.TOO_LARGE


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", bytes(16), wire.HEADER.pack(0, 3, 2, 0, 0, 1)])
def test_garbage_gets_one_error_then_close(caller: Caller, data: bytes) -> None:
    good = wire.encode_request(4, "crest", ONE, 8)
    caller.send(good + data + good * 100)
    first, second = caller.answer(), caller.answer()
    assert first.header.status == Status.OK
    assert failure(second).status == Status.BAD_REQUEST
    assert (second.header.request_id, second.header.operation) == (0, wire.ANSWER)
    assert caller.ended()


def test_a_broken_request_ends_neither_connection_nor_others(caller: Caller) -> None:
    good = wire.encode_request(4, "crest", ONE, 8)
    for payload in (b"", b"x", good[16:-1], good[16:] + b"\0", b"\xff" * 100):
        refused = caller.ask(wire.frame(wire.Operation.DRAFT, 9, payload))
        assert failure(refused).status == Status.BAD_REQUEST
        assert refused.header.request_id == 9
    for operation in (0, 4, 5, 77, 0x82, 255):
        assert failure(caller.ask(wire.frame(operation, 9))).status == Status.BAD_REQUEST
    assert caller.ask(good).header.status == Status.OK


def test_unknown_names_and_strategies(lookups: Lookups, caller: Caller) -> None:
    for name in ("", "../../etc/passwd", "no' OR 1=1 --", "x" * 255, "ü"):
        assert failure(caller.draft_frame(name, ONE)).status == Status.NOT_FOUND
    refused = failure(caller.draft_frame("crest", ONE, strategy="fastest"))
    assert refused.status == Status.NOT_FOUND
    assert "backoff" in refused.message
    assert lookups.metrics.totals().keys() == {"", "rest", "crest", "wide"}


def test_errors_of_a_lookup_end_the_request_alone(
    small_crest: Path, caplog: pytest.LogCaptureFixture
) -> None:
    contexts = contexts_of(small_crest, 300)
    with serving({"slow": small_crest}) as running, running.caller() as caller:
        drafter = slow_down(running, "slow")
        drafter.gate.set()
        for drafter.fail, status in (
            (ZeroDivisionError("at /secret/place"), Status.INTERNAL),
            (StoreError("/secret/place is damaged"), Status.UNAVAILABLE),
        ):
            for rows in (contexts[:1], contexts):  # on the event loop, and in a thread
                refused = failure(caller.draft_frame("slow", rows))
                assert (refused.status, refused.retry_after) == (status, 1.0)
                assert "secret" not in refused.message
        assert "ZeroDivisionError" in caplog.text
        drafter.fail = None
        assert len(caller.draft("slow", contexts).drafts.sizes) == 300


def test_a_store_that_was_cut_is_served_no_more(small_store: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(small_store, tmp_path / "store"))
    with serving({"cut": path, "whole": small_store}) as running, running.caller() as caller:
        assert caller.draft("cut", ONE)
        with (path / "suffixes.bin").open("r+b") as file:
            file.truncate(100)
        assert failure(caller.draft_frame("cut", ONE)).status == Status.UNAVAILABLE
        running.releases.follow()
        assert running.releases.names == ["whole"]
        assert "cut" in running.releases.failures
        assert caller.draft("whole", ONE)


def test_a_large_batch_does_not_hold_up_others(small_crest: Path, small_store: Path) -> None:
    contexts = contexts_of(small_crest, 512)
    with (
        serving({"slow": small_crest, "rest": small_store}) as running,
        running.caller() as large,
        running.caller() as small,
    ):
        drafter = slow_down(running, "slow")
        large.send(wire.encode_request(1, "slow", contexts, 64) + wire.encode_request(2, "rest", ONE, 64))
        until(lambda: drafter.begun)
        assert small.draft("rest", ONE)
        assert not large.has_data()  # not even the second answer: they keep their order
        drafter.gate.set()
        first, second = large.answer(), large.answer()
        assert (first.header.request_id, second.header.request_id) == (1, 2)
        assert first.payload[24:] == expected(small_crest, contexts)


def test_busy_when_too_much_waits(small_crest: Path) -> None:
    contexts = contexts_of(small_crest, 100)
    with (
        serving({"slow": small_crest}, limits=Limits(waiting=250)) as running,
        ExitStack() as stack,
    ):
        drafter = slow_down(running, "slow")
        callers = [stack.enter_context(running.caller()) for _ in range(3)]
        for caller in callers[:2]:
            caller.send(wire.encode_request(1, "slow", contexts, 64))
        until(lambda: running.call(lambda: running.drafting._waiting) == 200)
        refused = failure(callers[2].draft_frame("slow", contexts))
        assert refused.status == Status.BUSY
        assert 0 < refused.retry_after < 1
        drafter.gate.set()
        for caller in callers[:2]:
            assert caller.answer().payload[24:] == expected(small_crest, contexts)
        assert callers[2].draft("slow", contexts)


def test_tokens(stores: dict[str, Path]) -> None:
    permissions = keyed(("one", "secret-1", ["crest"]), ("all", "secret-2", ["*"]))
    with serving(stores, permissions=permissions) as running:
        with running.caller() as caller:
            assert caller.hello("secret-1").header.status == Status.OK
            assert caller.draft("crest", ONE)
            for name in ("rest", "unheard-of"):  # whether it exists or not
                assert failure(caller.draft_frame(name, ONE)).status == Status.FORBIDDEN
            listed = json.loads(caller.ask(wire.frame(wire.Operation.RELEASES, 1)).payload)["releases"]
            assert [entry["name"] for entry in listed] == ["crest"]
            assert caller.hello("secret-2").header.status == Status.OK
            assert caller.draft("rest", ONE)
        for frame in (wire.encode_request(1, "crest", ONE, 8), wire.frame(wire.Operation.RELEASES, 1)):
            with running.caller() as caller:
                assert failure(caller.ask(frame)).status == Status.UNAUTHORIZED
                assert caller.ended()
        for token in ("", "secret-3", "SECRET-1", "\0"):
            with running.caller() as caller:
                assert failure(caller.hello(token)).status == Status.UNAUTHORIZED
                assert caller.ended()  # one attempt a connection


@pytest.mark.parametrize(
    ("operation", "permissions", "most"),
    [(wire.Operation.DRAFT, None, 1000), (wire.Operation.HELLO, keyed(("one", "s", ["*"])), 4096)],
)
def test_a_frame_beyond_the_limit_is_refused_by_its_header_alone(
    small_crest: Path, operation: int, permissions: Permissions | None, most: int
) -> None:
    with (
        serving({"crest": small_crest}, permissions=permissions, limits=Limits(payload=1000)) as running,
        running.caller() as caller,
    ):
        caller.send(wire.HEADER.pack(most + 1, 2, operation, 0, 0, 77))
        frame = caller.answer()
        assert (failure(frame).status, frame.header.request_id) == (Status.TOO_LARGE, 77)
        assert caller.ended()


def test_a_token_that_is_taken_back_ends_its_connections(stores: dict[str, Path]) -> None:
    before = keyed(("one", "s1", ["*"]), ("two", "s2", ["*"]))
    with serving(stores, permissions=before) as running, running.caller() as one, running.caller() as two:
        one.hello("s1")
        two.hello("s2")
        running.call(running.clients.change_permissions, keyed(("two", "s2", ["rest"])))
        assert failure(one.answer()).status == Status.UNAUTHORIZED
        assert one.ended()
        assert failure(two.draft_frame("crest", ONE)).status == Status.FORBIDDEN
        assert two.draft("rest", ONE)


@pytest.mark.parametrize("tokens", [False, True])
def test_silent_and_unfinished_clients_are_closed(small_crest: Path, tokens: bool) -> None:
    permissions = keyed(("one", "s", ["*"])) if tokens else None
    limits = Limits(patience=0.2)
    request = wire.encode_request(1, "crest", ONE, 8)
    with (
        serving({"crest": small_crest}, permissions=permissions, limits=limits) as running,
        running.caller() as silent,
        running.caller() as slow,
        running.caller() as known,
        running.caller() as halting,
    ):
        for caller in (known, halting):
            caller.hello("s")
        slow.send(request[:20])
        halting.send(request[:20])
        assert silent.ended()
        assert slow.ended()
        assert halting.ended()
        assert known.draft("crest", ONE)  # idle ones stay


def test_a_flood_of_strangers_keeps_no_client_out(small_crest: Path) -> None:
    """A thousand silent connections: each new client gets its answers, and the one before keeps its connection."""
    limits = Limits(connections=64)
    with serving({"crest": small_crest}, limits=limits) as running, running.caller(tcp=True) as before:
        assert before.draft("crest", ONE)
        held: list[socket.socket] = []
        for number in range(1000):
            held.append(socket.create_connection(running.tcp))
            if number % 100 == 0:
                assert before.draft("crest", ONE)
                for tcp in (False, True):
                    with running.caller(tcp=tcp) as new:
                        assert new.draft("crest", ONE)
        until(lambda: read(running.metrics.connections) <= 64 + 1)
        for one in held:
            one.close()


def test_known_clients_are_bounded_and_never_closed_for_new_ones(stores: dict[str, Path]) -> None:
    limits = Limits(connections=3, peer_connections=2)
    with serving(stores, limits=limits) as running:
        with ExitStack() as stack:
            first, second = (stack.enter_context(running.caller(tcp=True)) for _ in range(2))
            assert first.draft("crest", ONE)
            assert second.draft("crest", ONE)
            third, local, other = (
                stack.enter_context(running.caller(tcp=tcp)) for tcp in (True, False, False)
            )
            refused = failure(third.draft_frame("crest", ONE))
            assert refused.status == Status.BUSY
            assert "of this address" in refused.message
            assert third.ended()
            assert local.draft("crest", ONE)
            assert failure(other.draft_frame("crest", ONE)).status == Status.BUSY
            assert first.draft("crest", ONE)
        until(lambda: not running.call(lambda: running.clients._known))
        with running.caller(tcp=True) as again:
            assert again.draft("crest", ONE)


def test_a_client_that_reads_nothing_is_paused_then_cut_off(small_store: Path) -> None:
    contexts = contexts_of(small_store, 64)
    request = wire.encode_request(1, "rest", contexts, 64)
    with serving({"rest": small_store}) as running, running.caller() as lazy:
        lazy.socket.settimeout(0.5)
        sent, stream = 0, request * 2000
        with suppress(TimeoutError):
            while sent < len(stream):
                sent += lazy.socket.send(stream[sent : sent + 65536])
        assert sent < len(stream)
        with running.caller() as other:
            assert other.draft("rest", contexts)
        lazy.socket.settimeout(SECONDS)
        right = expected(small_store, contexts)
        for _ in range(sent // len(request)):  # nothing was lost
            assert lazy.answer().payload[24:] == right
    limits = Limits(patience=0.3)
    with serving({"rest": small_store}, limits=limits) as running, running.caller() as deaf:
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            deaf.socket.sendall(request * 10_000)
        until(lambda: not running.call(lambda: running.clients._known))


def test_a_release_that_moves_does_not_mix_builds(small_crest: Path, small_store: Path) -> None:
    contexts = contexts_of(small_crest, 300)
    with (
        serving({"slow": small_crest}) as running,
        running.caller() as caller,
        running.caller() as other,
    ):
        drafter, before = slow_down(running, "slow"), running.releases.get("slow").build
        caller.send(wire.encode_request(1, "slow", contexts, 64))
        until(lambda: drafter.begun)
        running.call(lambda: running.put(slow=small_store))
        answer = other.draft("slow", ONE)
        assert answer.build == running.releases.get("slow").build != before
        drafter.gate.set()
        frame = caller.answer()
        assert wire.decode_answer(frame.payload).build == before
        assert frame.payload[24:] == expected(small_crest, contexts)
