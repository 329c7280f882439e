import json
import shutil
from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.errors import BuildError, CorpusError, StoreError
from draftstore.storage.manifest import load_manifest, verify_files
from draftstore.storage.progress import Progress, silent
from draftstore.storage.staging import BuildResult
from draftstore.stores.dresd import build as dresd_build
from draftstore.stores.dresd import embedding
from draftstore.stores.dresd.build import DresdOptions, build_dresd
from draftstore.stores.dresd.kernels import clusters, passages
from draftstore.stores.dresd.kernels.nearest import ALL, search
from draftstore.stores.dresd.kernels.quantised import restore
from draftstore.stores.dresd.kernels.windows import cut_windows
from draftstore.stores.dresd.projection import unit
from draftstore.stores.dresd.store import DresdStore
from draftstore.text import tokenizing
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.text.tokenizing import CorpusOptions, build_tokens
from draftstore.text.tokens import sentinel
from tests.conftest import small_tokenizer_folder, write_texts
from tests.examples import examples
from tests.fakes import killed
from tests.fakes.progress import Steps
from tests.fakes.state_sources import HashedStates
from tests.reference import dense_places
from tests.unit.stores.rest.test_build import DISK, contents, names, no_space

pytestmark = pytest.mark.usefixtures("no_fsync", "small_blocks")

DIMS = 6


@pytest.fixture(scope="module")
def small_blocks() -> Any:
    """Let blocks and large groups be small, so that tests see many of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passages, "BLOCK_TOKENS", 300)
        patch.setattr(clusters, "LARGE", 40)
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
    tokens: Path | None = None,
    **changes: Any,
) -> BuildResult:
    """Build a small store; `overwrite` and the fields of DresdOptions may differ."""
    overwrite = changes.pop("overwrite", False)
    options = DresdOptions(corpus=(corpus,), **{"name": "test", "dims": DIMS, "sample": 700, **changes})
    source = source or HashedStates()
    return build_dresd(options, tokenizer, source, out, tokens=tokens, overwrite=overwrite, progress=progress)


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
    errors = np.abs(unit(projected) - restore(store.index.vectors)).max(axis=1)
    # What float16 rounds off a state turns its vector the more, the shorter that is.
    lost = 2.0**-11 * np.linalg.norm(np.abs(kept) @ np.abs(store.projection.weights.T), axis=1)
    allowed = 0.01 if store.manifest.parameters["dtype"] == "int8" else 0.001
    assert (errors < allowed + lost / np.linalg.norm(projected, axis=1)).all()
    for token in range(store.manifest.vocab_size):
        lists = store.index.group_lists[token : token + 2]
        size = groups[token + 1] - groups[token]
        assert lists[1] - lists[0] == clusters.lists_for(int(size))
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


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_the_store_holds_every_entry(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, dtype: str
) -> None:
    source = HashedStates()
    result = build(small_tokenizer, corpus, out, source, dtype=dtype)
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
        "dtype": dtype,
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


@examples(25)
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


def test_a_state_of_the_corpus_finds_itself(small_tokenizer: TextTokenizer, corpus: Path, out: Path) -> None:
    source = HashedStates()
    build(small_tokenizer, corpus, out, source, dims=12)
    store = DresdStore.open(out)
    document = documents_of(store)[7]
    states = source.of([*small_tokenizer.bos_ids, *document])[1:]
    firsts = np.array(document[1:], np.int32)
    found = search(store.index, store.projection.apply(states[:-1]), firsts, 3, ALL)
    for place in range(len(document) - 2):
        position = int(store.index.positions[found.entries[place, 0]])
        assert (
            store.tokens[position : position + 5].tolist()[: len(document) - place - 2]
            == document[place + 2 : place + 7]
        )
        assert found.similarities[place, 0] > 0.999


def test_equal_beginnings_are_kept_once(small_tokenizer: TextTokenizer, tmp_path: Path, out: Path) -> None:
    head = "The quick brown fox jumps over the lazy dog; the dog does not mind. " * 2
    lines = [head + "naive", head + "tabs", head + "naive", head, "for item in items: print"]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    source = HashedStates()
    result = build(small_tokenizer, tmp_path / "c.jsonl", out, source)
    require_entries(DresdStore.open(out), source, small_tokenizer.bos_ids)
    counts = result.manifest.counts
    assert counts["repeated"] > 40
    assert counts["entries"] + counts["repeated"] == counts["tokens"] - 2 * counts["documents"]
    assert len(source.read) == 4  # the third document is read nowhere


def test_ids_of_32_bits(wide_tokenizer: TextTokenizer, tmp_path: Path, out: Path) -> None:
    rng = np.random.default_rng(0)
    texts = [
        " ".join(f"w{i}" for i in rng.choice([5, 65_534, 65_535, 65_536, 69_999], 20)) for _ in range(20)
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = HashedStates()
    build(wide_tokenizer, tmp_path / "c.jsonl", out, source)
    store = DresdStore.open(out)
    assert (store.tokens.itemsize, store.index.positions.itemsize) == (4, 4)
    require_entries(store, source, ())


def test_states_that_are_not_finite_are_left_out_and_counted(
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


def test_states_beyond_float16(small_tokenizer: TextTokenizer, corpus: Path, out: Path) -> None:
    """They are lost where states are kept, and told; a block that is projected at once has room for them."""
    token = int(small_tokenizer.encode(" the", bos=False)[0])

    class Loud(HashedStates):
        def of(self, ids: Sequence[int]) -> NDArray[np.float32]:
            states = super().of(ids)
            states[:, 0] *= np.where(np.array(ids) == token, 1e9, 1)
            return states

    result = build(small_tokenizer, corpus, out, Loud(), sample=10**6)
    store = DresdStore.open(out)
    loud = sum(
        document[place] == token for document in documents_of(store) for place in range(len(document) - 2)
    )
    assert result.manifest.counts["skipped"] == loud > 0
    assert np.isfinite(restore(store.index.vectors)).all()


@pytest.mark.parametrize("text", ["the quick brown fox jumps over the lazy dog " * 5, "abcdefghij" * 3])
def test_one_document(small_tokenizer: TextTokenizer, tmp_path: Path, out: Path, text: str) -> None:
    (tmp_path / "one.txt").write_text(text)
    source = HashedStates()
    result = build(small_tokenizer, tmp_path / "one.txt", out, source)
    assert result.manifest.counts["documents"] == 1
    require_entries(DresdStore.open(out), source, small_tokenizer.bos_ids)


def test_the_model_is_told_bos_once(small_tokenizer: TextTokenizer, tmp_path: Path, out: Path) -> None:
    (tmp_path / "c.txt").write_text("<s>" + "the lazy dog " * 10)
    (tmp_path / "d.txt").write_text("the lazy dog, " * 10)
    source = HashedStates()
    options = DresdOptions(corpus=(tmp_path / "c.txt", tmp_path / "d.txt"), name="test", dims=DIMS)
    build_dresd(options, small_tokenizer, source, out)
    require_entries(DresdStore.open(out), source, small_tokenizer.bos_ids)


def test_progress_is_reported(small_tokenizer: TextTokenizer, corpus: Path, out: Path) -> None:
    calls = Steps()
    result = build(small_tokenizer, corpus, out, progress=calls)
    for rows in calls.values():
        assert len(rows) > 1
        assert [done for done, _ in rows] == sorted(done for done, _ in rows)
    counts = result.manifest.counts
    assert calls["tokenizing"][-1] == (counts["tokens"], None)
    assert calls["embedding"][-1] == (counts["tokens"] - 60,) * 2
    assert calls["sampling"][-1][0] == calls["sampling"][-1][1]
    assert calls["grouping"][-1] == (counts["entries"],) * 2
    size = sum(entry.size for entry in result.manifest.files.values())
    assert calls["hashing"][-1] == (size, size)


def test_the_tokens_of_another_store(
    small_tokenizer: TextTokenizer, corpus: Path, tmp_path: Path, out: Path
) -> None:
    build_tokens(CorpusOptions(corpus=(corpus,), name="tokens"), small_tokenizer, tmp_path / "tokens")
    build(small_tokenizer, corpus, out, tokens=tmp_path / "tokens")
    build(small_tokenizer, corpus, tmp_path / "same")
    assert contents(out) == contents(tmp_path / "same")


# --- what cannot be built ---


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"dims": 13},
            r"vectors of 13 dimensions from hidden states of 12: expected at most as many \(--dims\)",
        ),
    ],
)
def test_options_that_are_none(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BuildError, match=f"^{reason}$"):
        build(small_tokenizer, corpus, out, **changes)
    assert names(out.parent) == []


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["a", "", "ab"], r"the corpus gives 0 hidden states that two tokens follow, .* give more text"),
        (
            ["abcdefg"],
            r"the corpus gives [1-6] hidden states that two tokens follow, .* fewer dimensions \(--dims\)",
        ),
    ],
)
def test_too_little_text(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, texts: list[str], reason: str
) -> None:
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with pytest.raises(BuildError, match=reason):
        build(small_tokenizer, corpus, out)
    assert not out.exists()


def test_no_text(small_tokenizer: TextTokenizer, corpus: Path, out: Path) -> None:
    corpus.write_text("")
    with pytest.raises(CorpusError, match="no text found"):
        build(small_tokenizer, corpus, out)
    assert names(out.parent) == []


def test_no_finite_states(small_tokenizer: TextTokenizer, corpus: Path, out: Path) -> None:
    class Broken(HashedStates):
        def of(self, ids: Sequence[int]) -> NDArray[np.float32]:
            return np.full((len(ids), self.hidden_size), np.nan, np.float32)

    with pytest.raises(BuildError, match="0 hidden states for 6 dimensions"):
        build(small_tokenizer, corpus, out, Broken())


def test_a_tokenizer_with_more_ids_than_the_model(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path
) -> None:
    with pytest.raises(
        BuildError, match=r"holds id \d+, and the model hashed knows only ids below 100: use the model"
    ):
        build(small_tokenizer, corpus, out, HashedStates(vocab_size=100))
    largest = max(
        max(small_tokenizer.encode(json.loads(line)["text"], bos=False))
        for line in corpus.read_text().splitlines()
    )
    build(small_tokenizer, corpus, out, HashedStates(vocab_size=int(largest) + 1))


def test_windows_are_no_longer_than_the_model_reads(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path
) -> None:
    source = HashedStates(positions=20)
    result = build(small_tokenizer, corpus, out, source)
    assert max(source.read) == 20
    assert result.manifest.parameters["plan"]["max_length"] == 20
    require_entries(DresdStore.open(out), source, small_tokenizer.bos_ids, 20)
    with pytest.raises(BuildError, match=r"the model reads 1 tokens at once: expected more"):
        build(small_tokenizer, corpus, out.with_name("x"), HashedStates(positions=1))


# --- the same bytes, whatever happens in between ---


def test_two_builds_are_the_same_bytes(
    small_tokenizer: TextTokenizer, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    for name in "ab":
        build(small_tokenizer, corpus, tmp_path / name)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    manifests = [(tmp_path / name / "manifest.json").read_bytes() for name in "ab"]
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize(
    "changes",
    [{"dims": 5}, {"dtype": "int8"}, {"max_length": 100}, {"sample": 1000}, {"source": HashedStates(name="other")},
     {"source": HashedStates(broken=3)}],
)  # fmt: skip
def test_another_build_is_refused(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, changes: dict[str, Any]
) -> None:
    build(small_tokenizer, corpus, out)
    with pytest.raises(
        BuildError, match="exists and is another build: choose another --out, or pass --overwrite"
    ):
        build(small_tokenizer, corpus, out, **changes)


def test_a_crash_at_any_moment(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, tmp_path: Path
) -> None:
    """Steps that have ended are not repeated, and the store is the same."""
    write_texts(corpus, 8)
    build(small_tokenizer, corpus, tmp_path / "whole")
    whole = contents(tmp_path / "whole")

    def work() -> None:
        build(small_tokenizer, corpus, out)

    assert DISK.run(out.parent, work)
    total = DISK.changes
    assert total > 40
    shutil.rmtree(out)
    for limit in range(total):
        shutil.rmtree(out.parent)
        out.parent.mkdir()
        assert not DISK.run(out.parent, work, limit)
        if out.exists():
            require_whole(out)
        work()
        assert contents(out) == whole
        assert load_manifest(out).parameters == load_manifest(tmp_path / "whole").parameters
        build(small_tokenizer, corpus, out)
        assert names(out.parent) == ["store"]


def test_too_little_space_is_told_before_it_is_used(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    source = HashedStates()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with pytest.raises(BuildError, match=r"needs about 0\.0 GB, 0\.0 GB are free: make room"):
        build(small_tokenizer, corpus, out, source)
    assert source.read == []
    monkeypatch.undo()
    build(small_tokenizer, corpus, out)
    require_whole(out)


def unmarked(_marker: Path, do: Callable[[], object], still: object = None) -> None:
    """Do a step, and have no space to mark it."""
    do()
    no_space()


def test_a_full_disk_is_an_error_and_no_loss(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, tmp_path: Path
) -> None:
    build(small_tokenizer, corpus, tmp_path / "whole")
    faults = [
        (embedding, "_write_blocks", no_space),
        (embedding, "once", unmarked),
        (tokenizing, "save_manifest", no_space),
        (dresd_build, "save_manifest", no_space),
    ]
    for module, name, fault in faults:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, fault)
            with pytest.raises(OSError, match="No space left"):
                build(small_tokenizer, corpus, out)
        with pytest.raises(StoreError):
            DresdStore.open(out)
    build(small_tokenizer, corpus, out)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Return a larger corpus, its tokenizer and its store."""
    folder = tmp_path_factory.mktemp("killed")
    corpus = write_texts(folder / "c.jsonl", 1_000)
    tokenizer = small_tokenizer_folder(folder / "small-bpe")
    arguments = (corpus, tokenizer, folder / "whole")
    killed.run(killed.hashed_store, arguments)
    return arguments


@pytest.mark.slow
@pytest.mark.parametrize(
    "marker",
    ["tokens/tokens.json", "tokens.bin", "states.bin", "sampled.json", "projected.json", "vectors.f16",
     "store", "store/vectors.bin", "store/groups.bin", "store/tokenizer", "store/manifest.json"],
)  # fmt: skip
def test_killed_when_a_step_is_reached(larger: tuple[Path, ...], out: Path, marker: str) -> None:
    arguments = (*larger[:-1], out)
    killed.kill_when(killed.hashed_store, arguments, (out.parent / ".store.partial" / marker).exists)
    finish(arguments, out, larger[-1])


def finish(arguments: Sequence[Any], out: Path, whole: Path) -> None:
    """Check that a killed build left no half store, and that the same build ends with the same bytes."""
    if out.exists():
        require_whole(out)
    killed.run(killed.hashed_store, arguments)
    require_whole(out)
    assert contents(out) == contents(whole)
    assert load_manifest(out).parameters == load_manifest(whole).parameters
    assert names(out.parent) == ["store"]
