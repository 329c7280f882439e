import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.errors import BuildError
from draftstore.storage.manifest import load_manifest, verify_files
from draftstore.storage.report import Progress, silent
from draftstore.storage.staging import BuildResult
from draftstore.stores.dresd import build as dresd_build
from draftstore.stores.dresd import embedding, grouping
from draftstore.stores.dresd.build import DresdOptions, build_dresd
from draftstore.stores.dresd.grouping import cluster
from draftstore.stores.dresd.kernels import passages
from draftstore.stores.dresd.kernels.passages import cut_windows
from draftstore.stores.dresd.projection import unit
from draftstore.stores.dresd.store import DresdStore
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.text.tokens import sentinel
from tests.conftest import small_tokenizer_folder, write_texts
from tests.fakes import killed
from tests.fakes.state_sources import HashedStates
from tests.reference import dense_places
from tests.unit.stores.rest.test_build import contents, names, no_space

pytestmark = pytest.mark.usefixtures("no_fsync", "small_blocks")

DIMS = 6


@pytest.fixture(scope="module")
def small_blocks() -> Any:
    """Let blocks and large groups be small, so that tests see many of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passages, "BLOCK_TOKENS", 300)
        patch.setattr(grouping, "LARGE", 40)
        yield


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "corpus").mkdir()
    return write_texts(tmp_path / "corpus" / "c.jsonl", 30)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "stores").mkdir()
    return tmp_path / "stores" / "store"


def build(
    tokenizer: TextTokenizer,
    corpus: Path,
    out: Path,
    source: HashedStates | None = None,
    progress: Progress = silent,
    **changes: Any,
) -> BuildResult:
    """Build a small store; `overwrite` and the fields of DresdOptions may differ."""
    overwrite = changes.pop("overwrite", False)
    options = DresdOptions(corpus=(corpus,), **{"name": "test", "dims": DIMS, "sample": 700, **changes})
    source = source or HashedStates()
    return build_dresd(options, tokenizer, source, out, overwrite=overwrite, progress=progress)


def documents_of(store: DresdStore) -> list[list[int]]:
    ends = np.flatnonzero(store.tokens == sentinel(store.tokens.dtype))
    return [part[:-1].tolist() for part in np.split(store.tokens, ends + 1)[:-1]]


def require_whole(path: Path) -> None:
    manifest = load_manifest(path)
    assert verify_files(path, manifest) == []
    assert set(contents(path)) == set(manifest.files)
    DresdStore.open(path)


def require_entries(
    store: DresdStore, source: HashedStates, bos: Sequence[int], window: int = 1 << 20
) -> None:
    """Check every entry of a store: which there are, their groups, lists, places and vectors."""
    documents = documents_of(store)
    starts = np.cumsum([0, *(len(document) + 1 for document in documents)])
    places = np.asarray(store.index.positions, np.int64) - 2
    owners = np.searchsorted(starts, places, side="right") - 1
    found = list(zip(owners.tolist(), (places - starts[owners]).tolist(), strict=True))
    expected = [
        (number, place)
        for number, place in dense_places(documents)
        if documents[number][place] != source.broken
    ]
    assert sorted(found) == expected
    groups = store.index.groups
    tokens = np.searchsorted(groups, np.arange(len(found)), side="right") - 1
    assert tokens.tolist() == [documents[number][place + 1] for number, place in found]
    states = [read(source, document, bos, window) for document in documents]
    kept = np.stack([states[number][place] for number, place in found])
    projected = store.projection.apply(kept)
    errors = np.abs(unit(projected) - store.index.vectors.view(np.float16)).max(axis=1)
    # What float16 rounds off a state turns its vector the more, the shorter that is.
    lost = 2.0**-11 * np.linalg.norm(np.abs(kept) @ np.abs(store.projection.weights.T), axis=1)
    assert (errors < 0.001 + lost / np.linalg.norm(projected, axis=1)).all()
    for token in range(store.manifest.vocab_size):
        lists = store.index.group_lists[token : token + 2]
        size = groups[token + 1] - groups[token]
        assert lists[1] - lists[0] == grouping.lists_for(int(size))
        order = [found[entry] for entry in range(groups[token], groups[token + 1])]
        if lists[0] == lists[1]:
            assert order == sorted(order)


def read(source: HashedStates, document: list[int], bos: Sequence[int], window: int) -> NDArray[np.float32]:
    """Return the states of a document that is read in windows."""
    states = np.full((len(document), source.hidden_size), np.nan, np.float32)
    for start, first, stop in cut_windows(max(len(document) - 2, 0), window - len(bos)):
        head = [] if start == 0 and document[: len(bos)] == list(bos) else list(bos)
        rows = source.of([*head, *document[start:stop]])
        states[first:stop] = rows[len(head) + first - start :]
    return states


# --- what is built ---


def test_the_store_holds_every_entry(small_tokenizer: TextTokenizer, corpus: Path, out: Path) -> None:
    source = HashedStates()
    result = build(small_tokenizer, corpus, out, source)
    require_whole(out)
    store = DresdStore.open(out, target_model="hashed", tokenizer=small_tokenizer.identity, hidden_size=12)
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    assert documents_of(store) == [small_tokenizer.encode(text, bos=False).tolist() for text in texts]
    require_entries(store, source, small_tokenizer.bos_ids)
    counts, parameters = result.manifest.counts, result.manifest.parameters
    assert counts == {
        "documents": 30, "tokens": len(store.tokens) - 30, "entries": len(store.index.vectors),
        "lists": len(store.index.centroids), "skipped": 0, "repeated": 0,
    }  # fmt: skip
    assert counts["lists"] > 10
    expected = {
        "dims": DIMS,
        "hidden_size": 12,
        "layer": "last",
        "projection": store.projection.digest,
    }
    assert {key: parameters[key] for key in expected} == expected
    assert 0.5 < parameters["explained_variance"] < 1
    quality = parameters["quality"]
    assert quality["queries"] == 512
    assert quality["mean_reciprocal_rank"] > 0.9
    assert quality["recall_at_10"] > 0.9
    assert (result.manifest.target_model, result.manifest.kind) == ("hashed", "dresd")
    assert load_tokenizer(out / "tokenizer").fingerprint == small_tokenizer.fingerprint
    assert names(out.parent) == ["store"]


@given(
    texts=st.lists(st.text("ab \n", max_size=60), min_size=1, max_size=8),
    common=st.text("abc", max_size=40),
    window=st.integers(4, 40),
)
def test_any_documents(
    small_tokenizer: TextTokenizer,
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    common: str,
    window: int,
) -> None:
    folder = tmp_path_factory.mktemp("build")
    lines = [json.dumps({"text": common + text}) + "\n" for text in [*texts, "the lazy dog " * 3]]
    (folder / "c.jsonl").write_text("".join(lines))
    source = HashedStates()
    build(small_tokenizer, folder / "c.jsonl", folder / "store", source, dims=2, max_length=window)
    require_whole(folder / "store")
    assert max(source.read) <= window
    require_entries(DresdStore.open(folder / "store"), source, small_tokenizer.bos_ids, window)


def test_nonfinite_states_are_skipped_and_counted(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path
) -> None:
    token = int(small_tokenizer.encode(" the", bos=False)[0])
    source = HashedStates(broken=token)
    result = build(small_tokenizer, corpus, out, source)
    store = DresdStore.open(out)
    require_entries(store, source, small_tokenizer.bos_ids)
    skipped = sum(
        document[place] == token for document in documents_of(store) for place in range(len(document) - 2)
    )
    assert result.manifest.counts["skipped"] == skipped > 20
    assert result.manifest.parameters["quality"]["queries"] < 512


# --- what cannot be built ---


def test_more_dimensions_than_the_model_has(small_tokenizer: TextTokenizer, corpus: Path, out: Path) -> None:
    with pytest.raises(BuildError, match=r"vectors of 13 dimensions from hidden states of 12: .*\(dims\)"):
        build(small_tokenizer, corpus, out, dims=13)
    assert names(out.parent) == []


def test_too_little_text(small_tokenizer: TextTokenizer, corpus: Path, out: Path) -> None:
    reason = r"the corpus yields [1-6] hidden states followed by two tokens, .* fewer dimensions \(dims\)"
    corpus.write_text('{"text": "abcdefg"}\n')
    with pytest.raises(BuildError, match=reason):
        build(small_tokenizer, corpus, out)
    assert not out.exists()


def test_a_tokenizer_with_more_ids_than_the_model(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path
) -> None:
    with pytest.raises(
        BuildError, match=r"holds id \d+, but the model hashed has only ids below 100: use the model"
    ):
        build(small_tokenizer, corpus, out, HashedStates(vocab_size=100))


# --- the same bytes, whatever happens in between ---


def test_another_build_is_refused(small_tokenizer: TextTokenizer, corpus: Path, out: Path) -> None:
    build(small_tokenizer, corpus, out)
    for changes in (
        {"dims": 5}, {"max_length": 100}, {"sample": 1000},
        {"source": HashedStates(name="other")}, {"source": HashedStates(broken=3)},
    ):  # fmt: skip
        with pytest.raises(BuildError, match="exists and is another build: choose another folder, or"):
            build(small_tokenizer, corpus, out, **changes)


def test_a_resumed_build_reads_no_block_twice(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = HashedStates()
    build(small_tokenizer, corpus, tmp_path / "whole", source)
    expected = sorted(source.read)
    source.read.clear()
    for module, step in ((embedding, "fit"), (dresd_build, "group_entries")):
        with monkeypatch.context() as patch:
            patch.setattr(module, step, no_space)
            with pytest.raises(OSError, match="No space left"):
                build(small_tokenizer, corpus, out, source)
    build(small_tokenizer, corpus, out, source)
    assert sorted(source.read) == expected
    assert contents(out) == contents(tmp_path / "whole")


def test_a_killed_build_ends_with_the_same_bytes(tmp_path: Path, out: Path) -> None:
    """Killed while the vectors are written."""
    corpus, tokenizer = write_texts(tmp_path / "c.jsonl", 300), small_tokenizer_folder(tmp_path / "small-bpe")
    reached = (out.parent / ".store.partial" / "vectors.f16").exists
    assert killed.kill_when(killed.hashed_store, (corpus, tokenizer, out), reached)
    assert not out.exists()
    for target in (out, tmp_path / "whole"):
        killed.run(killed.hashed_store, (corpus, tokenizer, target))
    require_whole(out)
    assert contents(out) == contents(tmp_path / "whole")
    assert load_manifest(out).parameters == load_manifest(tmp_path / "whole").parameters
    assert names(out.parent) == ["store"]


def directions(count: int, dims: int, seed: int) -> NDArray[np.float32]:
    return unit(np.random.default_rng(seed).standard_normal((count, dims)).astype(np.float32))


@given(
    count=st.integers(1, 300),
    dims=st.sampled_from([1, 2, 8, 64]),
    different=st.integers(1, 300),
    share=st.floats(0.0, 1.0),
    seed=st.integers(0, 9),
)
def test_every_vector_is_in_the_list_of_its_nearest_centroid(
    count: int, dims: int, different: int, share: float, seed: int
) -> None:
    vectors = directions(different, dims, seed)[np.arange(count) % different]
    lists = 1 + int(share * (count - 1))
    centroids, assignment = cluster(vectors, lists, seed)
    assert centroids.dtype == np.float32
    assert centroids.shape == (lists, dims)
    assert assignment.dtype == np.int32
    assert assignment.shape == (count,)
    assert np.linalg.norm(centroids, axis=1) == pytest.approx(np.ones(lists), abs=1e-5)
    similarities = vectors @ centroids.T
    assert (similarities[np.arange(count), assignment] >= similarities.max(axis=1) - 1e-5).all()
