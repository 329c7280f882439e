import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from draftstore.errors import StoreError, TokenizerError
from draftstore.storage.manifest import TokenizerIdentity, load_manifest, save_manifest
from draftstore.stores.crest.codes import UNFITTED, EntryCodec
from draftstore.stores.crest.entries import LMDB_FILE, key_dtype
from draftstore.stores.crest.store import DICTIONARY_FILE, CrestDrafter, CrestStore
from draftstore.trees.batch import Draft
from draftstore.trees.tree import highest_level
from tests import reference
from tests.reference import Documents, Ngram, Nodes, Stored, UnclearError, nodes_of
from tests.unit.search.test_expand import corpora, documents_of
from tests.unit.stores.crest.test_codes import trees_of

CODEC = EntryCodec(UNFITTED)
VOCABULARIES = [5, 65_535, 70_000]


class DictEntries:
    """Entries in memory, which count how often they are asked."""

    def __init__(self, values: dict[bytes, bytes]) -> None:
        self.values, self.calls = values, 0

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.calls += 1
        return [self.values.get(key) for key in keys]

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        yield from sorted(self.values.items())

    def close(self) -> None:
        pass


def drafter_of(store: dict[Ngram, Stored], vocab_size: int, max_n: int) -> CrestDrafter:
    """Return a drafter over what an oracle knows."""
    dtype = key_dtype(vocab_size)
    keys = [np.array(ngram, dtype).tobytes() for ngram in store]
    entries = DictEntries(dict(zip(keys, CODEC.encode(trees_of([*store.values()])), strict=True)))
    return CrestDrafter(entries, CODEC, max_n, vocab_size)


def stored(documents: Documents, ngrams: Sequence[Ngram], nodes: int = 12) -> dict[Ngram, Stored]:
    """Cut the trees of n-grams; those that nothing follows are not stored."""
    found = {}
    for ngram in ngrams:
        tree = reference.ngram_tree(documents, ngram, nodes, 4)
        if tree:
            count = len(reference.continuations(documents, ngram))
            found[ngram] = Stored(tree, count, reference.followers(documents, ngram))
    return found


@st.composite
def stores(draw: st.DrawFn, vocab_size: int) -> tuple[dict[Ngram, Stored], int]:
    """Draw what a store keeps: some of the n-grams of a corpus, and the most tokens of one."""
    documents = documents_of(draw(corpora(vocab_size)))
    max_n = draw(st.integers(1, 5))
    ngrams = sorted(reference.all_ngrams(documents, max_n))
    kept = draw(st.lists(st.sampled_from(ngrams), max_size=20, unique=True)) if ngrams else []
    try:
        return stored(documents, kept), max_n
    except UnclearError:
        reject()


@st.composite
def contexts(draw: st.DrawFn, store: dict[Ngram, Stored], vocab_size: int) -> list[int]:
    """Draw contexts that often end in a stored n-gram; ids outside the vocabulary among what stands before."""
    wrong = [-1, vocab_size, 65_535, 65_536, 70_000, 131_072, 2**31 - 1, -(2**31)]
    ids = st.sampled_from([*range(max(0, vocab_size - 4), vocab_size), *range(3), *wrong])
    before = draw(st.lists(ids, max_size=6))
    if draw(st.booleans()) and store:
        before += draw(st.sampled_from(sorted(store)))
    return before


def one(drafter: CrestDrafter, context: Sequence[int], budget: int = 64, min_prob: float = 0.0) -> Draft:
    [found] = drafter.draft(np.array([context], np.int32).reshape(1, -1), budget, min_prob)
    found.tree.validate()
    assert len(found.tree) <= budget
    return found


def known(draft: Draft) -> tuple[Nodes, int, int]:
    return nodes_of(draft.tree), draft.match_length, draft.match_count


# -- against the oracle --------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@given(
    data=st.data(), budget=st.integers(1, 8) | st.just(64), min_prob=st.sampled_from([0.0, 0.003, 0.03, 0.3])
)
def test_drafts_are_those_of_the_oracle(
    vocab_size: int, data: st.DataObject, budget: int, min_prob: float
) -> None:
    store, max_n = data.draw(stores(vocab_size))
    context = data.draw(contexts(store, vocab_size))
    level = 255 if min_prob == 0.0 else highest_level(min_prob)
    expected = reference.crest_draft(store, max_n, context, budget, level)
    assert known(one(drafter_of(store, vocab_size, max_n), context, budget, min_prob)) == expected


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@given(data=st.data(), width=st.integers(0, 9))
def test_a_batch_gives_the_drafts_of_single_calls(vocab_size: int, data: st.DataObject, width: int) -> None:
    store, max_n = data.draw(stores(vocab_size))
    texts = data.draw(st.lists(contexts(store, vocab_size), max_size=6))
    batch = np.full((len(texts), width), -1, np.int32)
    for row, text in zip(batch, texts, strict=True):
        row[width - min(width, len(text)) :] = text[len(text) - min(width, len(text)) :]
    drafter = drafter_of(store, vocab_size, max_n)
    drafts = drafter.draft(batch, 16)
    assert isinstance(drafter._entries, DictEntries)
    assert drafter._entries.calls == 1
    assert drafts == [one(drafter, row.tolist(), 16) for row in batch]
    turned = np.asfortranarray(batch[::-1]).astype(np.int64)
    assert drafter.draft(turned, 16) == drafts[::-1]  # type: ignore[arg-type]


# -- what is asked -------------------------------------------------------------------------------------------


def test_a_damaged_entry_is_an_error_and_no_crash() -> None:
    drafter = drafter_of({(1,): Stored([(3, -1, 0)], 5, 1), (2,): Stored([(3, -1, 0)], 5, 1)}, 5, 3)
    entries = drafter._entries
    assert isinstance(entries, DictEntries)
    [wrong_parent] = CODEC.encode(trees_of([Stored([(3, 200, 0), (4, 0, 0)], 5, 1)]))
    for value in (b"", b"nonsense", entries.values[b"\0\1"][:-1], wrong_parent):
        entries.values[b"\0\1"] = value
        with pytest.raises(StoreError, match="the store is damaged, build it again"):
            one(drafter, [2, 1])
        assert known(one(drafter, [1, 2]))[1:] == (1, 5)


# -- stores that cannot be opened ----------------------------------------------------------------------------


@pytest.fixture
def copy(small_crest: Path, tmp_path: Path) -> Path:
    shutil.copytree(small_crest, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("name", [LMDB_FILE, DICTIONARY_FILE])
def test_another_file_of_the_same_size_is_refused(copy: Path, name: str) -> None:
    size = (copy / name).stat().st_size
    assert size > 0
    (copy / name).write_bytes(b"\1" * size)
    with pytest.raises(StoreError, match="damaged"):
        CrestStore.open(copy)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "entries_version",
            ...,
            "has entries of version None, this draftstore reads version 2: build it again",
        ),
        ("entries_version", 3, "has entries of version 3, this draftstore reads version 2: build it again"),
        ("rule", "longest", "has trees drawn by 'longest', expected 'backoff': build it again"),
        *(
            ("max_n", value, "does not record the length of its n-grams: the store is damaged")
            for value in (..., 0, 64, "four")
        ),
    ],
)
def test_unusable_parameters_are_refused(copy: Path, name: str, value: Any, message: str) -> None:
    manifest = load_manifest(copy)
    parameters = {
        key: found for key, found in {**manifest.parameters, name: value}.items() if found is not ...
    }
    save_manifest(copy, dataclasses.replace(manifest, parameters=parameters))
    with pytest.raises(StoreError, match=message):
        CrestStore.open(copy)


def test_other_kinds_and_other_backends(copy: Path, small_store: Path) -> None:
    with pytest.raises(StoreError, match="is a store of kind 'rest', expected 'crest'"):
        CrestStore.open(small_store)
    with pytest.raises(TokenizerError, match="was built with tokenizer 'small-bpe'"):
        CrestStore.open(copy, TokenizerIdentity("other", "f" * 64))
    manifest = load_manifest(copy)
    CrestStore.open(str(copy), manifest.tokenizer).close()
    save_manifest(copy, dataclasses.replace(manifest, parameters={**manifest.parameters, "backends": []}))
    with pytest.raises(StoreError):
        CrestStore.open(copy)
