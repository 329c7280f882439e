"""Partitions of a store: which segments they take, what they draft, and what of the files they read."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.errors import StoreError
from draftstore.search.suffix import SuffixIndex
from draftstore.stores.partition import Partition
from draftstore.stores.registry import kind_of, open_store
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import STRATEGIES, RestDrafter, RestStore
from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.batch import Draft
from tests.reference import make_index

VOCAB = 9
RNG = np.random.default_rng(2)
SEGMENTS = [
    [((RNG.zipf(1.5, 40) - 1) % VOCAB).tolist() for _ in range(documents)] for documents in (3, 1, 6, 2, 2, 4)
]


def as_bytes(drafts: list[Draft]) -> list[tuple[bytes, int, int]]:
    return [(draft.tree.to_bytes(), draft.match_length, draft.match_count) for draft in drafts]


def drafted(index: SuffixIndex) -> list[list[tuple[bytes, int, int]]]:
    contexts = np.array([SEGMENTS[place][0][9:25] for place in range(6)], np.int32)
    return [as_bytes(RestDrafter(index, rule).draft(contexts)) for rule in STRATEGIES.values()]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.data())
def test_every_segment_is_in_one_partition_and_none_is_empty(sizes: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    taken = [Partition(number, parts).of(np.array(sizes)) for number in range(1, parts + 1)]
    assert [place for each in taken for place in range(len(sizes))[each]] == list(range(len(sizes)))
    assert all(each.start < each.stop for each in taken)


@given(st.integers(1, 30), st.integers(1, 9))
def test_equal_segments_are_shared_out_equally(each: int, parts: int) -> None:
    sizes = np.full(each * parts, 1000)
    taken = [Partition(number, parts).of(sizes) for number in range(1, parts + 1)]
    assert {one.stop - one.start for one in taken} == {each}


def test_a_large_segment_gets_a_partition_of_its_own() -> None:
    sizes = np.array([10, 10, 500, 10, 10])
    assert [Partition(number, 3).of(sizes) for number in (1, 2, 3)] == [slice(0, 2), slice(2, 3), slice(3, 5)]


def test_too_many_partitions() -> None:
    with pytest.raises(StoreError, match="3 segments for 4 partitions"):
        Partition(1, 4).of(np.array([5, 5, 5]))


@pytest.mark.parametrize("text", ["", "3", "0/4", "5/4", "1/0", "-1/4", "1/4/2", "a/b", "1.0/2", "²/3"])
def test_what_is_no_partition(text: str) -> None:
    with pytest.raises(StoreError, match="is not a partition: expected NUMBER/COUNT"):
        Partition.parse(text)


def test_partitions_are_read_and_shown_alike() -> None:
    assert Partition.parse(" 3/16 ") == Partition(3, 16)
    assert str(Partition(3, 16)) == "3/16"


@pytest.mark.parametrize("parts", range(1, 7))
def test_a_partition_drafts_as_a_store_of_its_documents(
    parts: int, tmp_path: Path, small_store: Path
) -> None:
    whole = make_index(SEGMENTS, VOCAB)
    store = RestStore(tmp_path, open_store(small_store).manifest, whole)
    for number in range(1, parts + 1):
        partition = Partition(number, parts)
        taken = partition.of(whole.segments[:, 1])
        part, _ = store.take(partition)
        assert drafted(part.index) == drafted(make_index(SEGMENTS[taken], VOCAB))
    assert drafted(store.take(Partition(1, 1))[0].index) == drafted(whole)


def test_extents_are_what_is_read_of_the_files(tmp_path: Path, small_tokenizer: TextTokenizer) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(f'{{"text": "once upon a time there was {number}"}}\n' for number in range(200)))
    options = RestOptions((texts,), "cut", segment_tokens=400)
    path = build_rest(options, small_tokenizer, tmp_path / "store").path
    with closing(RestStore.open(path)) as store:
        assert len(store.index.segments) > 4
        read = dict.fromkeys(("tokens.bin", "suffixes.bin", "keys.bin", "first_rows.bin"), 0)
        for number in (1, 2, 3):
            part, extents = kind_of("rest").take(store, Partition(number, 3))
            assert isinstance(part, RestStore)
            index = part.index
            arrays: list[NDArray[Any]] = [index.tokens, index.suffixes, index.keys, index.first_rows]
            for (name, (begin, end)), array in zip(extents.items(), arrays, strict=True):
                assert (path / name).read_bytes()[begin:end] == array.tobytes()
                assert begin == read[name]
                read[name] = end
            assert len(part.samples(9).contexts) == 9
        assert read == {name: (path / name).stat().st_size for name in read}
        with pytest.raises(StoreError, match=r"segments for 99 partitions.*smaller --segment-tokens"):
            store.take(Partition(1, 99))


def test_a_store_without_parts_stays_whole(small_crest: Path) -> None:
    with closing(open_store(small_crest)) as store:
        assert kind_of("crest").take(store, Partition(2, 5)) == (store, {})
