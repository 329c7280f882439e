"""Other libraries that find stored continuations of a context, each behind the same small interface.

None is a dependency; the benchmark installs nothing and says what is absent. To have all three:

    pip install --no-deps tokengrams==0.3.3
    pip install infini-gram==2.6.0
    echo torch==2.13.0 > constraint.txt
    PIP_CONSTRAINT=constraint.txt pip install --no-deps arctic-inference==0.3.0

arctic-inference compiles its suffix tree when it is installed, and asks for torch in its build environment
only to read `torch.utils.cmake_prefix_path`; the constraint names a version that is published. Without torch:
install nanobind==2.9.2, setuptools, wheel and ninja, put a stand-in module `torch` on PYTHONPATH that has
what setup.py reads (a class `utils` with `cmake_prefix_path = ""`, a class `cuda` with a static
`is_available` that returns False), and add --no-build-isolation. Neither torch nor vLLM is needed to run it.

All get the documents as token ids, one core, and the same contexts. They return what they are made for:
arctic-inference a chain or a tree; tokengrams and infini-gram count what follows an n-gram, so a draft is a
chain of the most frequent next tokens, asked one by one. No draft crosses a document: where a library knows
no documents, a separator stands between them.
"""

import argparse
import contextlib
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import ContextSession
from draftstore.stores.rest.store import BUDGET, CONTINUATION, MAX_MATCH
from draftstore.trees.batch import Draft
from draftstore.trees.tree import DraftTree

Chain = tuple[list[int], list[int]]
"""Tokens and the parent of each; -1 is the context."""


class Documents(NamedTuple):
    """A corpus as token ids below `vocab_size`: document i is `tokens[offsets[i]:offsets[i + 1]]`."""

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    vocab_size: int


class Peer(Protocol):
    """A library that drafts from stored tokens.

    Attributes:
        package: its name on PyPI.
        install: how to get it.
        modes: ways to ask it, with the largest budget that each makes use of.
        context_size: tokens of context that it is given.
    """

    package: str
    install: str
    modes: dict[str, int]
    context_size: int

    def build(self, documents: Documents, folder: Path) -> None:
        """Index documents; `folder` takes files.

        Raises:
            ImportError: not installed.
        """

    def draft(self, context: NDArray[np.int32], budget: int, mode: str) -> Chain:
        """Return a draft of at most `budget` tokens."""


class Arctic:
    """Suffix decoding of arctic-inference: a suffix tree of finished responses, here the documents."""

    package = "arctic-inference"
    install = "pip install --no-deps arctic-inference==0.3.0, with torch==2.13.0 as build constraint"
    context_size = MAX_MATCH + 1  # it leaves the oldest token out of the match
    modes = {"chain, defaults": 16, "tree, defaults": 16, "tree, no limits": 64}  # noqa: RUF012 (read only)
    _options: dict[str, dict[str, Any]] = {  # noqa: RUF012 (read only)
        "chain, defaults": {},
        "tree, defaults": {"use_tree_spec": True},
        "tree, no limits": {"use_tree_spec": True, "max_spec_factor": 64.0, "min_token_prob": 0.0},
    }

    def build(self, documents: Documents, folder: Path) -> None:  # noqa: ARG002
        """Index documents; see `Peer`. The request that asks has no prompt: only the documents can answer."""
        self.cache = importlib.import_module("arctic_inference.suffix_decoding").SuffixDecodingCache()
        for i, (start, end) in enumerate(pairwise(documents.offsets.tolist())):
            self.cache.start_request(i, [])
            self.cache.add_active_response(i, documents.tokens[start:end])
            self.cache.stop_request(i)
        self.cache.start_request("query", [])

    def draft(self, context: NDArray[np.int32], budget: int, mode: str) -> Chain:
        """Return a draft; see `Peer`."""
        draft = self.cache.speculate("query", context, max_spec_tokens=budget, **self._options[mode])
        return draft.token_ids, draft.parents


class Tokengrams:
    """The in-memory index of tokengrams: a suffix array over tokens, 64-bit.

    It does not hand out its tokens: a second copy of them is part of the memory.
    """

    package = "tokengrams"
    install = "pip install --no-deps tokengrams==0.3.3"
    context_size = MAX_MATCH
    modes = {"greedy chain": CONTINUATION, "one occurrence": CONTINUATION}  # noqa: RUF012 (read only)

    def build(self, documents: Documents, folder: Path) -> None:
        """Index documents; see `Peer`. A separator, one past the vocabulary, stands after each."""
        library = _compiled_module("tokengrams")
        self._separator = documents.vocab_size
        symbols = self._separator + 1
        dtype = np.uint16 if symbols <= 65_536 else np.uint32  # the width that the library takes for so many
        self._tokens = np.insert(documents.tokens.astype(dtype), documents.offsets[1:], self._separator)
        path = folder / "tokengrams.bin"
        self._tokens.tofile(path)
        self._index = library.InMemoryIndex.from_token_file(str(path), None, symbols, False)

    def draft(self, context: NDArray[np.int32], budget: int, mode: str) -> Chain:
        """Return a draft; see `Peer`."""
        return (
            self._one_occurrence(context, budget)
            if mode == "one occurrence"
            else self._greedy(context, budget)
        )

    def _longest(self, text: list[int], most: int) -> list[int]:
        """Return the longest suffix that occurs: where one does, all shorter ones do."""
        low, high = 0, min(most, len(text))
        while low < high:
            middle = (low + high + 1) // 2
            if self._index.contains(text[-middle:]):
                low = middle
            else:
                high = middle - 1
        return text[len(text) - low :]

    def _greedy(self, context: NDArray[np.int32], budget: int) -> Chain:
        """Append the most frequent next token, again and again."""
        text = context.tolist()
        size, known = len(text), MAX_MATCH
        while len(text) < size + budget:
            suffix = self._longest(text, known)
            counts = self._index.count_next(suffix) if suffix else [0]
            counts[self._separator :] = [0]
            if max(counts) == 0:
                break
            text.append(counts.index(max(counts)))
            known = min(len(suffix) + 1, MAX_MATCH)
        return _chain(text[size:])

    def _one_occurrence(self, context: NDArray[np.int32], budget: int) -> Chain:
        """Take what follows the first occurrence of the longest match."""
        suffix = self._longest(context.tolist(), MAX_MATCH)
        if not suffix:
            return [], []
        start = self._index.positions(suffix)[0] + len(suffix)
        found = self._tokens[start : start + budget].tolist()
        return _chain(found[: found.index(self._separator)] if self._separator in found else found)


class InfiniGram:
    """The engine of infini-gram: a byte suffix array on disk, here loaded into memory."""

    package = "infini-gram"
    install = "pip install infini-gram==2.6.0"
    context_size = MAX_MATCH
    modes = {"greedy chain": CONTINUATION}  # noqa: RUF012 (read only)
    _memory_gib = 4

    def build(self, documents: Documents, folder: Path) -> None:
        """Index documents; see `Peer`. Each is preceded by the largest id, as the library does it.

        Raises:
            ImportError: not installed.
            ValueError: a vocabulary above 65,535; the library then sorts with 32 GiB of buckets.
        """
        indexing = importlib.import_module("infini_gram.indexing")
        engine = importlib.import_module("infini_gram.engine")
        vocab_size = documents.vocab_size
        if vocab_size > 65_535:
            raise ValueError("infini-gram is driven with ids of 16 bits here")
        self._vocab_size = vocab_size
        starts = documents.offsets[:-1]
        np.insert(documents.tokens.astype(np.uint16), starts, 0xFFFF).tofile(folder / "tokenized.0")
        ((starts + np.arange(len(starts))) * 2).astype(np.uint64).tofile(folder / "offset.0")
        options = argparse.Namespace(
            save_dir=str(folder), temp_dir=str(folder), worker_id=0, workers=1, shards=1, cpus=1,
            token_width=2, mem=self._memory_gib,
        )  # fmt: skip
        with _elsewhere():
            indexing.build_sa(options)
        self._engine = engine.InfiniGramEngine(
            index_dir=str(folder), eos_token_id=vocab_size, vocab_size=vocab_size + 1, version=4,
            token_dtype="u16", load_to_ram=True,
            ds_prefetch_depth=0, sa_prefetch_depth=0, od_prefetch_depth=0,
        )  # fmt: skip

    def draft(self, context: NDArray[np.int32], budget: int, mode: str) -> Chain:  # noqa: ARG002
        """Append the most frequent next token after the longest match, again and again; see `Peer`."""
        text = context.tolist()
        size = len(text)
        while len(text) < size + budget:
            found = self._engine.infgram_ntd(prompt_ids=text[-MAX_MATCH:])["result_by_token_id"]
            counts = {token: entry["cont_cnt"] for token, entry in found.items() if token < self._vocab_size}
            if not counts:
                break
            text.append(max(counts, key=counts.__getitem__))
        return _chain(text[size:])


PEERS: tuple[Callable[[], Peer], ...] = (Arctic, Tokengrams, InfiniGram)


class PeerDrafter:
    """A peer in one mode, as a drafter that can be replayed."""

    def __init__(self, peer: Peer, mode: str, vocab_size: int) -> None:
        """Wrap a peer that has been built."""
        self.vocab_size = vocab_size
        self.context_size = peer.context_size
        self._peer = peer
        self._mode = mode

    def draft(
        self, contexts: NDArray[np.int32], budget: int = BUDGET, min_prob: float = 0.0, queries: object = None  # noqa: ARG002
    ) -> list[Draft]:  # fmt: skip
        """Draft for a batch of contexts; see `ContextDrafter.draft`. The nodes have no probabilities."""
        return [
            self._draft(context[context >= 0], min(budget, self._peer.modes[self._mode]))
            for context in contexts
        ]

    def _draft(self, context: NDArray[np.int32], budget: int) -> Draft:
        """Ask the peer and pack its answer."""
        return Draft(as_tree(self._peer.draft(context, budget, self._mode)), 0, 0)

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> ContextSession:
        """Start the drafts of one text: its last tokens are all that the peer is told."""
        return ContextSession(self, prompt_ids)


def as_tree(chain: Chain) -> DraftTree:
    """Pack a draft; its nodes have no probabilities."""
    tokens, parents = chain
    levels = np.zeros(len(tokens), np.uint8)
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int16), levels)


def _chain(tokens: list[int]) -> Chain:
    """Return a chain: each token is the child of the one before."""
    return tokens, list(range(-1, len(tokens) - 1))


def _compiled_module(package: str) -> ModuleType:
    """Load a package's compiled module alone: the package itself may import what only its extras need.

    Raises:
        ImportError: not installed.
    """
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or [] for file in Path(folder).glob(f"{package}*.so")]
    inner = importlib.util.spec_from_file_location(f"{package}.{package}", files[0]) if files else None
    if inner is None or inner.loader is None:
        raise ImportError(f"no compiled module in {package}")
    module = importlib.util.module_from_spec(inner)
    inner.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """Undo a change of folder, and keep what is printed to stdout and stderr away from the results."""
    here = Path.cwd()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        os.chdir(here)
        sys.stdout.flush()
