"""Service and client take any bytes: neither crashes or grows, and both work properly afterwards."""

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from draftstore.errors import LookupServiceError
from draftstore.remote import wire
from draftstore.remote.quiet import Quiet
from draftstore.remote.wire import HEADER, Status
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.stores.registry import open_store
from draftstore.stores.rest.store import RestStore
from tests.fakes.clients import connected
from tests.fakes.faults import TOKENIZER, Service
from tests.fakes.frame_fuzzer import RequestFuzzer, answers_anything, send_any
from tests.fakes.lookups import Lookups, contexts_of, serving

RESET = struct.pack("ii", 1, 0)
NAMES = ("crest", "rest", "dense")


@pytest.fixture(scope="module")
def paths(small_crest: Path, small_store: Path, small_dense: Path) -> dict[str, Path]:
    return {"crest": small_crest, "rest": small_store, "dense": small_dense}


@pytest.fixture(scope="module")
def running(paths: dict[str, Path]) -> Iterator[Lookups]:
    errors = []
    with serving(paths) as lookups:
        lookups.call(lookups.loop.set_exception_handler, lambda _, context: errors.append(context))
        yield lookups
    assert not errors


def check_answers(running: Lookups, path: Path, name: str) -> None:
    """Check that the service answers as the local store does."""
    contexts = contexts_of(path, 100)
    with closing(open_store(path)) as store, running.caller() as caller:
        expected = wire.encode_answer(0, 0, 0, 0, store.drafter().draft_batch(contexts))
        assert caller.draft_frame(name, contexts).payload[24:] == expected[HEADER.size + 24 :]


def memory() -> int:
    """Return the resident pages of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.parametrize("inputs", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_any_requests(inputs: int, running: Lookups, paths: dict[str, Path]) -> None:
    send_any(running, RequestFuzzer(0, NAMES), 2_000)
    before = memory()
    statuses = send_any(running, RequestFuzzer(1, NAMES), inputs)
    assert memory() - before < 6_000
    for name in ("crest", "rest"):
        check_answers(running, paths[name], name)
    assert min(statuses[Status.OK], statuses[Status.BAD_REQUEST]) > inputs / 50, statuses
    assert {Status.NOT_FOUND, Status.TOO_LARGE} <= statuses.keys()


def test_connections_that_stop_in_the_middle_or_end_at_once(running: Lookups, paths: dict[str, Path]) -> None:
    fuzzer = RequestFuzzer(5, ("crest",))
    with ExitStack() as halves:
        for _ in range(90):  # more than the service lets wait
            frame = fuzzer.unchanged()
            halves.enter_context(running.caller()).send(frame[: fuzzer.random.randrange(1, len(frame))])
        check_answers(running, paths["crest"], "crest")
    for number in range(90):
        with running.caller() as caller:
            caller.send(fuzzer.unchanged() * (number % 7))
            if number % 2:
                caller.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    check_answers(running, paths["crest"], "crest")


def test_any_answers(small_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quiet, "holds", False)
    contexts = contexts_of(small_store, 242)
    with closing(RestStore.open(small_store)) as store, Service(store, answers_anything(2)) as service:
        identity = TokenizerIdentity("small", TOKENIZER)
        client = connected(service.address, deadline=0.05, vocab_size=384, tokenizer=identity)
        for start in range(0, 240, 2):
            batch = contexts[start : start + 1 + start % 3]
            drafts = client.drafter().draft(batch, 16)
            assert len(drafts) == len(batch)
            for draft in drafts:
                draft.tree.validate()
                assert len(draft.tree) <= 16
                assert draft.tree.tokens.max(initial=0) < 384
            for ask in (client.releases, client.check):
                with suppress(LookupServiceError):
                    ask(seconds=0.05)
        assert all(client.counters[name] for name in ("answered", "drafted", "garbage", "invalid"))
