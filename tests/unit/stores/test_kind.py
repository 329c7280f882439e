"""A new kind of store is its own module and one entry of the registry: everything else then works with it.

This module is such a kind: its stores hold one file, `successors.bin`: for each id the id that is drafted after it.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from draftstore.cli import cli
from draftstore.cli.inspect import info, verify
from draftstore.drafting.drafter import ContextSession
from draftstore.errors import StoreError
from draftstore.remote.wire import DraftRequest
from draftstore.storage.manifest import TOKENIZER_FOLDER, Manifest, load_manifest, save_manifest
from draftstore.storage.report import ReadReport
from draftstore.storage.staging import BuildResult, hash_files
from draftstore.stores.building import Materials, TextSources
from draftstore.stores.kind import Builder, Kind, Samples, sample_contexts
from draftstore.stores.registry import KINDS, kind_of, open_store, strategies_of, verify_store
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokenizing import CorpusOptions
from draftstore.text.tokens import token_dtype
from draftstore.trees.batch import Draft, DraftBatch
from services.lookup.releases.served import Served
from services.lookup.releases.warming import load_kernels
from services.lookup.targets import Target

NAME = "successors"
FILE = "successors.bin"


class SuccessorDrafter:
    """Drafts the one token that follows the last one."""

    context_size = 1
    hidden_size = 0

    def __init__(self, successors: NDArray[Any], limit: int | None) -> None:
        self.successors = successors
        self.limit = limit
        self.vocab_size = len(successors)

    def draft(
        self,
        contexts: NDArray[np.int32],
        budget: int = 64,
        min_prob: float = 0.0,
        hidden: NDArray[np.float16] | None = None,
    ) -> list[Draft]:
        return self.draft_batch(contexts, budget, min_prob).drafts()

    def draft_batch(
        self,
        contexts: NDArray[np.int32],
        budget: int = 64,
        min_prob: float = 0.0,
        hidden: NDArray[np.float16] | None = None,
    ) -> DraftBatch:
        last = contexts[:, -1]
        known = ((last >= 0) & (last < (self.limit or self.vocab_size))).astype(np.int32) * (budget > 0)
        tokens = self.successors[np.where(known, last, 0)].astype(np.int32)[:, None]
        parents, levels = np.full(tokens.shape, -1, np.int16), np.zeros(tokens.shape, np.uint8)
        return DraftBatch(tokens, parents, levels, known, known, known.astype(np.int64))

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> ContextSession:
        return ContextSession(self, prompt_ids)

    def warm_up(self) -> None:
        pass


class SuccessorStore:
    strategies: tuple[str, ...] = ("next", "small")
    default_strategy = "next"

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.successors = np.fromfile(path / FILE, token_dtype(manifest.vocab_size))

    def drafter(self, strategy: str = "next", **_changes: Any) -> SuccessorDrafter:
        return SuccessorDrafter(self.successors, 100 if strategy == "small" else None)

    def samples(self, number: int) -> Samples:
        rows = [np.array([token]) for token in range(min(number, len(self.successors)))]
        return Samples(sample_contexts(rows, self.manifest.vocab_size))

    def close(self) -> None:
        pass


class SuccessorOptions(CorpusOptions):
    step: int = Field(1, ge=1, le=9, description="Distance of the next id.", examples=[2])


def build(options: SuccessorOptions, made: Materials, out: Path, **_how: Any) -> BuildResult:
    """Build a store of successors.

    \b
    Example:
      draftstore build successors --corpus texts.jsonl --tokenizer ./llama2 --out stores/next
    """
    assert made.tokenizer is not None
    make_successors(out, made.tokenizer, step=options.step)
    return BuildResult(out, load_manifest(out), ReadReport(), reused=False)


BUILDER = Builder(SuccessorOptions, TextSources, build)


class SuccessorKind(Kind):
    title = "Successors"
    builder = __name__
    strategies = SuccessorStore.strategies
    loaded = 0

    def open_files(self, path: Path) -> SuccessorStore:
        return SuccessorStore(path, load_manifest(path, NAME))

    def verify_entries(self, path: Path, manifest: Manifest) -> list[str]:
        found = int(SuccessorStore(path, manifest).successors.sum())
        wrong = found != manifest.parameters["sum"]
        return [f"the successors of {path} add up to another sum"] if wrong else []

    def info(self, manifest: Manifest) -> Iterator[tuple[str, str]]:
        yield "sum of ids", f"{manifest.parameters['sum']:,}"

    def load_kernels(self) -> None:
        self.loaded += 1


STORE_KIND = SuccessorKind(NAME)


def make_successors(path: Path, tokenizer: TextTokenizer, *, step: int = 1, wrong_by: int = 0) -> Path:
    """Write a store in which every id is followed by a later one; its recorded sum may be wrong."""
    successors = np.roll(np.arange(tokenizer.vocab_size), -step).astype(token_dtype(tokenizer.vocab_size))
    (path / TOKENIZER_FOLDER).mkdir(parents=True)
    tokenizer.save(path / TOKENIZER_FOLDER)
    successors.tofile(path / FILE)
    manifest = Manifest(
        kind=NAME,
        name="next ids",
        created="2026-01-01T00:00:00+00:00",
        vocab_size=tokenizer.vocab_size,
        token_dtype=successors.dtype.name,
        tokenizer=tokenizer.identity,
        parameters={"sum": int(successors.sum()) + wrong_by},
        corpus={},
        counts={"documents": 0, "tokens": 0, "entries": len(successors)},
        files=hash_files(path),
    )
    save_manifest(path, manifest)
    return path


@pytest.fixture
def imaginary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the kind: the one entry that a new kind takes."""
    monkeypatch.setitem(KINDS, NAME, __name__)


@pytest.fixture
def successors(imaginary: None, small_tokenizer: TextTokenizer, tmp_path: Path) -> Path:
    return make_successors(tmp_path / "next", small_tokenizer)


def test_it_opens_and_drafts(successors: Path) -> None:
    with closing(open_store(str(successors))) as store:
        assert type(store) is SuccessorStore
        [known, unknown] = store.drafter().draft(np.array([[7], [-1]], np.int32))
        assert (known.tree.tokens.tolist(), len(unknown.tree)) == ([8], 0)
    with pytest.raises(StoreError, match="of kind 'successors', which has no backends: leave --backend out"):
        open_store(successors, "lmdb")
    assert strategies_of(["rest", "successors", "ngrams"]) == {"backoff", "longest", "next", "small"}


def test_its_options_appear_in_command_and_flow(
    imaginary: None, small_corpus: Path, small_tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    from prefect.utilities.callables import parameter_schema

    from pipelines.flows import store_flows

    small_tokenizer.save(tmp_path)
    arguments = [
        "build",
        "successors",
        "--corpus",
        small_corpus,
        "--tokenizer",
        tmp_path,
        "--out",
        tmp_path / "next",
    ]
    ran = CliRunner().invoke(cli, [*map(str, arguments), "--step", "2"], catch_exceptions=False)
    assert (ran.exit_code, ran.stdout) == (0, f"{tmp_path / 'next'}\n")
    with closing(open_store(tmp_path / "next")) as store:
        assert store.drafter().draft(np.array([[7]], np.int32))[0].tree.tokens.tolist() == [9]
    assert CliRunner().invoke(cli, [*map(str, arguments), "--step", "10"]).exit_code == 2
    flow = next(each for each in store_flows() if each.name == "build-successors")
    shown = parameter_schema(flow).properties
    expected = {
        "default": 1,
        "minimum": 1,
        "maximum": 9,
        "description": "Distance of the next id.",
        "examples": [2],
    }
    assert shown["step"].items() >= expected.items()
    assert shown.keys() >= {"name", "corpus", "tokenizer", "workers", "release", "force", "keep"}


def test_info_and_verify(successors: Path, small_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    shown = CliRunner().invoke(info, [str(successors)])
    total = sum(range(small_tokenizer.vocab_size))
    assert f"sum of ids  {total:,}" in " ".join(shown.output.split(" ")), shown.output
    whole = CliRunner().invoke(verify, [str(successors)])
    assert (whole.exit_code, "is intact" in whole.output) == (0, True)
    wrong = make_successors(tmp_path / "wrong", small_tokenizer, wrong_by=1)
    told = CliRunner().invoke(verify, [str(wrong), "--json"])
    assert told.exit_code == 1
    problem = f"the successors of {wrong} add up to another sum"
    assert json.loads(told.output)["problems"] == [problem] == verify_store(wrong, load_manifest(wrong))


def test_the_lookup_service_serves_it(successors: Path) -> None:
    target = Target("ids", successors, backend="postgres")  # which is for the kinds that have it
    with closing(Served(target)) as served:
        assert (served.kind, served.backend, served.strategies) == ("successors", "files", ("next", "small"))
        assert served.describe()["entries"] == load_manifest(successors).vocab_size
        [draft] = served.draft(
            DraftRequest("ids", "small", np.array([[41]], np.int32), 64, 0.0, None)
        ).drafts()
        assert draft.tree.tokens.tolist() == [42]


def test_its_kernels_are_loaded_with_the_others(imaginary: None) -> None:
    before = STORE_KIND.loaded
    load_kernels()
    assert STORE_KIND.loaded == before + 1


def test_every_kind_is_described_by_its_module() -> None:
    for name in KINDS:
        kind = kind_of(name)
        assert (kind.name, kind_of(name)) == (name, kind)
        assert kind.title
    counts = kind_of("ngrams")
    assert type(counts) is Kind
    assert (counts.name, counts.strategies, counts.needs_states) == ("ngrams", (), False)


def test_the_registry_imports_no_kind_before_it_is_asked_for() -> None:
    code = "import sys, draftstore.stores.registry as r; print(set(sys.modules) & set(r.KINDS.values()))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
