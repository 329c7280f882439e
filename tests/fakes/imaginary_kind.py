"""A kind of store that draftstore does not have: all that it would add, in one module.

Its stores hold one file, `successors.bin`: for each id the id that is drafted after it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from draftstore.drafting.drafter import ContextSession
from draftstore.storage.manifest import TOKENIZER_FOLDER, FileEntry, Manifest, load_manifest, save_manifest
from draftstore.storage.report import ReadReport
from draftstore.storage.staging import BuildResult
from draftstore.stores.building import Materials, TextSources
from draftstore.stores.kind import Builder, Kind, Samples, sample_contexts
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokenizing import CorpusOptions
from draftstore.text.tokens import token_dtype
from draftstore.trees.batch import Draft, DraftBatch

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
    files = {
        file.relative_to(path).as_posix(): FileEntry.of(file) for file in path.rglob("*") if file.is_file()
    }
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
        files=files,
    )
    save_manifest(path, manifest)
    return path
