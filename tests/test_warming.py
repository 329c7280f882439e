"""Warming: files in memory and mapped, drafts made, and nothing read that is not needed."""

import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from draftstore.rest import RestStore
from draftstore.stores import open_store
from services.lookup.stores import warming
from services.lookup.stores.warming import load_kernels, sample_contexts, warm_files, warm_store

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
        contexts = sample_contexts(store, 20)
        assert contexts.shape == (20, 16)
        found = store.drafter().draft_batch(contexts)
        assert (found.match_lengths > 0).mean() > 0.8
        assert contexts.max() < store.manifest.vocab_size


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
    from draftstore.expand import draft_batch, draft_one

    known = len(draft_one.signatures), len(draft_batch.signatures)
    for path in (small_store, wide_store):
        store = RestStore.open(path)
        for count in (1, 3):
            store.drafter().draft_batch(np.full((count, 16), 1, np.int32)).encode_trees()
    assert (len(draft_one.signatures), len(draft_batch.signatures)) == known  # nothing was left to load
