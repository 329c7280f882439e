"""Groups of files tokenized apart, against the same groups tokenized in one stream."""

import os
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import BuildError
from draftstore.storage.report import ReadReport
from draftstore.stores.rest import segments
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text import corpus, sharding
from draftstore.text.corpus import find_files, group_files
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokenizing import build_tokens
from draftstore.text.tokens import open_shards
from tests.conftest import write_texts
from tests.unit.stores.rest.test_build import contents

pytestmark = pytest.mark.usefixtures("no_fsync")


class Nodes:
    """A stand-in for a cluster, which runs parts in any order, some of them twice, from pickled functions."""

    def __init__(self, address: str, folder: Path) -> None:
        assert folder.is_dir()
        self.random = random.Random(address)

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def check(self, problem: Callable[..., str], *args: object) -> None:
        assert problem(*args) == ""

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        for item in self.random.sample([*items], len(items)):
            if self.random.random() < 0.3:
                pickle.loads(pickle.dumps(function))(item)
            yield pickle.loads(pickle.dumps(function))(item)


class Doubling(Nodes):
    """Nodes that run every part twice at the same time."""

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        with ThreadPoolExecutor(4) as pool:
            for item in items:
                first, second = pool.submit(function, item), pool.submit(function, item)
                assert first.result() == second.result()
                yield first.result()


class Stopping(Nodes):
    """Nodes of a build that ends after two parts."""

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        for number, result in enumerate(super().map(function, items)):
            if number == 2:
                raise BuildError("the power is out")
            yield result


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(corpus, "GROUP_BYTES", 1)
    monkeypatch.setattr(segments, "SMALL_TOKENS", 0)
    monkeypatch.setattr(sharding, "Cluster", Nodes)
    monkeypatch.setattr(segments, "Cluster", Nodes)
    yield monkeypatch
    sharding._tokenizer_in.cache_clear()


def texts_in(folder: Path) -> RestOptions:
    """Write files of texts, among them one that is empty and one with bad records."""
    folder.mkdir()
    for number in range(5):
        write_texts(folder / f"{number}.jsonl", 20, seed=number)
    (folder / "2.jsonl").write_text('{"text": ""}\n')
    with (folder / "3.jsonl").open("a") as file:
        file.write('{"no text": 1}\n')
    return RestOptions(corpus=(folder,), glob=("*.jsonl",), name="small", segment_tokens=300)


@pytest.mark.parametrize("seed", range(3))
def test_a_cluster_builds_the_same_bytes(
    small_tokenizer: TextTokenizer, tmp_path: Path, nodes: pytest.MonkeyPatch, seed: int
) -> None:
    options = texts_in(tmp_path / "texts")
    here = build_rest(options, small_tokenizer, tmp_path / "here", workers=1)
    apart = build_rest(options, small_tokenizer, tmp_path / "apart", cluster=f"seed:{seed}")
    assert contents(apart.path) == contents(here.path)
    assert apart.report == here.report
    assert (here.report.bad_records, here.report.unread) == (1, [str(tmp_path / "texts" / "2.jsonl")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["apart", "here", "texts"]


@pytest.mark.parametrize("place", [sharding, segments])
def test_an_interrupted_build_resumes_from_its_parts(
    small_tokenizer: TextTokenizer, tmp_path: Path, nodes: pytest.MonkeyPatch, place: Any
) -> None:
    options = texts_in(tmp_path / "texts")
    here = build_rest(options, small_tokenizer, tmp_path / "here", workers=1)
    with nodes.context() as patch:
        patch.setattr(place, "Cluster", Stopping)
        with pytest.raises(BuildError, match="power"):
            build_rest(options, small_tokenizer, tmp_path / "apart", cluster="seed:1")
    pattern = "tokens/parts-*/0*" if place is sharding else "parts/sorted-*"
    before = {path: path.stat().st_ino for path in (tmp_path / ".apart.partial").glob(pattern)}
    assert len(before) >= 2
    with nodes.context() as patch:

        class Watching(Nodes):
            def __exit__(self, *_: object) -> None:
                found = {path: path.stat().st_ino for path in before if path.exists()}
                if found:
                    assert found == before, "finished parts were made again"

        patch.setattr(place, "Cluster", Watching)
        apart = build_rest(options, small_tokenizer, tmp_path / "apart", cluster="seed:1")
    assert contents(apart.path) == contents(here.path)


def test_a_build_that_began_here_can_end_on_a_cluster_and_the_reverse(
    small_tokenizer: TextTokenizer, tmp_path: Path, nodes: pytest.MonkeyPatch
) -> None:
    options = texts_in(tmp_path / "texts")
    here = build_rest(options, small_tokenizer, tmp_path / "here", workers=1)
    for first, second in ((None, "seed:1"), ("seed:1", None)):
        out = tmp_path / f"{first}-{second}"
        with nodes.context() as patch:
            patch.setattr(sharding, "Cluster", Stopping)
            patch.setattr(segments, "Cluster", Stopping)
            patch.setattr(sharding, "finish_shards", lambda *_: 1 / 0)
            with pytest.raises((BuildError, ZeroDivisionError)):
                build_rest(options, small_tokenizer, out, workers=1, cluster=first)
        assert contents(
            build_rest(options, small_tokenizer, out, workers=1, cluster=second).path
        ) == contents(here.path)


def test_parts_may_run_twice_at_the_same_time(
    small_tokenizer: TextTokenizer, tmp_path: Path, nodes: pytest.MonkeyPatch
) -> None:
    options = texts_in(tmp_path / "texts")
    here = build_rest(options, small_tokenizer, tmp_path / "here", workers=1)
    for module in (sharding, segments):
        nodes.setattr(module, "Cluster", Doubling)
    for number in range(3):
        apart = build_rest(options, small_tokenizer, tmp_path / f"apart-{number}", cluster="seed:0")
        assert contents(apart.path) == contents(here.path)


def test_sorted_parts_of_another_order_are_not_used(
    small_tokenizer: TextTokenizer, tmp_path: Path, nodes: pytest.MonkeyPatch
) -> None:
    options = texts_in(tmp_path / "texts")
    texts = options.texts()
    turned = texts._replace(order="turned", groups=lambda report: [*texts.groups(report)][::-1])
    with nodes.context() as patch:
        patch.setattr(segments, "Cluster", Stopping)
        with pytest.raises(BuildError, match="power"):
            build_rest(options, small_tokenizer, tmp_path / "apart", cluster="seed:1", texts=texts)
    apart = build_rest(options, small_tokenizer, tmp_path / "apart", cluster="seed:1", texts=turned)
    here = build_rest(options, small_tokenizer, tmp_path / "here", workers=1, texts=turned)
    assert contents(apart.path) == contents(here.path)


def test_a_store_of_shards_that_began_on_a_cluster_ends_here(
    small_tokenizer: TextTokenizer, tmp_path: Path, nodes: pytest.MonkeyPatch
) -> None:
    texts, out = texts_in(tmp_path / "texts").texts(), tmp_path / "shards"
    with nodes.context() as patch:
        patch.setattr(sharding, "Cluster", Stopping)
        patch.setenv("DRAFTSTORE_CLUSTER", "seed:1")
        with pytest.raises(BuildError, match="power"):
            build_tokens(texts, "small", small_tokenizer, out)
    made = build_tokens(texts, "small", small_tokenizer, out)
    assert contents(out) == contents(build_tokens(texts, "small", small_tokenizer, tmp_path / "here").path)
    assert made.report.bad_records == 1


@pytest.mark.parametrize("last", ["_remove_parts", "join_shards"])
def test_a_build_killed_before_the_end_of_tokenizing_has_the_whole_report(
    small_tokenizer: TextTokenizer, tmp_path: Path, nodes: pytest.MonkeyPatch, last: str
) -> None:
    texts = texts_in(tmp_path / "texts").texts()
    nodes.setenv("DRAFTSTORE_CLUSTER", "seed:1")
    with nodes.context() as patch:
        patch.setattr(sharding, last, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build_tokens(texts, "small", small_tokenizer, tmp_path / "shards")
    again = build_tokens(texts, "small", small_tokenizer, tmp_path / "shards")
    assert (again.report.documents, again.report.bad_records) == (80, 1)


def test_bad_records_of_files_with_strange_names_are_reported(
    small_tokenizer: TextTokenizer, tmp_path: Path, nodes: pytest.MonkeyPatch
) -> None:
    options = texts_in(tmp_path / "texts")
    Path(os.fsdecode(bytes(tmp_path / "texts" / "x") + b"\xff.jsonl")).write_text(
        '{"text": "a b"}\n{"no text": 1}\n'
    )
    here = build_rest(options, small_tokenizer, tmp_path / "here", workers=1)
    apart = build_rest(options, small_tokenizer, tmp_path / "apart", cluster="seed:0")
    assert contents(apart.path) == contents(here.path)
    assert apart.report.bad_records == here.report.bad_records == 2


def test_a_node_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abc")
    assert sharding._other_files([(tmp_path / "a", 3)]) == ""
    assert f"it sees no {tmp_path / 'a'}" in sharding._other_files([(tmp_path / "a", 4)])
    assert f"it sees no {tmp_path / 'b'}" in sharding._other_files([(tmp_path / "b", 4)])


def test_a_single_group_stays_here(
    small_tokenizer: TextTokenizer, tmp_path: Path, nodes: pytest.MonkeyPatch
) -> None:
    nodes.setattr(sharding, "Cluster", None)
    options = texts_in(tmp_path / "texts").model_copy(update={"corpus": (tmp_path / "texts" / "0.jsonl",)})
    nodes.setattr(segments, "SMALL_TOKENS", 1 << 22)
    made = build_rest(options, small_tokenizer, tmp_path / "one", cluster="seed:0")
    assert made.report.documents == 20


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 60), st.integers(1, 9))
def test_groups_are_of_neighbours_and_neither_small_nor_many(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], least: int, most: int
) -> None:
    folder = tmp_path_factory.mktemp("files")
    for number, size in enumerate(sizes):
        (folder / f"{number:02d}.txt").write_bytes(b"x" * size)
    files = find_files([folder]) if sizes else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "GROUP_BYTES", least)
        patch.setattr(corpus, "GROUPS", most)
        groups = group_files(files)
    assert [file for group in groups for file in group] == files
    totals = [sum(file.path.stat().st_size for file in group) for group in groups]
    assert all(total >= max(least, sum(sizes) // most) for total in totals[:-1])
    assert len(groups) <= 2 * most + 1 or len(groups) <= sum(sizes) // least + 1


def test_a_shard_ends_with_its_group(
    small_tokenizer: TextTokenizer, tmp_path: Path, nodes: pytest.MonkeyPatch
) -> None:
    options = texts_in(tmp_path / "texts")
    report = ReadReport()
    shards = sharding.tokenize_groups(
        options.texts().groups(report), small_tokenizer, tmp_path / "shards",
        report=report, cluster=None, files=tuple, corpus_fingerprint="c",
    )  # fmt: skip
    assert [shard.documents for shard in shards.shards] == [20, 20, 20, 20]
    ids = [np.asarray(tokens) for tokens, _ in open_shards(tmp_path / "shards").arrays()]
    assert [len(each) for each in ids] == [shard.tokens for shard in shards.shards]
