"""The memory of a live store: the latest documents, indexed on arrival, and drafts from them.

    memory = Memory(vocab_size, tokens=1_000_000)
    memory.append(ids)                                  # drafts from now on
    drafts = MemoryDrafter(memory).draft(contexts)

`recall` returns the latest answers to one prompt, for `draftstore.live.recall`.

The index is that of `draftstore.drafting.history`: a ring buffer, so that an append takes constant time per token and
evicts the oldest tokens. A lock serialises drafts, a few contexts at a time, and appends, a thousand tokens at a time,
so that no draft reads tokens that are being written.
"""

import threading

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.contexts import ContextDrafter
from draftstore.drafting.drafter import check_budget, check_ids, check_request
from draftstore.drafting.history import SIZE, History, HistoryRule, append_tokens, draft_texts
from draftstore.jit import as_input, read_only
from draftstore.live.directory import Directory
from draftstore.trees.batch import DraftBatch
from draftstore.trees.frontier import BUDGET

TOKENS = 1_000_000
"""Default maximum of tokens."""
CONTEXT_SIZE = 32
"""Last tokens of a context that are compared."""
STEP = 1024
"""Tokens that are indexed at a time, which bounds the wait of a draft."""
CONTEXTS = 16
"""Contexts that are drafted for at a time, which bounds the wait of an append."""
END = np.array([-1], np.int32)
"""Separates documents."""
RULES = {
    "sole": HistoryRule(max_match=CONTEXT_SIZE, alpha=4.0, beta=3.0),
    "supplement": HistoryRule(max_match=CONTEXT_SIZE, alpha=64.0, beta=4.0, rows=16, floor=0.02),
}
"""Drafting rules, tuned on recorded outputs of agents: beside a store, short matches are left to the store."""
LEAST = {"sole": 0.0, "supplement": 0.02}
"""Minimum probability of a node: beside a store, less likely ones cost time and are hardly ever verified."""
DEFAULT = "supplement"


class Memory:
    """The latest documents of one vocabulary, up to a number of tokens; thread-safe."""

    def __init__(self, vocab_size: int, tokens: int = TOKENS) -> None:
        """Allocate room for `tokens` ids in [0, vocab_size), including separators: 36 to 52 bytes each."""
        self.vocab_size = vocab_size
        self._history = History.new(tokens)
        self._table = np.array([self._history.row()])
        self._lock = threading.Lock()
        self._directory = Directory()
        self.size = 0

    def __len__(self) -> int:
        """Return the number of tokens in memory."""
        return min(self.size, len(self._history.tokens))

    def append(self, ids: ArrayLike, prompt: int = 0, version: int = 0) -> None:
        """Append a document, int32 [any]; TokenRangeError if an id is outside the vocabulary.

        Args:
            prompt: hash of its prompt, by which `recall` finds it; 0: unknown.
            version: version of the model.
        """
        document = np.concatenate([check_ids(ids, self.vocab_size).astype(np.int32), END])
        begin = self.size
        for start in range(0, len(document), STEP):
            part = as_input(document[start : start + STEP], np.int32)
            with self._lock:
                self.size = append_tokens(*self._history, self.size, part)
                self._directory.evict(self.size - len(self._history.tokens))
        with self._lock:  # unless another thread has appended, or it is longer than the memory
            if self.size == begin + len(document) and len(document) <= len(self._history.tokens):
                self._directory.add(prompt, version, begin, self.size - 1)

    def recall(self, prompt: int, count: int) -> list[NDArray[np.int32]]:
        """Return the latest answers to a prompt that are in memory, newest version last, int32 [any] each."""
        with self._lock:
            found = self._directory.find(prompt, count)
            return [self._history.tokens.take(np.arange(*place), mode="wrap") for place in found]

    def changed(self, since: int) -> tuple[int, set[int] | None]:
        """Return a number of changes, and the prompts with new answers since such a number; None: any may have some."""
        if since == self._directory.changes.number:
            return since, set()
        with self._lock:
            return self._directory.changes.since(since)

    def newer(self, version: int) -> "Memory":
        """Return a memory without the documents of versions before one; meanwhile, nothing may be appended."""
        kept = Memory(self.vocab_size, len(self._history.tokens))
        for prompt, place in self._directory.places:
            if place.version >= version:
                ids = self._history.tokens.take(np.arange(place.start, place.stop), mode="wrap")
                kept.append(ids, prompt, place.version)
        return kept

    def draft(
        self, rule: NDArray[np.float64], contexts: NDArray[np.int32], budget: int, level: int
    ) -> DraftBatch:
        """Draft for contexts, int32 [batch, any], by a packed rule."""
        parts = []
        for start in range(0, max(1, len(contexts)), CONTEXTS):
            part = contexts[start : start + CONTEXTS]
            with self._lock:
                self._table[0, SIZE] = self.size
                drawn = draft_texts(self._table, np.zeros(len(part), np.int64), part, rule, budget, level)
            parts.append(DraftBatch(*drawn))
        return DraftBatch.joined(parts)


class MemoryDrafter(ContextDrafter):
    """Drafts from the documents of `memory`, which may be replaced between two drafts by another of its vocabulary."""

    context_size = CONTEXT_SIZE

    def __init__(self, memory: Memory, strategy: str = DEFAULT) -> None:
        self.memory = memory
        self.vocab_size = memory.vocab_size
        self._rule = read_only(np.array(RULES[strategy], np.float64))
        self._level = check_budget(1, LEAST[strategy])

    def draft_batch(
        self,
        contexts: NDArray[np.int32],
        budget: int = BUDGET,
        min_prob: float = 0.0,
        hidden: NDArray[np.float16] | None = None,  # noqa: ARG002
    ) -> DraftBatch:
        """Draft for a batch of contexts into arrays; see `ContextDrafter.draft`."""
        contexts, level = check_request(contexts, budget, min_prob)
        if budget == 0 or level < 0:
            return DraftBatch.empty(len(contexts))
        level = min(level, self._level)
        return self.memory.draft(self._rule, contexts, budget, level)

    def warm_up(self) -> None:
        """Compile or load everything needed for the first draft, and the first append."""
        warm_up()


def warm_up() -> None:
    """Compile the kernels, or load them from numba's cache, before the first append."""
    memory = Memory(2, 16)
    memory.append([0, 0])
    MemoryDrafter(memory).draft(np.zeros((1, 1), np.int32), 1)
