import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from draftstore.errors import TokenRangeError
from draftstore.remote import async_connection
from draftstore.remote.async_client import AsyncRemoteStore
from draftstore.stores.rest.store import RestStore
from tests.fakes import faults
from tests.fakes.clients import contexts_of
from tests.fakes.faults import Service
from tests.fakes.waiting import SECONDS, in_threads

Main = Callable[[], Coroutine[Any, Any, None]]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Main], None]:
    """Return what runs a coroutine function in an event loop."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run_main(main: Main) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())

    return run_main


@pytest.fixture(scope="module")
def store(small_store: Path) -> Iterator[RestStore]:
    opened = RestStore.open(small_store)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def story(store: RestStore) -> list[int]:
    tokens = store.index.tokens[:400].astype("int64")
    return tokens[tokens < store.manifest.vocab_size].tolist()  # type: ignore[no-any-return]


def test_a_session_follows_its_text(run: Any, store: RestStore, story: list[int]) -> None:
    async def main() -> None:
        async with AsyncRemoteStore(service.address, "chat", deadline=SECONDS) as remote:
            await remote.check()
            session, local = remote.drafter().session(story[:5]), store.drafter().session(story[:5])
            for token in story[5:40]:
                assert await session.propose(16, 0.01) == local.propose(16, 0.01)
                session.observe([token], tree=None)
                local.observe([token])
            with pytest.raises(TokenRangeError):
                session.observe([remote.vocab_size])

    with Service(store) as service:
        run(main)


def test_all_tasks_of_a_loop_share_one_connection(run: Any, store: RestStore, story: list[int]) -> None:
    async def main() -> None:
        async with AsyncRemoteStore(service.address, "chat", deadline=SECONDS) as remote:
            drafter, local = remote.drafter(), store.drafter()
            asked = [contexts_of(local, story, 1 + seed % 5, seed) for seed in range(200)]
            found = await asyncio.gather(*map(drafter.draft, asked))
            assert found == [local.draft(contexts) for contexts in asked]
            assert remote.counters["connections"] == 1
            assert remote.counters["answered"] == 200

    with Service(store) as service:
        run(main)


def test_answers_may_overtake_each_other(run: Any, store: RestStore, story: list[int]) -> None:
    def backwards(peer: faults.Peer) -> None:
        while True:
            frames = [peer.read() for _ in range(8)]
            for frame in reversed(frames):
                peer.send(peer.service.answer(frame))

    async def main() -> None:
        async with AsyncRemoteStore(service.address, "chat", deadline=SECONDS) as remote:
            drafter, local = remote.drafter(), store.drafter()
            asked = [contexts_of(local, story, 2, seed) for seed in range(24)]
            assert await asyncio.gather(*map(drafter.draft, asked)) == [local.draft(each) for each in asked]

    with Service(store, backwards) as service:
        run(main)


def test_a_connection_that_breaks_under_many_requests(run: Any, store: RestStore, story: list[int]) -> None:
    broken = threading.Event()

    def breaks_once(peer: faults.Peer) -> None:
        if broken.is_set():
            faults.right(peer)
        for _ in range(10):
            peer.read()
        broken.set()

    async def main() -> None:
        async with AsyncRemoteStore(service.address, "chat", deadline=SECONDS) as remote:
            drafter, local = remote.drafter(), store.drafter()
            asked = [contexts_of(local, story, 2, seed) for seed in range(10)]
            assert await asyncio.gather(*map(drafter.draft, asked)) == [local.draft(each) for each in asked]
            assert remote.counters["retries"] == 10
            assert remote.counters["connections"] == 2

    with Service(store, breaks_once) as service:
        run(main)


def test_a_cancelled_task_disturbs_nobody(run: Any, store: RestStore, story: list[int]) -> None:
    free = threading.Event()

    def waits(peer: faults.Peer) -> None:
        while True:
            frame = peer.read()
            assert free.wait(SECONDS)
            peer.send(peer.service.answer(frame))

    async def main() -> None:
        async with AsyncRemoteStore(service.address, "chat", deadline=SECONDS) as remote:
            drafter, local = remote.drafter(), store.drafter()
            asked = [contexts_of(local, story, 1, seed) for seed in range(6)]
            tasks = [asyncio.create_task(drafter.draft(contexts)) for contexts in asked]
            while not service.requests:
                await asyncio.sleep(0.001)
            for task in tasks[::2]:
                task.cancel()
            free.set()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError) for each in found[::2])
            assert found[1::2] == [local.draft(contexts) for contexts in asked[1::2]]
            assert await drafter.draft(asked[0]) == local.draft(asked[0])
            assert remote.counters["late"] == 3
            assert remote.counters["connections"] == 1

    with Service(store, waits) as service:
        run(main)


def test_a_cancelled_probe_lets_the_next_one_through(run: Any, store: RestStore, story: list[int]) -> None:
    async def main() -> None:
        async with AsyncRemoteStore(service.address, "chat", deadline=0.05) as remote:
            drafter = remote.drafter()
            contexts = contexts_of(store.drafter(), story, 1)
            while not remote.counters["opened"]:
                await drafter.draft(contexts)
            requests = service.requests
            while service.requests == requests:  # until the probe is under way
                probe = asyncio.create_task(drafter.draft(contexts))
                await asyncio.sleep(0.01)
                probe.cancel()
                await asyncio.wait([probe])
            service.behave = faults.right
            service.stop()
            service.start()
            while not remote.counters["answered"]:
                await drafter.draft(contexts)
                await asyncio.sleep(0.001)

    with Service(store, faults.hangs) as service:
        run(main)


def test_an_answer_that_is_there_counts_though_the_loop_comes_late(
    run: Any, store: RestStore, story: list[int]
) -> None:
    free, sent = threading.Event(), threading.Event()

    def waits(peer: faults.Peer) -> None:
        peer.send(peer.service.answer(peer.read()))
        frame = peer.read()
        assert free.wait(SECONDS)
        peer.send(peer.service.answer(frame))
        sent.set()

    def block() -> None:
        """Do what a loop must not do, and loops do, until the answer is there and the deadline is over."""
        free.set()
        assert sent.wait(SECONDS)
        time.sleep(0.6)

    async def main() -> None:
        async with AsyncRemoteStore(service.address, "chat", deadline=SECONDS) as remote:
            drafter, local = remote.drafter(), store.drafter()
            contexts = contexts_of(local, story, 1)
            await drafter.draft(contexts)
            remote.deadline = 0.5
            task = asyncio.create_task(drafter.draft(contexts))
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, block)  # when the request has been sent
            assert await task == local.draft(contexts)

    with Service(store, waits) as service:
        run(main)


def test_connecting_goes_on_after_the_deadline(
    run: Any, store: RestStore, story: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_connection, "SILENCE", SECONDS)

    async def main() -> None:
        async with AsyncRemoteStore(f"127.0.0.1:{port}", "chat", deadline=0.01) as remote:
            drafter = remote.drafter()
            contexts = contexts_of(store.drafter(), story, 1)
            for _ in range(2):
                assert len((await drafter.draft(contexts))[0].tree) == 0
            assert remote.counters["timeout"] == 2
            connection = remote._connections[asyncio.get_running_loop()]
            assert connection._connecting is not None

    with faults.deaf_port() as port:
        run(main)


def test_each_loop_has_a_connection_of_its_own(run: Any, store: RestStore, story: list[int]) -> None:
    local = store.drafter()
    contexts = contexts_of(local, story, 2)
    expected = local.draft(contexts)

    with Service(store) as service:
        remote = AsyncRemoteStore(service.address, "chat", deadline=SECONDS)

        async def main() -> None:
            for _ in range(20):
                assert await remote.drafter().draft(contexts) == expected
            await remote._connections[asyncio.get_running_loop()].close()

        in_threads([partial(run, main)] * 4)
        run(main)
        assert remote.counters["connections"] == service.connections == 5
        assert len(remote._connections) == 1  # the others have ended


def test_closing_while_a_connection_is_being_made(run: Any, store: RestStore, story: list[int]) -> None:
    async def main() -> None:
        remote = AsyncRemoteStore(f"127.0.0.1:{port}", "chat", deadline=SECONDS)
        task = asyncio.create_task(remote.drafter().draft(contexts_of(store.drafter(), story, 1)))
        while not remote._connections:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        await remote.close()
        assert len((await task)[0].tree) == 0

    with faults.deaf_port() as port:
        run(main)
