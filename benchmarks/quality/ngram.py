"""SGLang's NGRAM corpus (0.5.23), used as in its worker: an external corpus of stored texts, and the texts so far."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.search.suffix import SuffixIndex
from draftstore.text.tokens import sentinel

LAST = 18
"""Tokens of a text that SGLang's worker passes to its corpus."""
CHUNK = 65_536
PACKAGES = (
    "sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.speculative", "sglang.kernels", "sglang.kernels.ops",
    "sglang.kernels.ops.speculative",
)  # fmt: skip
"""Packages whose own code is skipped: it imports server dependencies that the corpus does not need."""

Arrays = tuple[NDArray[Any], NDArray[Any]]


def new_corpus(index: SuffixIndex, nodes: int) -> Any:
    """Return a corpus for drafts of so many nodes, half of which may come from the stored texts.

    Raises:
        ImportError: SGLang is not installed.
    """
    module = _load_alone("sglang.srt.speculative.cpp_ngram.ngram_corpus")
    separator = importlib.import_module("sglang.srt.speculative.cpp_ngram.external_corpus").SEPARATOR_TOKEN
    kept = np.asarray(index.tokens)
    corpus = module.NgramCorpus(
        max_trie_depth=LAST, max_bfs_breadth=10, draft_token_num=nodes + 1, external_sam_budget=nodes // 2,
        external_corpus_max_tokens=len(kept),
    )  # fmt: skip
    tokens = np.where(kept == sentinel(kept.dtype), separator, kept.astype(np.int64))
    chunks = (tokens[start : start + CHUNK].tolist() for start in range(0, len(tokens), CHUNK))
    corpus.commit_external_corpus_load("texts", corpus.load_external_corpus_named("texts", chunks))
    return corpus


def _load_alone(name: str) -> ModuleType:
    """Import a module of SGLang without running the code of its parent packages.

    Raises:
        ImportError: SGLang is not installed.
    """
    spec = (
        importlib.util.find_spec("sglang") if "sglang" not in sys.modules else sys.modules["sglang"].__spec__
    )
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("SGLang is not installed: pip install --no-deps sglang==0.5.23 apache-tvm-ffi")
    root = Path(spec.submodule_search_locations[0]).parent
    for package in PACKAGES:
        if package not in sys.modules:
            module = ModuleType(package)
            module.__path__ = [str(root / package.replace(".", "/"))]
            module.__spec__ = spec if package == "sglang" else None
            sys.modules[package] = module
    if "sglang.srt.utils.common" not in sys.modules:
        sys.modules["sglang.srt.utils.common"] = common = ModuleType("sglang.srt.utils.common")
        vars(common)["is_cuda"] = lambda: False  # all that compiling the corpus asks of it
    return importlib.import_module(name)


def ask_corpus(corpus: Any, requests: Sequence[Any]) -> Arrays:
    """Return tokens [requests * rows] and mask [requests * rows * rows] of a step; the corpus learns the texts.

    Args:
        corpus: the result of `new_corpus`.
        requests: objects with attributes of SGLang's requests: rid, origin_input_ids_unpadded, output_ids.
    """
    corpus.synchronize()
    tails = [
        [*request.origin_input_ids_unpadded[-LAST:], *request.output_ids[-LAST:]][-LAST:]
        for request in requests
    ]
    lengths = [len(request.origin_input_ids_unpadded) + len(request.output_ids) for request in requests]
    found: Arrays = corpus.batch_get([request.rid for request in requests], tails, lengths)
    corpus.batch_put(tails)
    return found


def parents_of(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the parent of each row, as SGLang finds it: int64 [requests, rows], -1 for the first.

    Raises:
        SystemExit: a row does not attend to exactly itself and the rows that its parent attends to.
    """
    rows = mask.shape[1]
    earlier = mask & np.tri(rows, k=-1, dtype=bool)
    above: NDArray[np.int64] = np.where(
        earlier.any(-1), rows - 1 - earlier[:, :, ::-1].argmax(-1), -1
    ).astype(np.int64)
    inherited = np.take_along_axis(mask, np.maximum(above, 0)[:, :, None], 1) & (above >= 0)[:, :, None]
    if not np.array_equal(mask, inherited | np.eye(rows, dtype=bool)) or (above[:, 1:] < 0).any():
        raise SystemExit("a mask is not that of a tree below the last token")
    return above
