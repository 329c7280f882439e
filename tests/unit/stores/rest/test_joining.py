"""Stores joined from several, against a store whose segments are laid out and sorted again from the tokens of each."""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import BuildError
from draftstore.storage.manifest import load_manifest, manifest_digest, save_manifest
from draftstore.storage.report import ignore
from draftstore.storage.staging import hash_files
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.joining import join_rest
from draftstore.stores.rest.segments import Piece, lay_out, read_segments, sort_segments
from draftstore.stores.rest.store import read_digests
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.text.tokenizing import made_with
from draftstore.text.tokens import sentinel
from tests.conftest import wordy_tokenizer_folder, write_texts
from tests.fakes import killed
from tests.unit.storage.test_access import modes
from tests.unit.stores.rest.test_build import contents, names, require_whole
from tests.unit.text.test_tokenizer import edit

pytestmark = pytest.mark.usefixtures("no_fsync")


def store_of(tokenizer: TextTokenizer, folder: Path, documents: int, seed: int, segment_tokens: int) -> Path:
    corpus = write_texts(folder / f"{seed}.jsonl", documents, seed)
    options = RestOptions(corpus=(corpus,), name=str(seed), segment_tokens=segment_tokens)
    return build_rest(options, tokenizer, folder / f"store-{seed}", workers=1).path


@pytest.fixture
def pair(small_tokenizer: TextTokenizer, tmp_path: Path) -> list[Path]:
    """Return two stores, of several segments and of one."""
    return [store_of(small_tokenizer, tmp_path, 40, seed, size) for seed, size in ((1, 500), (2, 1 << 20))]


def sorted_again(stores: Sequence[Path], out: Path) -> Path:
    """Write a store of the documents of several, each of their segments sorted again."""
    segments = []
    for store in stores:
        tokens, digests = np.fromfile(store / "tokens.bin", "<u2"), read_digests(store)
        for start, length, _ in read_segments(store).tolist():
            segment = tokens[start : start + length]
            own, digests = np.split(digests, [int((segment == sentinel(tokens.dtype)).sum())])
            segments.append([Piece(segment, own)])
    manifest = load_manifest(stores[0])
    lay_out(out, segments, manifest.vocab_size, 0)
    sort_segments(out, range(len(segments)), manifest.vocab_size, 1, ignore)
    shutil.copytree(stores[0] / "tokenizer", out / "tokenizer")
    return out


def sealed(store: Path, *sources: Path) -> Path:
    """Give a store the manifest that a build of it would write."""
    manifests = [load_manifest(source) for source in sources]
    counts = {key: sum(manifest.counts[key] for manifest in manifests) for key in manifests[0].counts}
    save_manifest(store, dataclasses.replace(manifests[0], counts=counts, files=hash_files(store)))
    return store


@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.integers(0, 3), st.integers(2, 200)),
        min_size=1,
        max_size=4,
        unique_by=lambda each: each[1],
    )
)
def test_the_arrays_are_those_of_all_segments_in_order(
    small_tokenizer: TextTokenizer,
    tmp_path_factory: pytest.TempPathFactory,
    wanted: list[tuple[int, int, int]],
) -> None:
    folder = tmp_path_factory.mktemp("join")
    stores = [store_of(small_tokenizer, folder, *each) for each in wanted]
    joined = join_rest(stores, folder / "joined").path
    require_whole(joined)
    assert contents(joined) == contents(sorted_again(stores, folder / "again"))


def test_the_manifest(pair: list[Path], small_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    result = join_rest(pair, tmp_path / "out" / "joined")
    sources, manifest = [load_manifest(store) for store in pair], result.manifest
    assert manifest == load_manifest(result.path)
    assert (manifest.kind, manifest.name, result.report.documents) == ("rest", "joined", 80)
    for field in ("vocab_size", "token_dtype", "tokenizer"):
        assert getattr(manifest, field) == getattr(sources[0], field)
    for key, value in manifest.counts.items():
        assert value == sources[0].counts[key] + sources[1].counts[key]
    plan = manifest.parameters["plan"]
    assert made_with(small_tokenizer).items() <= plan.items()
    assert plan["joined"] == [manifest_digest(store) for store in pair]
    assert manifest.corpus["sources"] == [str(tmp_path / f"{seed}.jsonl") for seed in (1, 2)]
    assert manifest.corpus["characters"] == sum(each.corpus["characters"] for each in sources)
    turned = join_rest(pair[::-1], tmp_path / "turned").manifest
    fingerprints = {each.corpus["fingerprint"] for each in (*sources, manifest, turned)}
    assert len(fingerprints) == 4  # of different documents or orders of them
    assert join_rest(pair, result.path).reused
    with pytest.raises(BuildError, match="exists and is another build"):
        join_rest(pair[::-1], result.path)
    assert names(tmp_path / "out") == ["joined"]


def test_it_is_as_private_as_its_most_private_source(pair: list[Path], tmp_path: Path) -> None:
    (pair[1] / "manifest.json").chmod(0o600)
    assert modes(join_rest(pair, tmp_path / "joined").path) == {0o700, 0o600}


def other_vocabulary(_tokenizer: TextTokenizer, folder: Path) -> TextTokenizer:
    folder.mkdir()
    return load_tokenizer(wordy_tokenizer_folder(folder))


def other_template(tokenizer: TextTokenizer, folder: Path) -> TextTokenizer:
    return load_tokenizer(edit(tokenizer, folder, {}, "{{ messages[0].content }}"))


@pytest.mark.parametrize(("change", "key"), [(other_vocabulary, "tokenizer"), (other_template, "template")])
def test_stores_that_do_not_match_are_refused(
    pair: list[Path], tmp_path: Path, small_tokenizer: TextTokenizer, change: Callable[..., Any], key: str
) -> None:
    (tmp_path / "words.jsonl").write_text('{"text": "one two one two"}\n')
    options = RestOptions(corpus=(tmp_path / "words.jsonl",), name="other")
    other = build_rest(options, change(small_tokenizer, tmp_path / "other"), tmp_path / "third").path
    before = names(tmp_path)
    with pytest.raises(BuildError) as refused:
        join_rest([*pair, other], tmp_path / "joined")
    assert refused.value.args == (
        f"{pair[0]} and {other} were built with different values of {key}: build both with the same", "rest",
    )  # fmt: skip
    assert names(tmp_path) == before


def test_one_store_twice_is_refused_even_if_one_is_a_copy(pair: list[Path], tmp_path: Path) -> None:
    copy = shutil.copytree(pair[0], tmp_path / "copy")
    for same in (pair[0], copy):
        with pytest.raises(BuildError, match=f"{pair[0]} and {same} are the same store: name it once"):
            join_rest([*pair, same], tmp_path / "joined")


def test_a_full_disk_is_noticed_before_the_copy(
    pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(
        free=sum(load_manifest(store).index_size for store in pair) - 1
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    before = names(tmp_path)
    with pytest.raises(BuildError, match="make room and run the command again"):
        join_rest(pair, tmp_path / "joined")
    assert names(tmp_path) == before


def test_a_killed_build_ends_with_the_same_bytes(pair: list[Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "joined"
    reached = (out.parent / ".joined.partial" / "store" / "keys.bin").exists
    killed.kill_when(killed.joined_store, (pair, out), reached)
    killed.run(killed.joined_store, (pair, out))
    assert contents(out) == contents(join_rest(pair, tmp_path / "whole").path)
    assert names(out.parent) == ["joined"]
