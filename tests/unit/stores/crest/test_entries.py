import hashlib
import os
import random
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import BuildError, DraftstoreError, StoreError
from draftstore.storage.manifest import load_manifest
from draftstore.storage.report import ignore
from draftstore.stores.crest import entries as entries_module
from draftstore.stores.crest.entries import (
    LMDB_FILE,
    LmdbEntries,
    entries_digest,
    key_dtype,
    open_entries,
    write_lmdb,
)
from tests.fakes.waiting import in_threads

Items = list[tuple[bytes, bytes]]


@pytest.fixture(scope="module", autouse=True)
def no_fsync() -> Iterator[None]:
    """Do not wait for the disk: no test here ends the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def some_items(count: int, value_bytes: int = 60) -> Items:
    rng = np.random.default_rng(count)
    return [((3 * i).to_bytes(4, "big"), rng.bytes(int(rng.integers(0, value_bytes)))) for i in range(count)]


# -- keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab_size", "kind"), [(1, ">u2"), (65_535, ">u2"), (65_536, ">u4"), (151_665, ">u4"), (2**31, ">u4")]
)
def test_the_vocabulary_decides_the_width(vocab_size: int, kind: str) -> None:
    assert key_dtype(vocab_size) == np.dtype(kind)
    assert vocab_size - 1 < np.iinfo(key_dtype(vocab_size)).max


# -- digests -------------------------------------------------------------------------------------------------


def test_the_digest_is_of_lengths_keys_and_values() -> None:
    data = b"\2\0\0\0ab\1\0\0\0c\0\0\0\0\3\0\0\0xyz"
    assert entries_digest([(b"ab", b"c"), (b"", b"xyz")]) == hashlib.sha256(data).hexdigest()
    assert entries_digest([]) == hashlib.sha256(b"").hexdigest()
    assert entries_digest([(b"a", b"bc")]) != entries_digest([(b"ab", b"c")])


# -- reading and writing -------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.binary(min_size=1, max_size=32), st.binary(max_size=5_000), max_size=30),
    st.lists(st.binary(min_size=1, max_size=32), max_size=5),
)
def test_written_entries_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, items: dict[bytes, bytes], others: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("lmdb") / "e.lmdb"
    assert write_lmdb(path, sorted(items.items())) == path.stat().st_size
    assert [entry.name for entry in path.parent.iterdir()] == ["e.lmdb"]
    entries = LmdbEntries(path)
    assert list(entries.items()) == sorted(items.items())
    keys = [*items, *others, *items]
    assert entries.get(keys) == [items.get(key) for key in keys]
    assert entries.get([]) == []
    entries.close()


def test_a_map_that_is_too_small_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items, fill = some_items(20_000), entries_module._fill_lmdb
    monkeypatch.setattr(entries_module, "_fill_lmdb", lambda path, items, _: fill(path, items, 1 << 16))
    write_lmdb(tmp_path / "grown", items)
    assert list(LmdbEntries(tmp_path / "grown").items()) == items


def test_keys_that_do_not_ascend_are_refused(tmp_path: Path) -> None:
    for wrong in ([(b"b", b""), (b"a", b"")], [(b"a", b""), (b"a", b"x")]):
        with pytest.raises(BuildError, match="entries do not ascend: 1 of 2 were added"):
            write_lmdb(tmp_path / "e", wrong)
    assert list(tmp_path.iterdir()) == []


# -- many readers --------------------------------------------------------------------------------------------


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    path, old, new = tmp_path / "e", some_items(500), some_items(900)
    write_lmdb(path, old)
    before = LmdbEntries(path)
    stream = before.items()
    assert next(stream) == old[0]
    write_lmdb(path, new)
    after = LmdbEntries(path)
    assert list(after.items()) == new
    assert [old[0], *stream] == old
    assert before.get([old[7][0]]) == [old[7][1]]
    before.close()
    assert after.get([new[-1][0]]) == [new[-1][1]]


def test_closed_files_leave_nothing_open(tmp_path: Path) -> None:
    def mapped() -> bool:
        return str(tmp_path / "e") in Path("/proc/self/maps").read_text()

    write_lmdb(tmp_path / "e", some_items(50))
    entries, other = LmdbEntries(tmp_path / "e"), LmdbEntries(tmp_path / "e")
    entries.close()
    assert mapped()
    other.close()
    assert not mapped()
    dropped = LmdbEntries(tmp_path / "e")
    assert mapped()
    del dropped
    assert not mapped()


def test_threads_share_a_file_and_its_readers(tmp_path: Path) -> None:
    items = some_items(500)
    write_lmdb(tmp_path / "e", items)
    shared = LmdbEntries(tmp_path / "e")
    keys, values = map(list, zip(*items, strict=True))

    def read(number: int) -> None:
        for start in range(number, 400, 4):
            entries = LmdbEntries(tmp_path / "e")
            assert entries.get([keys[start]]) == [values[start]]
            entries.close()
            assert shared.get(keys[start : start + 50]) == values[start : start + 50]
        assert list(shared.items()) == items

    in_threads(partial(read, number) for number in range(8))


def test_children_of_a_reader_read_too(tmp_path: Path) -> None:
    """Both what it had open, and what they open themselves; the parent goes on undisturbed."""
    items = some_items(500)
    write_lmdb(tmp_path / "e", items)
    entries = LmdbEntries(tmp_path / "e")
    assert entries.get([items[0][0]]) == [items[0][1]]
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:  # no assert may leave this block: a second pytest would go on
            status = 1
            try:
                held = entries.get([key for key, _ in items]) == [value for _, value in items]
                fresh = list(LmdbEntries(tmp_path / "e").items()) == items
                entries.close()
                status = 0 if held and fresh else 2
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert list(entries.items()) == items
    assert list(LmdbEntries(tmp_path / "e").items()) == items


# -- what is not there, not whole, or has no room ------------------------------------------------------------


@pytest.mark.parametrize("content", [None, b"", b"not lmdb" * 2_000])
def test_other_files_are_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "e").write_bytes(content)
    with pytest.raises(StoreError, match=rf"{tmp_path / 'e'} cannot be read \(.*\): the store is damaged"):
        LmdbEntries(tmp_path / "e")
    with pytest.raises(StoreError, match="cannot be read"):
        LmdbEntries(tmp_path)
    assert len(list(tmp_path.iterdir())) == (content is not None)


def test_a_damaged_page_is_an_error(tmp_path: Path) -> None:
    """Lookups check the type of every page that they come to; hashes find what they cannot see."""
    items = some_items(3_000)
    write_lmdb(tmp_path / "e", items)
    data = bytearray((tmp_path / "e").read_bytes())
    for page in range(2, len(data) // 4096):
        if data[page * 4096 + 10] == 2:  # flags of a leaf page
            data[page * 4096 + 10 : page * 4096 + 12] = b"\0\0"
    (tmp_path / "bad").write_bytes(data)
    entries = LmdbEntries(tmp_path / "bad")
    with pytest.raises(StoreError, match="cannot be read"):
        entries.get([items[0][0]])
    with pytest.raises(StoreError, match="cannot be read"):
        list(entries.items())


def damaged_pages(raw: bytes) -> Iterator[bytes]:
    """Yield copies of an LMDB file, each with damage in a meta page, the root or a branch page."""
    branches = [page for page in range(len(raw) // 4096) if page < 2 or raw[page * 4096 + 10] == 1]
    chance = random.Random(0)
    for page in branches * 12:
        copy, begin = bytearray(raw), page * 4096
        for _ in range(chance.choice([1, 2, 400])):
            copy[begin + chance.randrange(4096 if page > 1 else 152)] = chance.randrange(256)
        yield bytes(copy)
    for page in branches:
        for value in (0, 255):
            yield raw[: page * 4096] + bytes([value]) * 4096 + raw[(page + 1) * 4096 :]
    beyond = struct.pack("=Q", 1 << 20)  # what ended the process: the last page, far behind the end
    yield raw[: 4096 + 136] + beyond + raw[4096 + 144 :]


def test_damage_in_pages_that_lead_to_others_does_not_end_the_process(tmp_path: Path) -> None:
    items = [(f"{i:06}".encode() * 9, bytes(30)) for i in range(6_000)]
    write_lmdb(tmp_path / "e", items)
    raw, refused = (tmp_path / "e").read_bytes(), 0
    child = os.fork()
    if child == 0:  # no assert may leave this block: a second pytest would go on
        status = 1
        try:
            for number, copy in enumerate(damaged_pages(raw)):
                (tmp_path / str(number)).write_bytes(copy)
                try:
                    entries = LmdbEntries(tmp_path / str(number))
                    entries.get([key for key, _ in items[::50]])
                    for _ in entries.items():
                        pass
                    entries.close()
                except StoreError:
                    refused += 1
            status = 0 if refused > 30 else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


# -- of a store ----------------------------------------------------------------------------------------------


def test_missing_backends_are_refused(small_crest: Path) -> None:
    manifest = load_manifest(small_crest)
    with pytest.raises(StoreError, match=r"is not in stone, only in lmdb: .*\(backend\)"):
        open_entries(small_crest, manifest, "stone")
    manifest.parameters["backends"] = ["stone"]
    with pytest.raises(
        DraftstoreError, match=r"the backend 'stone' is not installed here: install draftstore-server"
    ):
        open_entries(small_crest, manifest)
    with pytest.raises(DraftstoreError, match="the backend 'stone' is not installed here"):
        entries_module.load_entries("stone", small_crest, small_crest, small_crest / LMDB_FILE, ignore)
