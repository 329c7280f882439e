"""Texts of several sizes that differ in nothing else, for benchmarks.growth: nested samples of documents.

A document falls into a part by the hash of its text, so that every sample has its share of every file and package. A
sample is the first parts together: the next one holds all of it, and more.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.common import CODE, Workspace, download_wheels, python_files
from benchmarks.measure import progress
from draftstore.storage.report import ReadReport
from draftstore.text.corpus import read_corpus
from draftstore.text.records import Document

SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Of all documents: half a power of ten from one sample to the next."""
CHAT_FILES = (
    "chat_atlas", "chat_instruct_mix", "chat_sharegpt", "code_instruct", "llm_arena_hard", "llm_flask",
    "llm_oasst_reports", "llm_reasoning", "llm_wildbench",
)  # fmt: skip
"""All corpora. Those named llm_* hold up to 26 models' answers to the same prompts."""
LARGE_LIST = "code_packages_large.txt"
MORE_LIST = ("oci==2.189.0",)
"""Python code beside the large list, so that all texts together have more than 300 M tokens: generated, all alike."""


class Sample(NamedTuple):
    """Texts of a store.

    Attributes:
        name: of the store.
        kind: of the texts: `chat`, `code`, or `all`.
        files: JSON Lines with the documents.
        nested: whether it is one of the samples that differ in size alone.
    """

    name: str
    kind: str
    files: tuple[Path, ...]
    nested: bool = True


def texts_of(workspace: Workspace, kind: str, shares: Sequence[float] = SHARES) -> list[Sample]:
    """Return the texts of a kind; their files are made once.

    The nested samples, the smallest first; of code also the small list of packages; of kind `all` everything there is.
    """
    if kind == "all":
        chat, code = (_parts(workspace, each, shares) for each in ("chat", "code"))
        return [Sample("all", kind, (*chat, *code, *_parts(workspace, "more", (1.0,))), nested=False)]
    files = _parts(workspace, kind, shares)
    nested = [Sample(f"{kind}_{share:g}", kind, tuple(files[: i + 1])) for i, share in enumerate(shares)]
    small = [Sample(CODE.name, kind, workspace.inputs(CODE), nested=False)] if kind == "code" else []
    return nested + small


def part_of(text: str, shares: Sequence[float]) -> int:
    """Return the first sample that holds a document; that after the last one if none does."""
    place = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8]) / 2**64
    return int(np.searchsorted(shares, place, side="right"))


def _parts(workspace: Workspace, kind: str, shares: Sequence[float]) -> list[Path]:
    """Return the files of the parts of some texts: written at once, each there when it is whole."""
    files = [workspace.work / "corpora" / f"growth-{kind}-{share:g}.jsonl" for share in shares]
    if all(file.exists() for file in files):
        return files
    progress(f"texts of kind {kind}")
    unfinished = [file.with_suffix(".partial") for file in files]
    with ExitStack() as stack:
        written = [stack.enter_context(path.open("w", encoding="utf-8")) for path in unfinished]
        for document in READERS[kind](workspace):
            part = part_of(document.text, shares)
            if part < len(written):
                written[part].write(json.dumps({"id": document.id, "text": document.text}) + "\n")
    for before, after in zip(unfinished, files, strict=True):
        before.rename(after)
    return files


def _chat(workspace: Workspace) -> Iterator[Document]:
    render = partial(workspace.tokenizer.render_chat, add_generation_prompt=False)
    files = [workspace.data / "corpora" / f"{name}.jsonl.zst" for name in CHAT_FILES]
    return read_corpus(files, render=render, report=ReadReport())


def _code(workspace: Workspace) -> Iterator[Document]:
    lines = (workspace.data / LARGE_LIST).read_text(encoding="utf-8").splitlines()
    return _code_of(lines, workspace.work / "wheels-large")


def _more(workspace: Workspace) -> Iterator[Document]:
    return _code_of(MORE_LIST, workspace.work / "wheels-more")


def _code_of(lines: Sequence[str], folder: Path) -> Iterator[Document]:
    return python_files(sorted(download_wheels(lines, folder).glob("*.whl")))


READERS: dict[str, Callable[[Workspace], Iterator[Document]]] = {"chat": _chat, "code": _code, "more": _more}
