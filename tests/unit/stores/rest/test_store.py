import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftstore.errors import DraftstoreError, StoreError, TokenizerError, TokenRangeError
from draftstore.search.suffix import SuffixIndex
from draftstore.storage.manifest import (
    FileEntry,
    Manifest,
    TokenizerIdentity,
    load_manifest,
    save_manifest,
    verify_files,
)
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import DTYPES, KIND, STRATEGIES, RestStore
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokens import sentinel
from draftstore.trees.frontier import BUDGET
from tests import reference
from tests.reference import Documents, make_index, nodes_of

TEXTS = [
    "def add(left, right):\n    return left + right\n",
    "def sub(left, right):\n    return left - right\n",
    "for item in items:\n    if item is not None:\n        print(item)\n",
    "for item in boxes:\n    if item is not None:\n        print(item)\n",
    "The quick brown fox jumps over the lazy dog.",
    "naïve café, 東京, emoji 😀",
] * 3

WIDE = 151_665
ARRAYS = ["tokens", "suffixes", "keys", "first_rows", "segments"]


def build(folder: Path, tokenizer: TextTokenizer, texts: list[str], segment_tokens: int = 1 << 20) -> Path:
    """Build a store from records of text, in this process."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.jsonl"
    lines = [json.dumps({"id": f"d{number}", "text": text}) for number, text in enumerate(texts)]
    corpus.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = RestOptions(corpus=(corpus,), name="test", segment_tokens=segment_tokens)
    return build_rest(options, tokenizer, folder / "store", workers=1).path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: TextTokenizer) -> Path:
    """Return a store of three segments or more; tests must not change it."""
    path = build(tmp_path_factory.mktemp("rest"), small_tokenizer, TEXTS, segment_tokens=120)
    assert len(RestStore.open(path).index.segments) >= 3
    return path


@pytest.fixture
def store(built: Path, tmp_path: Path) -> Path:
    """Return a copy of the store that a test may damage."""
    return Path(shutil.copytree(built, tmp_path / "store"))


def documents_in(index: SuffixIndex) -> Documents:
    """Read the documents back from the tokens of a store."""
    end = sentinel(index.tokens.dtype)
    documents: Documents = [[]]
    for token in index.tokens.tolist():
        if token == end:
            documents.append([])
        else:
            documents[-1].append(token)
    return documents[:-1]


def write_index(path: Path, index: SuffixIndex) -> Path:
    """Write arrays as a store, whatever they hold, with a manifest that fits the files."""
    path.mkdir(parents=True, exist_ok=True)
    for name in ARRAYS:
        getattr(index, name).tofile(path / f"{name}.bin")
    files = {f"{name}.bin": FileEntry.of(path / f"{name}.bin") for name in ARRAYS}
    identity = TokenizerIdentity("none", "0" * 64)
    dtype = index.tokens.dtype.name
    counts = {"documents": 0, "tokens": 0, "entries": len(index.tokens)}
    save_manifest(
        path, Manifest(KIND, "raw", "2025-01-01", index.vocab_size, dtype, identity, {}, {}, counts, files)
    )
    return path


def rewrite(store: Path, name: str, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    """Change an array of a store and let its manifest agree with the file."""
    manifest = load_manifest(store)
    array = np.fromfile(store / name, DTYPES[name](manifest))
    change(array).astype(array.dtype).tofile(store / name)
    files = {**manifest.files, name: FileEntry.of(store / name)}
    save_manifest(store, dataclasses.replace(manifest, files=files))
    assert verify_files(store, load_manifest(store)) == []


def edit_manifest(store: Path, **fields: Any) -> None:
    path = store / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **fields}), encoding="utf-8")


def refusal(store: Path) -> str:
    """Open a store that does not open; return what is said about it."""
    with pytest.raises(StoreError) as caught:
        RestStore.open(store)
    return str(caught.value)


# -- tables that do not fit each other, in files that fit the manifest ---------------------------------------


def put(place: int, value: int) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Return a change of one item of an array to a value."""

    def change(array: NDArray[Any]) -> NDArray[Any]:
        array[place] = value
        return array

    return change


MISFITS: dict[str, tuple[str, Callable[[NDArray[Any]], NDArray[Any]], str]] = {
    "a token more": ("tokens.bin", lambda a: np.append(a, 1), "do not match each other"),
    "a suffix less": ("suffixes.bin", lambda a: a[:-1], "do not match each other"),
    "a key more": ("keys.bin", lambda a: np.append(a, 0), "do not match each other"),
    "a row less": ("first_rows.bin", lambda a: a[:-1], "do not match a vocabulary"),
    "part of a segment": ("segments.bin", lambda a: a[:-1], "do not match"),
    "a segment that starts later": ("segments.bin", put(3, 1), "do not match each other"),
    "a segment of negative length": ("segments.bin", put(1, -(10**6)), "do not match each other"),
    "no end of the rows": ("first_rows.bin", put(-1, 1 << 20), "expected"),
    "sentinels that start at once": ("first_rows.bin", put(-1, 0), "damaged"),
    "rows beyond the segment": ("first_rows.bin", put(5, 1 << 20), "damaged"),
    "rows that fall": ("first_rows.bin", put(40, -1), "damaged"),
    "no tokens": ("tokens.bin", lambda a: a[:0], "cannot be mapped"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_tables_that_do_not_fit_each_other_are_refused(store: Path, name: str) -> None:
    file, change, message = MISFITS[name]
    rewrite(store, file, change)
    assert message in refusal(store)


def true_order(tokens: NDArray[Any], _vocab_size: int) -> NDArray[np.int32]:
    """Sort the suffixes by the values of the ids, whatever they are."""
    return np.array(reference.sort_suffixes(tokens.tolist()), np.int32)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(30, np.uint16), (WIDE, np.uint32)])
@pytest.mark.parametrize("segment", [0, 1])
def test_an_id_outside_the_vocabulary_is_refused(
    tmp_path: Path, vocab_size: int, dtype: type[np.unsignedinteger[Any]], segment: int
) -> None:
    corpus: list[Documents] = [[[1, 2, 3], [4, 5]], [[6, 7, 8]]]
    fine = write_index(tmp_path / "fine", make_index(corpus, vocab_size, true_order))
    assert RestStore.open(fine).index.tokens.dtype == dtype
    for number, wrong in enumerate((vocab_size, vocab_size + 1, int(np.iinfo(dtype).max) - 1)):
        corpus[segment][0][1] = wrong
        path = write_index(tmp_path / f"true{number}", make_index(corpus, vocab_size, true_order))
        assert verify_files(path, load_manifest(path)) == []
        message = refusal(path)
        assert f"segment {segment} of {path} holds id {wrong}, expected ids below {vocab_size:,}" in message
        # Sorted by the library itself, the id need not be the first of its rows: sorting or opening refuses.
        with pytest.raises(TokenRangeError, match=f"holds id {wrong:,}, expected ids below {vocab_size:,}"):
            make_index(corpus, vocab_size)


def test_an_id_written_over_another_is_never_drafted(store: Path) -> None:
    """Opening reads a row a segment, so this is for `verify` to find; drafts end before the id."""
    index = RestStore.open(store).index
    documents = documents_in(index)
    rewrite(store, "tokens.bin", put(4, index.vocab_size + 5))
    drafter = RestStore.open(store).drafter()
    for end in range(1, 8):
        context = np.array([documents[0][:end]], np.int32)
        tree = drafter.draft(context)[0].tree
        tree.validate()
        assert tree.tokens.max(initial=0) < index.vocab_size


def test_a_position_beyond_the_segment_is_refused(store: Path) -> None:
    """The row that is read on opening points outside: a damaged store, not an index error."""
    row = int(RestStore.open(store).index.first_rows[0, -1])
    for wrong in (2**31 - 1, -(2**31), -1):
        rewrite(store, "suffixes.bin", put(row, wrong))
        assert "damaged" in refusal(store)


# -- drafting ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_drafts_of_a_store_are_those_of_the_oracle(built: Path, strategy: str) -> None:
    store = RestStore.open(built)
    documents = documents_in(store.index)
    drafter = store.drafter(strategy, rows=1 << 16)
    rule = STRATEGIES[strategy]._replace(rows=1 << 16)
    draw = reference.longest_tree if strategy == "longest" else reference.backoff_tree
    contexts = [document[:end] for document in documents[:5] for end in (1, 3, 8, 14)]
    for context in contexts:
        [draft] = drafter.draft(np.array([context], np.int32), BUDGET, 0.01)
        bound = int(np.count_nonzero(np.exp2(-np.arange(256) / 16) >= 0.01)) - 1
        expected = draw(documents, rule, context[-16:], BUDGET, bound)
        assert nodes_of(draft.tree) == expected
        match = reference.longest_match(documents, context[-16:])
        assert (draft.match_length, draft.match_count) == (match if match[0] >= rule.min_match else (0, 0))


@pytest.mark.parametrize("batch", [7, 8, 29])
def test_several_threads_give_the_drafts_of_one(built: Path, batch: int) -> None:
    store = RestStore.open(built)
    text = max(documents_in(store.index), key=len)
    contexts = np.array([text[place % 8 :][:8] for place in range(batch)], np.int32)
    alone, together = (store.drafter(threads=threads).draft(contexts, BUDGET) for threads in (1, 3))
    assert sum(len(draft.tree) for draft in alone) > 0
    assert alone == together
    with pytest.raises(DraftstoreError, match="threads"):
        store.drafter(threads=0)


def test_requests_that_cannot_be_answered(built: Path) -> None:
    store = RestStore.open(built)
    with pytest.raises(DraftstoreError, match="unknown strategy 'best': expected one of backoff, longest"):
        store.drafter("best")
    with pytest.raises(TokenizerError, match="was built with tokenizer 'small-bpe'"):
        RestStore.open(built, TokenizerIdentity("other", "f" * 64))
    assert RestStore.open(str(built), store.manifest.tokenizer).path == built
