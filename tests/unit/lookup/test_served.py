"""The open stores are swapped between two requests, none is mixed with another, and old ones are really closed."""

import asyncio
import gc
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from draftstore.errors import DraftstoreError, StoreError, WireError
from draftstore.remote import queries
from draftstore.remote.queries import encode_projection
from draftstore.remote.wire import short_hash
from draftstore.storage.lease import exclusive
from draftstore.storage.manifest import load_manifest, manifest_digest, save_manifest
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.registry import open_store
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.tokenizer import TextTokenizer
from services.lookup.stores import served as served_module
from services.lookup.stores.served import OpenStores, ServedStore, UnknownReleaseError, open_served
from services.lookup.stores.targets import Target
from tests.conftest import write_texts
from tests.fakes.dense_stores import MODEL
from tests.fakes.waiting import SECONDS, until


class Build(NamedTuple):
    """A store, and what it drafts for the contexts of the tests: encoded trees."""

    path: Path
    digest: str
    expected: bytes


def drafts_of(served: ServedStore, contexts: NDArray[np.int32]) -> bytes:
    """Return the trees of a batch that is drafted in steps, as the service does."""
    drafter = served.drafter()
    return b"".join(
        drafter.draft_batch(contexts[row : row + 4]).encode_trees()[1].tobytes()
        for row in range(0, len(contexts), 4)
    )


@pytest.fixture(scope="module")
def contexts() -> NDArray[np.int32]:
    """Return sixteen contexts of two known tokens each."""
    rows = np.full((16, 16), -1, np.int32)
    rows[:, -2:] = np.random.default_rng(1).integers(200, 384, (16, 2))
    rows[:, -1] = np.arange(300, 316)
    return rows


@pytest.fixture(scope="module")
def builds(
    small_tokenizer: TextTokenizer, contexts: NDArray[np.int32], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Build]]:
    """Return three builds of either kind, which draft differently."""
    folder = tmp_path_factory.mktemp("builds")
    made: dict[str, list[Build]] = {"rest": [], "crest": []}
    for seed in range(3):
        corpus = write_texts(folder / f"{seed}.jsonl", 40, seed)
        build_rest(RestOptions((corpus,), "chat"), small_tokenizer, folder / f"rest-{seed}", workers=1)
        options = CrestOptions("chat", max_n=3, ngrams=300)
        build_crest(options, folder / f"rest-{seed}", folder / f"crest-{seed}")
        for kind, known in made.items():
            path = folder / f"{kind}-{seed}"
            served = open_served(Target("chat", path))
            known.append(Build(path, manifest_digest(path), drafts_of(served, contexts)))
            served.close()
    for known in made.values():
        assert len({build.expected for build in known}) == 3
    return made


@pytest.fixture
def open_stores() -> Iterator[OpenStores]:
    open_stores = OpenStores()
    yield open_stores
    open_stores.close()


def mapped(path: Path) -> list[str]:
    """Return what of a store this process has mapped."""
    inodes = {str(file.stat().st_ino) for file in path.rglob("*") if file.is_file()}
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if line.split()[4] in inodes]


def is_closed(served: ServedStore) -> bool:
    return served.closed


def memory() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class TestBook:
    @pytest.mark.parametrize("name", ["small_store", "small_crest", "wide_store", "wide_crest"])
    def test_it_drafts_as_its_store_does(self, name: str, request: pytest.FixtureRequest) -> None:
        path = request.getfixturevalue(name)
        context = np.array([[5, 6, 7, 300]], np.int32)
        with closing(open_served(Target("chat", path))) as served, closing(open_store(path)) as store:
            for strategy in ("", "longest", "backoff"):
                expected = store.drafter(strategy or "backoff").draft(context, 20, 0.01)
                assert served.drafter(strategy).draft(context, 20, 0.01) == expected
                assert served.drafter(strategy) is served.drafter(strategy)
            with pytest.raises(DraftstoreError, match="unknown strategy 'nonsense'"):
                served.drafter("nonsense")
            assert served.build == short_hash(manifest_digest(path))
            assert served.tokenizer == short_hash(store.manifest.tokenizer.fingerprint)
            assert not served.blocking

    def test_its_description_says_no_path(self, small_crest: Path) -> None:
        with closing(open_served(Target("chat", small_crest))) as served:
            told = served.describe()
        assert str(small_crest.parent) not in json.dumps(told)
        manifest = load_manifest(small_crest)
        assert told["build"] == manifest_digest(small_crest)[:16]
        assert (told["name"], told["kind"], told["backend"]) == ("chat", "crest", "lmdb")
        assert (told["vocab_size"], told["context_size"]) == (manifest.vocab_size, 4)
        assert told["entries"] == manifest.counts["entries"]
        assert (sorted(told["strategies"]), told["default_strategy"]) == (["backoff", "longest"], "backoff")
        assert told["tokenizer"]["fingerprint"] == manifest.tokenizer.fingerprint

    def test_a_dense_one_has_a_projection(self, small_dense: Path, small_store: Path) -> None:
        with closing(open_served(Target("chat", small_dense))) as served:
            told = served.describe()
            projection = served.projection
            assert projection is not None
            assert served.encoded_projection == encode_projection(projection)
        assert told["projection"] == {"digest": projection.digest, "dims": 8, "hidden_size": 16}
        assert (told["kind"], told["target_model"], told["context_size"]) == ("dresd", MODEL, 1)
        assert (sorted(told["strategies"]), told["default_strategy"]) == (["deep", "many", "wide"], "many")
        with closing(open_served(Target("chat", small_store))) as served:
            assert (served.projection, served.encoded_projection) == (None, b"")
            assert (served.describe()["projection"], served.describe()["target_model"]) == (None, None)

    def test_a_projection_that_no_frame_holds(
        self, small_dense: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(queries, "MAX_PAYLOAD", 100)
        with pytest.raises(WireError, match="build the store with fewer dimensions"):
            open_served(Target("chat", small_dense))
        gc.collect()  # the traceback holds what was open
        assert mapped(small_dense) == []


class TestOpening:
    def test_a_store_is_in_use_until_it_is_closed(self, small_crest: Path) -> None:
        served = open_served(Target("chat", small_crest), warm=False)
        with exclusive(small_crest) as free:
            assert not free
        served.close()
        with exclusive(small_crest) as free:
            assert free
            with pytest.raises(StoreError, match="is being removed"):
                open_served(Target("chat", small_crest), warm=False)

    def test_another_build_lies_there(self, small_store: Path) -> None:
        with pytest.raises(StoreError, match=r"now holds another store.*expected 000000"):
            open_served(Target("chat", small_store, "0" * 64))

    def test_a_cut_file(self, small_crest: Path, tmp_path: Path) -> None:
        path = tmp_path / "store"
        shutil.copytree(small_crest, path)
        with (path / "trees.lmdb").open("r+b") as file:
            file.truncate(100)
        with pytest.raises(StoreError, match="has 100 bytes"):
            open_served(Target("chat", path))
        assert mapped(path) == []

    def test_a_build_that_moves_in_while_files_are_opened(
        self, small_crest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "store"
        shutil.copytree(small_crest, path)
        real = open_store

        def replaced(*arguments: object) -> object:
            store = real(*arguments)  # type: ignore[arg-type]
            manifest = load_manifest(path)
            manifest.parameters["other"] = True
            save_manifest(path, manifest)
            return store

        monkeypatch.setattr(served_module, "open_store", replaced)
        with pytest.raises(StoreError, match="now holds another store"):
            open_served(Target("chat", path))
        assert mapped(path) == []

    def test_a_store_that_fails_while_it_is_warmed(
        self, small_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "store"
        shutil.copytree(small_store, path)

        def fail(*_: object) -> None:
            raise StoreError("an entry is damaged")

        monkeypatch.setattr(served_module, "warm_store", fail)
        with pytest.raises(StoreError, match="an entry is damaged"):
            open_served(Target("chat", path))
        gc.collect()  # the traceback holds what was open
        assert mapped(path) == []


class TestShelf:
    def test_unknown_names(self, open_stores: OpenStores, small_store: Path) -> None:
        open_stores.put("chat", open_served(Target("chat", small_store)))
        for look_up in (open_stores.get, open_stores.borrow):
            with pytest.raises(UnknownReleaseError, match="nothing is served under the name 'code'"):
                look_up("code")
        assert open_stores.remove("code") is None

    def test_only_what_is_allowed_is_described(
        self, open_stores: OpenStores, small_store: Path, small_crest: Path
    ) -> None:
        open_stores.put("chat", open_served(Target("chat", small_store)))
        open_stores.put("code", open_served(Target("code", small_crest)))
        assert [told["name"] for told in open_stores.describe()] == ["chat", "code"] == open_stores.names()
        assert [told["name"] for told in open_stores.describe(lambda name: name == "code")] == ["code"]

    @pytest.mark.parametrize("kind", ["rest", "crest"])
    def test_the_old_book_is_closed_after_its_last_reader(
        self, open_stores: OpenStores, builds: dict[str, list[Build]], contexts: NDArray[np.int32], kind: str
    ) -> None:
        one, two, _ = builds[kind]
        served = open_served(Target("chat", one.path))
        assert open_stores.put("chat", served) is None
        readers = [open_stores.borrow("chat"), open_stores.borrow("chat")]
        assert open_stores.put("chat", open_served(Target("chat", two.path))) is served
        for reader in readers:
            assert not served.closed
            assert mapped(one.path)
            assert drafts_of(served, contexts) == one.expected
            reader.release()
        until(lambda: served.closed, "the store is not closed")
        until(lambda: not mapped(one.path), "the files are still mapped")
        assert drafts_of(open_stores.get("chat"), contexts) == two.expected
        removed = open_stores.remove("chat")
        assert removed is not None
        until(lambda: removed.closed and not mapped(two.path), "the files are still mapped")

    def test_a_book_without_readers_is_closed_when_the_shelf_is(self, builds: dict[str, list[Build]]) -> None:
        open_stores = OpenStores()
        served = open_served(Target("chat", builds["crest"][0].path))
        open_stores.put("chat", served)
        open_stores.close()
        assert served.closed
        assert not mapped(builds["crest"][0].path)

    def test_a_reader_that_outlives_the_shelf(self, builds: dict[str, list[Build]]) -> None:
        open_stores = OpenStores()
        open_stores.put("chat", open_served(Target("chat", builds["crest"][0].path)))
        served = open_stores.borrow("chat")
        open_stores.close()
        assert not served.closed
        served.release()
        assert served.closed

    @pytest.mark.parametrize("kind", ["rest", "crest"])
    def test_swaps_under_threads_and_a_loop(
        self, open_stores: OpenStores, builds: dict[str, list[Build]], contexts: NDArray[np.int32], kind: str
    ) -> None:
        known = {short_hash(build.digest): build.expected for build in builds[kind]}
        open_stores.put("chat", open_served(Target("chat", builds[kind][0].path)))
        problems: list[str] = []
        seen: dict[int, int] = {}
        done = threading.Event()

        def check(served: ServedStore, found: bytes) -> None:
            seen[served.build] = seen.get(served.build, 0) + 1
            if known[served.build] != found:
                problems.append(f"a mixture: {served.build:x}")

        def borrow() -> None:
            try:
                while not done.is_set():
                    served = open_stores.borrow("chat")
                    try:
                        check(served, drafts_of(served, contexts))
                    finally:
                        served.release()
            except DraftstoreError as error:
                problems.append(repr(error))

        async def answer_at_once() -> None:
            while not done.is_set():
                served = open_stores.get("chat")
                check(served, drafts_of(served, contexts))
                await asyncio.sleep(0)

        async def answer_in_steps() -> None:
            while not done.is_set():
                served = open_stores.get("chat")
                served.acquire()
                found = b""
                for row in range(0, len(contexts), 4):
                    found += served.drafter().draft_batch(contexts[row : row + 4]).encode_trees()[1].tobytes()
                    await asyncio.sleep(0)
                check(served, found)
                served.release()

        async def serve() -> None:
            loop = asyncio.get_running_loop()
            watcher = threading.Thread(target=swap, args=(loop,))
            watcher.start()
            try:
                await asyncio.gather(answer_at_once(), answer_in_steps(), answer_in_steps())
            finally:
                done.set()
                watcher.join()

        old: list[ServedStore] = []

        def put(served: ServedStore) -> None:
            before = open_stores.put("chat", served)
            assert before is not None
            old.append(before)

        def swap(loop: asyncio.AbstractEventLoop) -> None:
            try:
                for turn in range(40):
                    target = builds[kind][turn % 3]
                    served = open_served(Target("chat", target.path), warm=turn < 3)
                    loop.call_soon_threadsafe(put, served)
                    time.sleep(0.01)
                    if turn < 3:  # each is seen, however slow the others are
                        build = short_hash(target.digest)
                        until(lambda build=build: build in seen or bool(problems), "a store")  # type: ignore[misc]
            except DraftstoreError as error:
                problems.append(repr(error))
            finally:
                done.set()

        threads = [threading.Thread(target=borrow) for _ in range(3)]
        for thread in threads:
            thread.start()
        asyncio.run(serve())
        for thread in threads:
            thread.join(SECONDS)
        assert problems == []
        assert set(seen) == set(known)
        until(lambda: all(served.closed for served in old), "an old store is open")
        live = open_stores.get("chat")
        for build in builds[kind]:
            if build.digest != live.digest:
                assert mapped(build.path) == []

    def test_memory_stays_flat_over_many_swaps(
        self, open_stores: OpenStores, builds: dict[str, list[Build]]
    ) -> None:
        def swap(times: int) -> None:
            for turn in range(times):
                for kind, known in builds.items():
                    served = open_served(Target(kind, known[turn % 3].path), warm=False)
                    served.drafter().draft(np.array([[300, 301]], np.int32))
                    before = open_stores.put(kind, served)
                    if before is not None:
                        until(partial(is_closed, before), "an old store is open")

        swap(50)
        gc.collect()
        maps, files, before = len(mapped_lines()), open_files(), memory()
        swap(300)
        gc.collect()
        assert abs(len(mapped_lines()) - maps) <= 3
        assert abs(open_files() - files) <= 3
        assert memory() - before < 4 << 20


def mapped_lines() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
