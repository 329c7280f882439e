"""Draft trees: the common form of all drafts, and its binary format.

    context ... the | cat  0.6 -- sat  0.3          node     0    1    2    3
                    |          \\- ran  0.2          tokens   cat  sat  ran  dog
                    | dog  0.1                      parents  -1   0    0    -1

Probabilities are on a logarithmic grid of 256 levels, 16 per octave (level q stands for 2 ** (-q / 16)); every drafter
rounds to it. So a tree has the same bytes locally, in a store and on the wire.

Binary form, version 1, little-endian, `n` nodes:

    offset  type           content
    0       u8             version, 1
    1       u8             flags: bit 0 = tokens are u32, else u16; bit 1 = parents are u16, else u8
    2       u16            n
    4       u16|u32 [n]    tokens
    ..      u8|u16 [n]     parents plus one: 0 is the context, i + 1 is node i
    ..      u8 [n]         levels

Both widths are the narrowest that fit, so that equal trees have equal bytes. `walk` follows a text down a tree, whose
siblings may be in any order.
"""

import dataclasses
from decimal import Decimal
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import DraftTreeError
from draftstore.jit import as_input, kernel, leaf_kernel, read_only
from draftstore.trees import codec
from draftstore.trees.codec import MAX_NODES

LEVELS_PER_OCTAVE = 16
_HALF_LEVELS: NDArray[np.float64] = np.array(
    [*accumulate([Decimal(1), *[Decimal(2) ** (Decimal(-1) / (2 * LEVELS_PER_OCTAVE))] * 511], mul)],
    np.float64,
)
"""The grid and its midpoints, computed as decimals: unlike exp2, bit-identical on every machine."""
LEVEL_PROBS: NDArray[np.float32] = _HALF_LEVELS[::2].astype(np.float32)
"""Probability of every level."""
LOWEST_LEVEL = len(LEVEL_PROBS) - 1
LEVEL_BOUNDS: NDArray[np.float64] = _HALF_LEVELS[1::2].copy()
"""Minimum probability that rounds to each level; those below the last get no node."""


def level_of(prob: float) -> int:
    """Return the level that a probability rounds to; 256 if it is below the grid."""
    return int(np.searchsorted(-LEVEL_BOUNDS, -prob))


def highest_level(min_prob: float) -> int:
    """Return the highest level with at least this probability; -1 above 1."""
    return int(np.count_nonzero(LEVEL_PROBS.astype(np.float64) >= min_prob)) - 1


def child_of(parents: list[int], tokens: list[int], node: int, token: int) -> int:
    """Return the child of a node (-1 = the root) that carries a token; -1 if there is none."""
    child = node
    try:
        while True:  # children come after their parents
            child = tokens.index(token, child + 1)
            if parents[child] == node:
                return child
    except ValueError:
        return -1


@dataclasses.dataclass(slots=True, eq=False)  # not frozen: that would double the construction time
class DraftTree:
    """Tokens with parents, in descending order of acceptance probability.

    Nodes are sorted by level, then depth, then token id, then parent: a parent precedes its children, and any prefix
    of the arrays is a valid smaller tree. Siblings carry different tokens. An empty draft has n = 0.

    Attributes:
        tokens: int32 [n], token ids.
        parents: int16 [n], index of the parent; -1 is the last token of the context.
        levels: uint8 [n], acceptance probability on the grid; at least the parent's level.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int16]
    levels: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DraftTree) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    @classmethod
    def empty(cls) -> "DraftTree":
        """Return a tree without nodes."""
        return cls(np.empty(0, np.int32), np.empty(0, np.int16), np.empty(0, np.uint8))

    @property
    def probs(self) -> NDArray[np.float32]:
        """float32 [n], acceptance probability of each node."""
        return LEVEL_PROBS[self.levels]

    @property
    def depths(self) -> NDArray[np.int64]:
        """int64 [n], depth of each node: 1 for a child of the context."""
        return self.position_offsets()[1:]

    def position_offsets(self) -> NDArray[np.int64]:
        """int64 [n + 1], positions of the context's last token (row 0) and of each node, relative to row 0."""
        offsets: NDArray[np.int64] = _offsets(as_input(self.parents, np.int16))
        return offsets

    def attention_mask(self) -> NDArray[np.bool_]:
        """Bool [n + 1, n + 1], whether a row may attend to a column; row 0 is the context's last token."""
        mask: NDArray[np.bool_] = _mask(as_input(self.parents, np.int16))
        return mask

    def path(self, node: int) -> list[int]:
        """Return the node indices from the first token to a node, inclusive."""
        path = []
        while node >= 0:
            path.append(node)
            node = int(self.parents[node])
        return path[::-1]

    def prefix(self, size: int) -> "DraftTree":
        """Return the tree of the first `size` nodes."""
        return DraftTree(self.tokens[:size], self.parents[:size], self.levels[:size])

    def accepted(self, continuation: NDArray[np.int32]) -> list[int]:
        """Return the path of nodes that agrees with a continuation, int32 [any]."""
        parents, tokens = self.parents.tolist(), self.tokens.tolist()  # faster than arrays of few nodes
        node, path = -1, list[int]()
        for token in continuation[: len(tokens)].tolist():
            if (node := child_of(parents, tokens, node, token)) < 0:
                break
            path.append(node)
        return path

    def validate(self) -> None:
        """Check all guarantees of a draft tree; DraftTreeError if one is violated."""
        n = len(self)
        if not n == len(self.parents) == len(self.levels) or n > MAX_NODES:
            raise DraftTreeError(
                f"{n} tokens, {len(self.parents)} parents, {len(self.levels)} levels: expected equal lengths of "
                f"at most {MAX_NODES}"
            )
        if self.tokens.min(initial=0) < 0:
            raise DraftTreeError(f"token {self.tokens.min()}, expected ids of at least 0")
        if ((self.parents < -1) | (self.parents >= np.arange(n))).any():
            raise DraftTreeError("a parent does not precede its child")
        self._decode(self.to_bytes(), 2**31)

    def to_bytes(self) -> bytes:
        """Encode the tree; see the module's description of the binary form."""
        _, data = codec.encode_trees(
            _row(self.tokens, np.int32),
            _row(self.parents, np.int16),
            _row(self.levels, np.uint8),
            read_only(np.array([len(self)], np.int32)),
        )
        return bytes(data)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> "DraftTree":
        """Decode `to_bytes`. Checks that parents precede children; `validate` checks the rest.

        Raises:
            DraftTreeError: unknown version or flags, a wrong length, or a parent after its child.
        """
        return cls._decode(data, 0)

    @classmethod
    def _decode(cls, data: bytes | memoryview, vocab_size: int) -> "DraftTree":
        table = len(data).to_bytes(12, "little")
        problem, _, *arrays, _, _, _ = codec.decode_drafts(
            np.frombuffer(b"".join((table, data)), np.uint8), 0, 1, vocab_size, MAX_NODES
        )
        if problem:
            raise DraftTreeError(explain(problem, data))
        return cls(*(rows[0] for rows in arrays))


@kernel
def _offsets(parents):
    offsets = np.zeros(len(parents) + 1, np.int64)
    for node in range(len(parents)):
        offsets[node + 1] = offsets[parents[node] + 1] + 1
    return offsets


@kernel
def _mask(parents):
    mask = np.zeros((len(parents) + 1, len(parents) + 1), np.bool_)
    mask[0, 0] = True
    for row in range(1, len(mask)):
        mask[row, :row] = mask[parents[row - 1] + 1, :row]
        mask[row, row] = True
    return mask


def _row(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    return read_only(np.ascontiguousarray(array, dtype).reshape(1, -1))


def explain(problem: int, data: bytes | memoryview) -> str:
    """Describe an error code of `draftstore.trees.codec`."""
    if len(data) < codec.HEADER_BYTES:
        problem = codec.CUT
    if problem == codec.WRONG_LENGTH:
        n = int.from_bytes(data[2:4], "little")
        size = codec.tree_bytes.py_func(data[1], n)
        if n > MAX_NODES:
            return f"a draft tree of {n} nodes, expected at most {MAX_NODES}"
        return f"a draft tree of {n} nodes takes {size} bytes, found {len(data)}"
    if problem == codec.OTHER_VERSION:
        return f"draft tree of version {data[0]}, this draftstore reads version {codec.CODEC_VERSION}"
    return {
        codec.CUT: f"a draft tree has at least {codec.HEADER_BYTES} bytes, found {len(data)}",
        codec.UNKNOWN_FLAGS: f"draft tree with unknown flags 0x{bytes(data[1:2]).hex()}",
        codec.WRONG_PARENT: "a parent does not precede its child",
        codec.WRONG_TOKEN: "a token id lies outside the vocabulary",
        codec.WRONG_ORDER: "nodes are out of order: expected level, depth, token id and parent to ascend",
        codec.TOO_MANY: f"{int.from_bytes(data[2:4], 'little')} nodes, more than requested",
        codec.TWINS: "two children of one node carry the same token",
    }[problem]


def best_chain(tree: DraftTree, longest: int | None = None) -> DraftTree:
    """Return the path of at most `longest` nodes with the most expected accepted tokens, the sum of probabilities."""
    rows = _row(tree.tokens, np.int32), _row(tree.parents, np.int16), _row(tree.levels, np.uint8)
    sizes = read_only(np.array([len(tree)], np.int32))
    *arrays, lengths = best_chains(*rows, sizes, len(tree) if longest is None else longest)
    return DraftTree(*(chains[0, : lengths[0]] for chains in arrays))


@kernel
def best_chains(tokens, parents, levels, sizes, longest):
    """Return the best chain, see `best_chain`, of each tree: tokens int32 [batch, nodes], parents int16, levels uint8.

    `sizes` int32 [batch] are their nodes; all arrays are read-only. Returns arrays of the same kind.
    """
    batch, width = tokens.shape
    width = min(width, longest)
    out_tokens, out_parents = np.empty((batch, width), np.int32), np.empty((batch, width), np.int16)
    out_levels, lengths = np.empty((batch, width), np.uint8), np.zeros(batch, np.int32)
    sums, depths = np.empty(tokens.shape[1]), np.empty(tokens.shape[1], np.int32)
    for row in range(batch):
        best, most = -1, 0.0
        for node in range(sizes[row]):
            parent = parents[row, node]
            sums[node], depths[node] = LEVEL_PROBS[levels[row, node]], 1
            if parent >= 0:
                sums[node], depths[node] = sums[parent] + sums[node], depths[parent] + 1
            if depths[node] <= width and sums[node] > most:
                best, most = node, sums[node]
        if best >= 0:
            lengths[row] = depths[best]
        for place in range(lengths[row] - 1, -1, -1):
            out_tokens[row, place], out_parents[row, place] = tokens[row, best], place - 1
            out_levels[row, place] = levels[row, best]
            best = parents[row, best]
    return out_tokens, out_parents, out_levels, lengths


@leaf_kernel
def walk(tokens, parents, ids, visit, state):
    """Follow token ids, int32 [any], read-only, down a tree until one is missing; return the nodes on the path.

    `visit` is a leaf kernel, compiled into the walk. It is called as `visit(state, node, child)` for the context (-1)
    and each node on the path; `child` is the next node, -1 if the tree has none.
    """
    node, depth = np.int64(-1), 0
    for token in ids:
        child = np.int64(-1)
        for i in range(node + 1, len(tokens)):
            if parents[i] == node and tokens[i] == token:
                child = np.int64(i)
        visit(state, node, child)
        if child < 0:
            break
        node, depth = child, depth + 1
    return depth


@leaf_kernel
def steps_below(levels, node, parent):
    """Return the levels between a node and its parent (-1: the context): its probability given its parent."""
    before = np.int64(levels[parent]) if parent >= 0 else np.int64(0)
    return max(np.int64(0), np.int64(levels[node]) - before)


@kernel
def find_fault(parents, tokens):
    """Return the first node whose parent does not precede it or that duplicates a sibling; -1 if there is none."""
    cells = 16
    while cells < 2 * len(tokens):
        cells *= 2
    table = np.full(cells, -1, np.int32)  # hash table of nodes by parent and token
    for node in range(len(tokens)):
        parent, token = np.int64(parents[node]), np.int64(tokens[node])
        if parent < -1 or parent >= node:
            return node
        cell = (token * 40_503 + parent * 9_973) & (cells - 1)
        while table[cell] >= 0:
            if tokens[table[cell]] == token and parents[table[cell]] == parent:
                return node
            cell = (cell + 1) & (cells - 1)
        table[cell] = node
    return -1
