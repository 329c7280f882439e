"""Best-first growth of a draft tree from the suffix arrays of a store: one kernel for every drafting rule.

The suffix array is used as a back-off n-gram language model of unbounded order. At every node, the text is the context
followed by the node's path. Its longest suffix that occurs in the store comes first. With c occurrences, followed by d
distinct tokens, it gets the share

    c / (c + beta * d + alpha)

of the node's probability; the rest goes to the next shorter suffix, and so on. So a suffix with many occurrences and
few continuations is trusted; a rare or ambiguous one defers to shorter ones. Within a suffix, a token's share is the
fraction of the occurrences that it follows. This is interpolation of the Witten-Bell family, applied at every node:
"The Zero-Frequency Problem", IEEE Transactions on Information Theory 37(4), 1991.

With alpha = beta = 0 the longest match gets everything, which is the rule of REST (NAACL 2024, section 3): a trie of
the continuations of the longest match, reduced to its heaviest nodes.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import require_limits
from draftstore.jit import kernel, leaf_kernel
from draftstore.search.candidates import clear_table, hand_out, new_candidates, read_following
from draftstore.search.matching import find_longest, find_suffix, load_context, new_matches, read_fewer
from draftstore.search.suffix import SuffixIndex
from draftstore.trees.frontier import (
    MAX_DEPTH,
    enter,
    grow,
    new_frontier,
    parent_of,
    token_of,
    unpack_nodes,
)

MAX_MATCH = 1024
"""Maximum tokens of a context that can be matched."""
MAX_ROWS = 1 << 40
"""Maximum occurrences read for one node: more than any store has, so that every count is exact."""
ROWS_NODES = 64
"""Nodes of a draft for which `Rule.rows` are read. 256 rows give the same M as 512 at 16 nodes, and 128 at 4."""

LIMITS = {
    "max_match": (1, MAX_MATCH),
    "min_match": (1, MAX_MATCH),
    "depth": (1, MAX_DEPTH),
    "rows": (1, MAX_ROWS),
    "floor": (0, 1),
    "alpha": (0, math.inf),
    "beta": (0, math.inf),
    "gamma": (0, 1),
}
"""Minimum and maximum of each parameter of a rule."""


class Rule(NamedTuple):
    """The drafting rule: parameters for drawing a tree from the matches.

    Attributes:
        max_match: maximum matched tokens of the context.
        min_match: minimum length of a suffix.
        depth: maximum tokens of a path.
        rows: occurrences read for a probability of 1 in a draft of 64 nodes; a suffix with less probability left reads
            proportionally fewer, evenly spaced; other budgets scale this by the square root of nodes / 64.
        floor: probability below which no shorter suffix is used.
        alpha: pseudo-count of occurrences that every suffix yields to shorter ones.
        beta: the same for each distinct token that follows.
        gamma: exponent of the growth of distinct tokens with rows read (Heaps' law); scales d for sampled rows.
    """

    max_match: int
    min_match: int
    depth: int
    rows: int
    floor: float
    alpha: float
    beta: float
    gamma: float

    def check(self) -> None:
        """Raise a DraftstoreError for an invalid value."""
        require_limits(
            "a drafting rule", {name: (value, *LIMITS[name]) for name, value in self._asdict().items()}
        )

    def pack(self) -> NDArray[np.float64]:
        """Return the rule as float64 [8], which is faster to pass to a kernel than eight numbers."""
        return np.array(self, np.float64)


@kernel
def draft_batch(
    tokens, suffixes, keys, first_rows, segments, vocab_size, key_bits, key_tokens, packed_rule, contexts, budget,
    max_level,
):  # fmt: skip
    """Grow a draft tree for each of the right-aligned contexts, int32 [batch, any].

    An id outside the vocabulary (-1: padding) hides all before it. The index is unpacked: a draft takes microseconds,
    and numba unboxes flat arguments faster than tuples.

    Returns the arrays of a `DraftBatch`, of width `budget`, and the distinct tokens after the occurrences read, int64
    [batch] (counting the end of a document as one).
    """
    index = SuffixIndex(tokens, suffixes, keys, first_rows, segments, vocab_size, key_bits, key_tokens)
    batch = len(contexts)
    nodes_tokens, parents = np.empty((batch, budget), np.int32), np.empty((batch, budget), np.int16)
    levels, sizes = np.empty((batch, budget), np.uint8), np.zeros(batch, np.int32)
    lengths, counts = np.empty(batch, np.int32), np.empty(batch, np.int64)
    distinct = np.zeros(batch, np.int64)
    rule = _unpack_rule(packed_rule, budget)
    matches, nodes = new_matches(rule.max_match + rule.depth, budget + 1, len(segments)), new_frontier(budget)
    candidates = new_candidates(_room(rule, len(segments), vocab_size))
    for i in range(batch):
        begin, end, lengths[i], counts[i] = _find_match(index, rule, matches, contexts[i])
        if counts[i] > 0 and budget > 0:
            sizes[i] = _grow(index, rule, matches, candidates, nodes, begin, end, max_level)
        if sizes[i] > 0:
            distinct[i] = matches.lengths[0, 2]
        unpack_nodes(nodes, sizes[i], nodes_tokens[i], parents[i], levels[i])
    return nodes_tokens, parents, levels, sizes, lengths, counts, distinct


@leaf_kernel
def _unpack_rule(values, budget):
    rows = max(1, int(values[3] * math.sqrt(budget / ROWS_NODES)))
    return Rule(
        int(values[0]), int(values[1]), int(values[2]), rows,
        values[4], values[5], values[6], values[7],
    )  # fmt: skip


@leaf_kernel
def _room(rule, segments, vocab_size):
    """Bound the candidates of a node: the rows read for the longest match or for all suffixes."""
    rows = rule.rows if rule.alpha + rule.beta == 0.0 else 4 * rule.rows
    return min(rows, segments * (vocab_size + 1)) + 2 * segments


@leaf_kernel
def _find_match(index, rule, matches, context):
    """Return begin and end of the usable context, the length of its longest match and the number of occurrences."""
    begin, end = load_context(matches.text, context, rule.max_match, index.vocab_size)
    match = find_longest(index, matches, begin, end)
    if match < rule.min_match:
        return begin, end, 0, np.int64(0)
    return begin, end, match, np.int64(matches.counts[0, match])


@kernel
def _grow(index, rule, matches, candidates, nodes, begin, end, max_level):
    """Fill `nodes`; return their number. A separate kernel: it takes 15 s to compile."""
    return grow(
        nodes, rule.depth, _enter_following, (index, rule, matches, candidates, begin, end), max_level
    )


@leaf_kernel
def _enter_following(state, nodes, slot, parent, depth, prob, tail, max_level):
    index, rule, matches, candidates, begin, end = state
    floor, stop = floor_of(nodes, tail, rule.floor), end + depth
    load_path(matches.text, nodes, stop, slot)
    found = _gather(index, rule, matches, candidates, begin, stop, slot, parent, prob, floor)
    return enter_all(nodes, candidates, found, tail, depth + 1, slot, max_level)


@leaf_kernel
def floor_of(nodes, tail, floor):
    """Return the probability below which no shorter suffix is used; in a full tree, at least the last node's."""
    return max(floor, nodes.probs[tail - 1]) if tail == len(nodes.keys) else floor


@leaf_kernel
def load_path(text, nodes, stop, slot):
    """Write the tokens of a node's path after the context, up to `stop`."""
    while slot > 0:
        stop -= 1
        text[stop] = token_of(nodes, slot - 1)
        slot = parent_of(nodes, slot - 1)


@leaf_kernel
def _gather(index, rule, matches, candidates, begin, stop, slot, parent, prob, floor):
    """Distribute a node's probability to the tokens that may follow; return the number of candidates."""
    lengths = matches.lengths
    top = min(lengths[parent, 0] + 1, stop - begin) if slot > 0 else lengths[0, 0]
    lengths[slot, 0] = 0
    remaining, share = prob, 0.0
    count, kinds = 0.0, 0.0
    found, runs = 0, 0
    for length in range(top, rule.min_match - 1, -1):
        wanted = math.ceil(rule.rows * remaining)
        if slot == 0 and length == top:
            occurrences = matches.counts[slot, length]  # of the longest match, already found
        else:
            occurrences = find_suffix(index, matches, stop, slot, parent, length, wanted)
        if occurrences == 0.0:
            continue
        if lengths[slot, 0] == 0:
            lengths[slot, 0] = length
        lengths[slot, 1] = length
        if occurrences != count:  # equal counts mean the same occurrences, read once for all shares
            hand_out(candidates, runs, share)
            share, count, runs = 0.0, occurrences, 0
            reads = read_fewer(matches, slot, length, wanted)
            if found + reads > len(candidates.tokens) <= index.vocab_size:
                break
            rows, steps = matches.rows[slot, length], matches.steps[slot, length]
            found, runs, distinct = read_following(index, candidates, rows, steps, length, count, found)
            if length == lengths[slot, 0]:
                lengths[slot, 2] = distinct
            kinds = np.float64(distinct)
            if reads < count:
                kinds *= power_of(count / reads, rule.gamma)
        part = remaining * (count / (count + rule.beta * kinds + rule.alpha))
        share += part
        remaining -= part
        if remaining <= floor:
            break
    hand_out(candidates, runs, share)
    clear_table(candidates, found)
    return found


@leaf_kernel
def power_of(base, exponent):
    """Return base ** exponent for an exponent from 0 to 1, by square roots: bit-identical on every machine."""
    power, root, digits = 1.0, base, exponent
    while digits > 0.0:
        if digits >= 1.0:
            power *= root
            digits -= 1.0
        digits *= 2.0
        root = math.sqrt(root)
    return power


@leaf_kernel
def enter_all(nodes, candidates, found, tail, depth, parent, max_level):
    """Enter a node's candidates as its children; return the new tail."""
    for i in range(found):
        tail = enter(nodes, tail, candidates.tokens[i], candidates.probs[i], depth, parent, max_level)
    return tail
