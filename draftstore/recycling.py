"""Token Recycling: drafts from the candidates that the model itself has computed, and that decoding throws away.

A matrix holds, for each token, the 8 most likely tokens that followed it when the model last saw it. A draft is a
static tree (`draftstore.rank_tree`) whose nodes are looked up in it, candidate by candidate: the child of rank r of a
node with token t is matrix[t, r]. After each pass the rows of all verified tokens are written anew, also
of rejected ones.

    drafter = RecyclingDrafter(model.config.vocab_size)      # or RecyclingStore.open(...).drafter()
    session = drafter.session(prompt_ids, candidates=top8)   # the matrix is shared: the next text starts hot

"Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling", ACL 2025,
https://arxiv.org/abs/2408.08696. Its matrix lies on the model's device; this one lies in the host's memory, where six
dependent lookups cost nothing and a draft needs no copy: the top 8 arrive with the tokens that are copied anyway.

Every row of the matrix holds different tokens, and -1 where there is none. So siblings differ, and nothing is invented.
"""

from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafter import check_budget, check_ids
from draftstore.errors import DraftstoreError
from draftstore.frontier import (
    depth_of,
    enter,
    may_have_children,
    new_frontier,
    parent_of,
    token_of,
    unpack_nodes,
)
from draftstore.jit import kernel, leaf_kernel, read_only
from draftstore.rank_tree import WIDTH, RankTree, path_probs
from draftstore.tree import DraftTree

WINDOW = 4096
"""Counts are halved when a path has been tried twice as often, so that they follow the last texts."""


class RecyclingDrafter:
    """The matrix and the counts of one model, which all its sessions share and feed.

    Threads may share it: one draft or one update is made at a time. Drafts are the same from run to run only where
    one thread decodes.

    Attributes:
        vocab_size: token ids lie in [0, vocab_size).
        matrix: int32 [vocab_size, 8], read-only, the candidates of each token, best first; -1 is none.
        tree: the static tree, with the counts of its paths.
    """

    def __init__(
        self, vocab_size: int, *, matrix: NDArray[np.integer[Any]] | None = None, tree: RankTree | None = None
    ) -> None:
        """Start cold, or from a matrix.

        Args:
            vocab_size: ids that the model may emit.
            matrix: int [at most vocab_size, at most 8], copied; ids outside the vocabulary, and those that stand
                twice in a row, are left out.
            tree: the static tree; by default the paper's, of 80 nodes. It becomes this object's own.

        Raises:
            DraftstoreError: no ids, or a matrix of another shape.
        """
        if not 1 <= vocab_size < 2**31:
            raise DraftstoreError(f"a vocabulary of {vocab_size:,} ids: expected 1 to {2**31 - 1:,}")
        self.vocab_size = vocab_size
        self._matrix: NDArray[np.int32] = np.full((vocab_size, WIDTH), -1, np.int32)
        self.matrix = read_only(self._matrix)
        self.tree = RankTree() if tree is None else tree
        self._lock = Lock()
        if matrix is not None:
            self.seed(matrix)

    def seed(self, matrix: NDArray[np.integer[Any]]) -> None:
        """Fill the rows that hold nothing yet.

        Args:
            matrix: as in `RecyclingDrafter`.

        Raises:
            DraftstoreError: a matrix of another shape.
        """
        rows = np.ascontiguousarray(matrix, np.int32)
        if rows.ndim != 2 or len(rows) > self.vocab_size or rows.shape[1] > WIDTH:
            raise DraftstoreError(
                f"candidates of shape {rows.shape}: expected at most {self.vocab_size:,} tokens by {WIDTH}"
            )
        with self._lock:
            fill_rows(self._matrix, read_only(rows))

    def snapshot(self) -> tuple[NDArray[np.int32], RankTree]:
        """Return copies of the matrix and the tree, as they are at one moment."""
        with self._lock:
            tree = self.tree
            counts = tree.tries.tolist(), tree.hits.tolist()
            return self._matrix.copy(), RankTree(tree.paths, *counts)

    def session(
        self,
        prompt_ids: ArrayLike,
        *,
        candidates: NDArray[np.int32] | None = None,
        **_prefill: Any,
    ) -> "RecyclingSession":
        """Start the drafts of one text; see `Drafter.session`.

        Args:
            prompt_ids: int32 [any], the prompt and the token that the prefill yielded.
            candidates: int32 [m, 8], the model's top 8 at the last m tokens of the prompt; the last row is where it
                predicted the last id.

        Raises:
            TokenRangeError: an id of the prompt lies outside the vocabulary.
            DraftstoreError: candidates of another shape.
        """
        return RecyclingSession(self, prompt_ids, candidates)

    def warm_up(self) -> None:
        """Compile the kernels, or load them from numba's cache, before the first draft is waited for."""
        spare = RecyclingDrafter(2, matrix=np.array([[1]], np.int32))
        session = spare.session([1, 0], candidates=np.array([[0]], np.int32))
        tree = session.propose()
        session.observe([1, 0], tree=tree, candidates=np.zeros((len(tree) + 1, WIDTH), np.int32))

    def _propose(self, last: int, budget: int, max_level: int) -> DraftTree:
        tree = self.tree
        with self._lock:
            arrays = fill_tree(
                self._matrix, last, tree.parents, tree.ranks, tree.starts, tree.tries, tree.hits,
                min(budget, len(tree)), max_level,
            )  # fmt: skip
        return DraftTree(*arrays)

    def _learn(self, last: int, accepted: Any, tree: DraftTree, candidates: Any) -> None:
        """Count what came true, then write the rows of a verified tree."""
        static = self.tree
        with self._lock:
            count_paths(
                self._matrix, last, accepted, static.ranks, static.starts, static.tries, static.hits, WINDOW
            )
            if candidates is not None:
                tokens, parents = _plain(tree.tokens, np.int32), _plain(tree.parents, np.int16)
                recycle(self._matrix, last, accepted, tokens, parents, candidates)

    def _learn_prompt(self, ids: NDArray[np.int32], candidates: NDArray[np.int32]) -> None:
        """Write the rows of tokens that follow each other in a prompt, the last one last."""
        with self._lock:
            write_rows(self._matrix, ids, candidates)


class RecyclingSession:
    """The drafts of one text: a `Session` that remembers its last token, and feeds the drafter's matrix."""

    needs_candidates = True
    needs_hidden = False

    def __init__(
        self, drafter: RecyclingDrafter, prompt_ids: ArrayLike, candidates: NDArray[np.int32] | None = None
    ) -> None:
        """Start from a prompt; see `RecyclingDrafter.session`."""
        self._drafter = drafter
        ids = check_ids(prompt_ids, drafter.vocab_size)
        self._last = int(ids[-1]) if len(ids) else -1
        if candidates is not None and len(ids) > 1:
            rows = _candidates(candidates, None)[-(len(ids) - 1) :]
            drafter._learn_prompt(_plain(ids[-1 - len(rows) : -1], np.int32), rows)

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        """Return a draft of at most `budget` nodes, each of at least `min_prob`; see `Session`.

        Raises:
            DraftstoreError: the budget is not within 0 .. 4,096.
        """
        level = check_budget(budget, min_prob)
        if budget == 0 or level < 0 or self._last < 0:
            return DraftTree.empty()
        return self._drafter._propose(self._last, budget, level)

    def observe(
        self,
        accepted_ids: ArrayLike,
        *,
        tree: DraftTree | None = None,
        candidates: NDArray[np.int32] | None = None,
        **_feedback: Any,
    ) -> None:
        """Take in what a forward pass settled; see `Session`.

        The tree may be any that begins behind the text's last token: proposed here or not, whole, trimmed or merged.
        Paths are counted along the accepted ids, as far as the matrix had foretold them: what the model said there
        is known, whether a node was verified or not. Rows are written for the nodes of `tree`; an accepted
        occurrence of a token wins over a rejected one, then the last one. Without a tree there is one row, the root.

        Raises:
            TokenRangeError: an id outside the vocabulary.
            DraftstoreError: candidates that are not one row for the root and each node.
        """
        ids = check_ids(accepted_ids, self._drafter.vocab_size)
        rows = None if candidates is None else _candidates(candidates, 0 if tree is None else len(tree))
        if len(ids) == 0:
            return
        if self._last >= 0 and (tree is not None or rows is not None):
            self._drafter._learn(self._last, _plain(ids, np.int32), tree or DraftTree.empty(), rows)
        self._last = int(ids[-1])


def _candidates(candidates: NDArray[np.int32], nodes: int | None) -> NDArray[np.int32]:
    """Return candidates as the kernels take them.

    Raises:
        DraftstoreError: not a matrix of one row for the root and each node.
    """
    rows = np.asarray(candidates)
    if rows.ndim != 2 or rows.dtype.kind not in "iu" or (nodes is not None and len(rows) != nodes + 1):
        wanted = "any" if nodes is None else nodes + 1
        raise DraftstoreError(
            f"candidates are int32 [{wanted}, {WIDTH}], found an array of shape {rows.shape} and type {rows.dtype}"
        )
    return _plain(rows, np.int32)


def _plain(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    """Return an array as the one type that the kernels are compiled for."""
    return read_only(np.ascontiguousarray(array, dtype))


@kernel
def fill_tree(
    matrix: Any,
    last: Any,
    parents: Any,
    ranks: Any,
    starts: Any,
    tries: Any,
    hits: Any,
    budget: Any,
    max_level: Any,
) -> Any:
    """Fill a static tree with tokens; an empty cell cuts what is below it.

    Args:
        matrix: int32 [vocabulary, 8].
        last: the text's last token.
        parents: int64 [n], of the `RankTree`, like the next four.
        ranks: int64 [n].
        starts: int64 [n + 2].
        tries: int64 [n].
        hits: int64 [n].
        budget: most nodes.
        max_level: highest level that a node may have.

    Returns:
        tokens int32 [k], parents int16 [k], levels uint8 [k].
    """
    probs = path_probs(parents, ranks, tries, hits)
    nodes = new_frontier(budget)
    slots = np.zeros(budget + 1, np.int64)  # of the rank paths of the root and of the nodes
    tail = _enter_children(matrix, last, ranks, starts, probs, nodes, 0, 0, 1, 0, max_level)
    head = 0
    while head < tail:
        parent, token = parent_of(nodes, head), token_of(nodes, head)
        above = token_of(nodes, parent - 1) if parent > 0 else np.int64(last)
        slot = slots[parent]
        path = starts[slot]
        while matrix[above, ranks[path]] != token:  # the tokens of a row differ
            path += 1
        slots[head + 1] = path + 1
        if may_have_children(nodes, head, tail):
            tail = _enter_children(
                matrix, token, ranks, starts, probs, nodes, path + 1, tail, depth_of(nodes, head) + 1, head + 1,
                max_level,
            )  # fmt: skip
        head += 1
    best_tokens, best_parents = np.empty(tail, np.int32), np.empty(tail, np.int16)
    best_levels = np.empty(tail, np.uint8)
    unpack_nodes(nodes, tail, best_tokens, best_parents, best_levels)
    return best_tokens, best_parents, best_levels


@leaf_kernel
def _enter_children(
    matrix: Any,
    token: Any,
    ranks: Any,
    starts: Any,
    probs: Any,
    nodes: Any,
    slot: Any,
    tail: Any,
    depth: Any,
    parent: Any,
    max_level: Any,
) -> Any:
    """Enter the candidates of a token where the static tree has nodes for them; return the new tail."""
    for path in range(starts[slot], starts[slot + 1]):
        candidate = np.int64(matrix[token, ranks[path]])
        if candidate >= 0:
            tail = enter(nodes, tail, candidate, probs[path], depth, parent, max_level)
    return tail


@kernel
def count_paths(
    matrix: Any, last: Any, accepted: Any, ranks: Any, starts: Any, tries: Any, hits: Any, window: Any
) -> None:
    """Count which rank paths came true, as far down as the text followed the static tree.

    Args:
        matrix: int32 [vocabulary, 8], as it was before the pass.
        last: the text's last token before the pass.
        accepted: int32 [k], read-only, what the text grew by.
        ranks: int64 [n], of the `RankTree`, like the next three.
        starts: int64 [n + 2].
        tries: int64 [n], changed.
        hits: int64 [n], changed.
        window: all counts are halved when one reaches twice as many tries.
    """
    slot, token, most = 0, np.int64(last), 0
    for i in range(len(accepted)):
        found = 0
        for path in range(starts[slot], starts[slot + 1]):
            candidate = matrix[token, ranks[path]]
            if candidate >= 0:
                tries[path] += 1
                most = max(most, tries[path])
                if candidate == accepted[i]:
                    hits[path] += 1
                    found = path + 1
        if found == 0:
            break
        slot, token = found, np.int64(accepted[i])
    if most >= 2 * window:
        for path in range(len(tries)):
            tries[path] >>= 1
            hits[path] >>= 1


@kernel
def recycle(matrix: Any, last: Any, accepted: Any, tokens: Any, parents: Any, candidates: Any) -> None:
    """Write the rows of all tokens of a verified tree: first the rejected nodes, in order, then the accepted ones.

    Args:
        matrix: int32 [vocabulary, 8], changed.
        last: the token of the root.
        accepted: int32 [k], read-only, what the text grew by.
        tokens: int32 [n], read-only, the tree.
        parents: int16 [n], read-only.
        candidates: int32 [n + 1, any], read-only, of the root and of each node; what is outside the vocabulary is
            none, and a row of none is passed over.
    """
    depths = np.full(len(tokens) + 1, -1, np.int64)  # of the root and of accepted nodes
    depths[0] = 0
    for node in range(len(tokens)):
        parent = parents[node]
        depth = depths[parent + 1] if -1 <= parent < node else np.int64(-1)
        if 0 <= depth < len(accepted) and tokens[node] == accepted[depth]:
            depths[node + 1] = depth + 1
            continue
        _write_row(matrix, np.int64(tokens[node]), candidates, node + 1)
    _write_row(matrix, np.int64(last), candidates, 0)
    for node in range(len(tokens)):
        if depths[node + 1] > 0:
            _write_row(matrix, np.int64(tokens[node]), candidates, node + 1)


@kernel
def write_rows(matrix: Any, tokens: Any, candidates: Any) -> None:
    """Write the rows of some tokens, int32 [k], read-only, in order; `candidates` int32 [k, any], read-only."""
    for row in range(len(tokens)):
        _write_row(matrix, np.int64(tokens[row]), candidates, row)


@kernel
def fill_rows(matrix: Any, candidates: Any) -> None:
    """Write the candidates of the first tokens, int32 [k, any], read-only, where the matrix holds none."""
    for token in range(len(candidates)):
        empty = True
        for rank in range(WIDTH):
            empty = empty and matrix[token, rank] < 0
        if empty:
            _write_row(matrix, np.int64(token), candidates, token)


@leaf_kernel
def _write_row(matrix: Any, token: Any, candidates: Any, row: Any) -> None:
    """Write one row of candidates, each once; one that holds none leaves the matrix as it is."""
    vocab_size, width = len(matrix), min(WIDTH, candidates.shape[1])
    if token < 0 or token >= vocab_size:
        return
    known = False
    for rank in range(width):
        known = known or 0 <= candidates[row, rank] < vocab_size
    for rank in range(WIDTH if known else 0):
        candidate = np.int64(candidates[row, rank]) if rank < width else np.int64(-1)
        if candidate < 0 or candidate >= vocab_size:
            candidate = np.int64(-1)
        for other in range(rank):
            if matrix[token, other] == candidate:
                candidate = np.int64(-1)
        matrix[token, rank] = candidate
