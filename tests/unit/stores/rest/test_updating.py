"""Stores made from the previous one, against stores of the same documents made in one go."""

import json
from collections.abc import Iterator, Set
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import BuildError, StoreError
from draftstore.storage.manifest import load_manifest, verify_files
from draftstore.storage.staging import BuildResult
from draftstore.stores.rest import updating as updating_module
from draftstore.stores.rest.store import STRATEGIES, RestStore, read_digests
from draftstore.stores.rest.updating import Contents, update_rest
from draftstore.text.digests import digest_keys, stack_digests
from draftstore.text.records import Document
from draftstore.text.sharding import tokenize_corpus
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokens import TokenShards
from tests.reference import plain_digest

pytestmark = pytest.mark.usefixtures("no_fsync")

WORDS = ["one", "two", "three", "four", "five", "ten"]
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=20).map(" ".join)


def digests_of(wanted: set[str]) -> np.ndarray:
    return stack_digests(plain_digest(text) for text in sorted(wanted))


def contents(wanted: set[str], segment_tokens: int = 1 << 20) -> Contents:
    corpus = {"sources": [], "characters": 0, "bad_records": 0, "empty_documents": 0}
    return Contents("test", digests_of(wanted), corpus, segment_tokens=segment_tokens)


def shards_of(tokenizer: TextTokenizer, new: set[str], folder: Path) -> TokenShards | None:
    if not new:
        return None
    documents = iter([Document.plain(str(i), text) for i, text in enumerate(sorted(new, reverse=True))])
    return tokenize_corpus([documents], tokenizer, folder, corpus_fingerprint="test", shard_tokens=50)


def make(
    tokenizer: TextTokenizer,
    wanted: set[str],
    folder: Path,
    base: Path | None = None,
    held: Set[str] = frozenset(),
    **options: int,
) -> BuildResult:
    folder.mkdir(parents=True)
    added = shards_of(tokenizer, wanted - held, folder / "tokens")
    return update_rest(
        contents(wanted, **options), tokenizer, folder / "store", base=base, added=added, workers=1
    )


def require_equal_drafts(found: RestStore, expected: RestStore) -> None:
    """Compare the drafts of all contexts of three tokens that occur, and of some that do not."""
    tokens = expected.index.tokens.astype(np.int32)
    rows = np.lib.stride_tricks.sliding_window_view(tokens, min(3, len(tokens)))
    contexts = np.unique(rows, axis=0)[:: max(1, len(rows) // 60)].copy()
    contexts[contexts >= expected.index.vocab_size] = -1
    for strategy in STRATEGIES:
        ours, theirs = (
            store.drafter(strategy, rows=2).draft_batch(contexts, 16) for store in (found, expected)
        )
        for found_bytes, expected_bytes in zip(ours.encode_trees(), theirs.encode_trees(), strict=True):
            np.testing.assert_array_equal(found_bytes, expected_bytes)
        np.testing.assert_array_equal(ours.match_counts, theirs.match_counts)


@given(st.lists(st.tuples(st.sets(texts, max_size=6), st.floats(0, 1)), min_size=1, max_size=6))
def test_any_history_drafts_as_a_build_from_scratch(
    small_tokenizer: TextTokenizer,
    tmp_path_factory: pytest.TempPathFactory,
    history: list[tuple[set[str], float]],
) -> None:
    folder = tmp_path_factory.mktemp("history")
    held: set[str] = set()
    base = None
    for day, (new, removed) in enumerate(history):
        gone = set(sorted(held)[: int(removed * len(held))])
        wanted = (held - gone) | new
        if not wanted:
            continue
        base = make(small_tokenizer, wanted, folder / str(day), base, held).path
        held = wanted
    if base is None:
        return
    found, expected = RestStore.open(base), RestStore.open(make(small_tokenizer, held, folder / "all").path)
    assert verify_files(base, load_manifest(base)) == []
    assert found.manifest.counts == expected.manifest.counts
    assert len(found.index.segments) == 1
    assert set(digest_keys(read_digests(found.path)).tolist()) == set(digest_keys(digests_of(held)).tolist())
    require_equal_drafts(found, expected)
    assert found.manifest.parameters["plan"] == expected.manifest.parameters["plan"]
    assert found.manifest.corpus == expected.manifest.corpus


@pytest.fixture
def words() -> set[str]:
    return {f"{a} {b} {a} {c}" for a in WORDS for b in WORDS for c in WORDS[:3]}


@pytest.fixture
def base(small_tokenizer: TextTokenizer, words: set[str], tmp_path: Path) -> Path:
    """Return a store of all words."""
    return make(small_tokenizer, words, tmp_path / "a").path


class Killed(BaseException):
    """Ends a build where it stands, as a kill does."""


@pytest.mark.parametrize("other", [False, True])
def test_a_killed_update_resumes_even_from_another_base(
    small_tokenizer: TextTokenizer,
    words: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    other: bool,
) -> None:
    listed = sorted(words)
    bases = [set(listed[:90]), set(listed[8:100])]
    stores = [make(small_tokenizer, held, tmp_path / f"base{i}").path for i, held in enumerate(bases)]
    wanted, out = set(listed[2:98]), tmp_path / "store"

    def update(number: int) -> BuildResult:
        added = shards_of(small_tokenizer, wanted - bases[number], tmp_path / f"tokens{number}")
        return update_rest(
            contents(wanted), small_tokenizer, out, base=stores[number], added=added, workers=1
        )

    def kill(*_: object, **__: object) -> Iterator[None]:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(updating_module, "merge_segment", kill)
        with pytest.raises(Killed):
            update(0)
    assert not out.exists()
    made = update(int(other))
    plain = make(small_tokenizer, wanted, tmp_path / "plain")
    require_equal_drafts(RestStore.open(made.path), RestStore.open(plain.path))
    assert not list(tmp_path.glob(".*"))
    assert update(int(other)).reused


def test_documents_that_nobody_has_are_refused(
    small_tokenizer: TextTokenizer, words: set[str], base: Path, tmp_path: Path
) -> None:
    with pytest.raises(BuildError, match="1 wanted documents are neither"):
        update_rest(contents(words | {"another"}), small_tokenizer, tmp_path / "out", base=base)
    with pytest.raises(BuildError, match="there are no wanted documents"):
        update_rest(contents(set()), small_tokenizer, tmp_path / "out", base=base)
    added = shards_of(small_tokenizer, {"one two"} | set(list(words)[:1]), tmp_path / "more")
    with pytest.raises(BuildError, match="1 are in both"):
        update_rest(contents(words | {"one two"}), small_tokenizer, tmp_path / "out", base=base, added=added)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        *((key, f"was built with another {key}") for key in ("template", "identity", "date")),
        ("tokens", "documents, but"),
    ],
)
def test_unsuitable_base_stores_are_refused(
    small_tokenizer: TextTokenizer, words: set[str], base: Path, tmp_path: Path, damage: str, reason: str
) -> None:
    manifest = json.loads((base / "manifest.json").read_text())
    if damage == "tokens":  # the end of a document is lost: all later digests would name other texts
        tokens = np.memmap(base / "tokens.bin", "<u2", "r+")
        tokens[np.flatnonzero(tokens == np.iinfo(np.uint16).max)[0]] = 7
        tokens.flush()
    else:
        manifest["parameters"]["plan"][damage] = "another"
    (base / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=reason):
        update_rest(contents(words), small_tokenizer, tmp_path / "out", base=base, workers=1)
