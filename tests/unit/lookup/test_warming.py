"""Warming: files in memory and mapped, drafts made, and nothing read that is not needed."""

import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from draftstore.jit import read_only
from draftstore.stores.dresd.kernels.dense_tree import draft_trees
from draftstore.stores.dresd.store import DresdStore
from draftstore.stores.registry import open_store
from draftstore.stores.rest.store import RestStore
from services.lookup.stores import warming
from services.lookup.stores.warming import load_kernels, warm_files, warm_store
from tests.fakes.dense_stores import make_dense_store

STORES = ("small_store", "small_crest", "wide_store", "wide_crest")


def resident(path: Path) -> int:
    """Return the bytes of a mapped file that are in this process's page table."""
    text = Path("/proc/self/smaps").read_text()
    sizes = re.findall(rf"^\S+-\S+ .* {re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB$", text, re.MULTILINE)
    return sum(int(size) for size in sizes) * 1024


@pytest.mark.parametrize("name", STORES)
def test_every_kind_of_store(name: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name)
    with closing(open_store(path)) as store:
        warm_store(store, [store.drafter("longest"), store.drafter("backoff")])
        contexts = store.samples(20).contexts
        assert contexts.shape == (20, 16)
        found = store.drafter().draft_batch(contexts)
        assert (found.match_lengths > 0).mean() > 0.8
        assert contexts.max() < store.manifest.vocab_size


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_dense_store_is_asked_with_its_own_vectors(dtype: str, tmp_path: Path) -> None:
    documents = [np.random.default_rng(seed).integers(0, 9, 30).tolist() for seed in range(9)]
    path = make_dense_store(tmp_path / "store", documents, dtype=dtype)
    with closing(DresdStore.open(path)) as store:
        warm_store(store, [store.drafter("wide"), store.drafter("deep")])
        contexts, queries = store.samples(50)
        assert queries is not None
        assert (contexts.shape, queries.shape) == ((50, 16), (50, 8))
        assert np.allclose(np.linalg.norm(queries, axis=1), 1.0, atol=0.05)
        assert (store.drafter("deep").draft_batch(contexts, queries=queries).sizes > 0).all()
    empty = make_dense_store(tmp_path / "empty", [[1, 2]], dtype=dtype)
    with closing(DresdStore.open(empty)) as store:
        contexts, queries = store.samples(50)
        assert queries is not None
        assert len(contexts) == len(queries) == 0
        warm_store(store, [store.drafter()])


def test_files_of_a_store_are_mapped_whole(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    path.write_bytes(bytes(5_000_000))
    other = tmp_path / "other.bin"
    other.write_bytes(bytes(1_000_000))
    mapped = np.memmap(path, np.uint8, "r")
    assert resident(path) == 0
    assert warm_files([path, other]) == 5_000_000  # the other one is not mapped
    if resident(path):  # systems before Linux 5.14 cannot
        assert resident(path) >= 5_000_000
    assert mapped.sum() == 0


def test_no_more_is_read_than_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = []
    for name, size in (("a", 3_000_000), ("b", 2_000_000)):
        (tmp_path / name).write_bytes(bytes(size))
        maps.append(np.memmap(tmp_path / name, np.uint8, "r"))
    paths = [tmp_path / "a", tmp_path / "b"]
    assert warm_files(paths, 3_500_000) == 3_500_000
    assert resident(paths[0]) < 3_000_000  # the system maps a few pages around
    assert warm_files(paths, 0) == 0
    monkeypatch.setattr(warming, "available_memory", lambda: 1_000_000)
    assert warm_files(paths) == 500_000
    assert len(maps) == 2


def test_a_file_that_is_gone_is_reported(small_store: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        warm_files([tmp_path / "absent"])


def test_kernels_are_loaded_for_small_and_large_vocabularies(small_store: Path, wide_store: Path) -> None:
    load_kernels()
    from draftstore.search.expand import draft_batch, draft_one

    known = len(draft_one.signatures), len(draft_batch.signatures)
    for path in (small_store, wide_store):
        store = RestStore.open(path)
        for count in (1, 3):
            contexts = np.full((count, 16), 1, np.int32)
            for rows in (contexts, read_only(contexts)):  # those of a frame cannot be written
                store.drafter().draft_batch(rows).encode_trees()
    assert (len(draft_one.signatures), len(draft_batch.signatures)) == known  # nothing was left to load


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("vocab_size", [50, 70_000])
def test_kernels_of_dense_stores_are_loaded(dtype: str, vocab_size: int, tmp_path: Path) -> None:
    load_kernels()
    known = len(draft_trees.signatures)
    path = make_dense_store(tmp_path / "store", [[1, 2, 3, 4, 5]], vocab_size=vocab_size, dtype=dtype)
    with closing(DresdStore.open(path)) as store:
        for count in (1, 3):
            contexts, queries = np.full((count, 16), 2, np.int32), np.ones((count, 8), np.float32)
            for make in (np.copy, read_only):
                store.drafter().draft_batch(make(contexts), queries=make(queries)).encode_trees()
    assert len(draft_trees.signatures) == known


def test_only_what_a_partition_reads(tmp_path: Path) -> None:
    path = tmp_path / "numbers.bin"
    np.zeros(32_000_000, np.uint8).tofile(path)
    numbers = read_only(np.memmap(path, np.uint8, "r"))
    page = warming.PAGE
    assert warm_files([path], extents={path.name: (page * 100 + 7, page * 200)}) == page * 100
    assert page * 100 <= resident(path) <= 8_000_000  # the system maps large pages
    assert warm_files([path], page * 10, {path.name: (page * 300, page * 400)}) == page * 10
    assert warm_files([path], extents={"another.bin": (0, 1)}) == len(numbers)
