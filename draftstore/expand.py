"""Best-first growth of a draft tree from the suffix arrays of a store: one kernel for every drafting rule.

The suffix array is read as a back-off n-gram language model of unbounded order. At every node, the text is the
context followed by the node's path. Of its suffixes that occur in the store, the longest is asked first. With c
occurrences, followed by d distinct tokens, it gets the share

    c / (c + beta * d + alpha)

of the node's probability; what is left goes to the next shorter suffix, and so on. So a suffix that is seen often
and always goes on alike is trusted, a rare or an undecided one yields to shorter ones. Within a suffix, a token's
share is the fraction of the occurrences that it follows. This is interpolation of the Witten-Bell family, applied
at every node: Witten, Bell, "The Zero-Frequency Problem", IEEE Transactions on Information Theory 37(4), 1991;
Chen, Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling", 1999, section 2.

With alpha = beta = 0 the longest match takes all, and the rule is the one of REST (He et al., NAACL 2024, section
3): the continuations of the longest match as a trie, of which the heaviest nodes are kept.

The tree grows in one array of keys, sorted, at most `budget` long: the part before `head` is final, the part
after it waits. A child never sorts before its parent, so the node at `head` is always the best one left; when the
array is full, a new node must beat the last. A key holds the whole node:

    bits 62-54    53-48    47-17    16-0
    level         depth    token    slot of the parent (0 = the context, i + 1 = node i)

so that the order of keys is the order that draft trees have by contract: descending probability, then parents
first, then token id.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.suffix import SuffixIndex, find_rows, kernel, leaf_kernel
from draftstore.tree import LEVEL_BOUNDS, LEVELS_PER_OCTAVE

MAX_BUDGET = 4096
"""Most nodes of one tree."""
MAX_DEPTH = 63
"""Most tokens of one path."""

_PARENT_BITS = 17
_TOKEN_BITS = 31
_DEPTH_BITS = 6
_TOKEN_SHIFT = _PARENT_BITS
_DEPTH_SHIFT = _TOKEN_SHIFT + _TOKEN_BITS
_LEVEL_SHIFT = _DEPTH_SHIFT + _DEPTH_BITS
_PARENT_MASK = (1 << _PARENT_BITS) - 1
_TOKEN_MASK = (1 << _TOKEN_BITS) - 1
_DEPTH_MASK = (1 << _DEPTH_BITS) - 1
_LEVELS = len(LEVEL_BOUNDS)


class Rule(NamedTuple):
    """How a tree is drawn from the matches.

    Attributes:
        max_match: most tokens of the context that are matched.
        min_match: fewest tokens of a suffix that is still asked.
        depth: most tokens of a path.
        rows: occurrences read for a whole unit of probability; of a suffix with more of them in what is left
            for it, evenly spaced ones are read.
        floor: probability below which no shorter suffix is asked.
        alpha: occurrences' worth of trust that every suffix yields to shorter ones.
        beta: the same for each distinct token that follows.
        gamma: distinct tokens grow as this power of the rows read (Heaps' law); scales d where rows are sampled.
    """

    max_match: int
    min_match: int
    depth: int
    rows: int
    floor: float
    alpha: float
    beta: float
    gamma: float

    def pack(self) -> NDArray[np.float64]:
        """Return the rule as float64 [8], which crosses into a kernel faster than eight numbers."""
        return np.array(self, np.float64)


class _Work(NamedTuple):
    """Scratch arrays of one draft.

    Attributes:
        text: int64 [max_match + depth], the context and behind it the path of the node at hand.
        ranges: int64 [budget + 1, max_match + depth + 1, segments, 2], rows by slot, suffix length and segment.
        lengths: int64 [budget + 1, 2], longest and shortest suffix with rows in `ranges`, by slot.
        keys: int64 [budget], the nodes.
        probs: float64 [budget], their probabilities before rounding.
        table: int32 [power of two], hash table from tokens to candidates of the node at hand; -1 is free.
        cells: int64 [candidates], where the table points at each candidate.
        tokens: int64 [candidates].
        masses: float64 [candidates], their probabilities.
        stamps: int64 [candidates], length of the last suffix that each was seen after.
        run_places: int64 [candidates], candidate of each run of equal tokens in the rows last read.
        run_shares: float64 [candidates], fraction of the rows in each run.
    """

    text: NDArray[np.int64]
    ranges: NDArray[np.int64]
    lengths: NDArray[np.int64]
    keys: NDArray[np.int64]
    probs: NDArray[np.float64]
    table: NDArray[np.int32]
    cells: NDArray[np.int64]
    tokens: NDArray[np.int64]
    masses: NDArray[np.float64]
    stamps: NDArray[np.int64]
    run_places: NDArray[np.int64]
    run_shares: NDArray[np.float64]


@kernel
def draft_one(
    tokens: Any, suffixes: Any, keys: Any, first_rows: Any, segments: Any, vocab_size: Any, key_bits: Any,
    key_tokens: Any, packed_rule: Any, context: Any, budget: Any, max_level: Any,
) -> Any:  # fmt: skip
    """Grow a draft tree for one context.

    The first eight arguments are a SuffixIndex, taken apart: one draft takes microseconds, and numba unpacks flat
    arguments faster than tuples.

    Args:
        packed_rule: a Rule, packed.
        context: int32 [any], the last tokens of the text; an id outside the vocabulary (such as the padding -1)
            hides all before it.
        budget: most nodes of the tree.
        max_level: highest level (see `tree.LEVEL_BOUNDS`) that a node may have.

    Returns:
        tokens int32 [n], parents int16 [n], levels uint8 [n], tokens of the longest match, its occurrences.
    """
    index = SuffixIndex(tokens, suffixes, keys, first_rows, segments, vocab_size, key_bits, key_tokens)
    rule = _unpack_rule(packed_rule)
    work = _new_work(rule, budget, len(segments))
    size, match, count = _draft(index, rule, work, context, max_level)
    tree_tokens = np.empty(size, np.int32)
    parents = np.empty(size, np.int16)
    levels = np.empty(size, np.uint8)
    _unpack_nodes(work.keys, size, tree_tokens, parents, levels)
    return tree_tokens, parents, levels, match, count


@kernel
def draft_batch(index: Any, packed_rule: Any, contexts: Any, budget: Any, max_level: Any) -> Any:
    """Grow one draft tree for each context; see `draft_one`.

    Args:
        index: a SuffixIndex.
        packed_rule: a Rule, packed.
        contexts: int32 [batch, any], aligned right.
        budget: most nodes of a tree.
        max_level: highest level that a node may have.

    Returns:
        tokens int32 [batch, budget], parents int16 and levels uint8 likewise, and int64 [batch, 3]: nodes,
        tokens of the longest match, its occurrences.
    """
    batch = len(contexts)
    tokens = np.empty((batch, budget), np.int32)
    parents = np.empty((batch, budget), np.int16)
    levels = np.empty((batch, budget), np.uint8)
    summary = np.empty((batch, 3), np.int64)
    rule = _unpack_rule(packed_rule)
    work = _new_work(rule, budget, len(index.segments))
    for i in range(batch):
        size, match, count = _draft(index, rule, work, contexts[i], max_level)
        summary[i, 0], summary[i, 1], summary[i, 2] = size, match, count
        _unpack_nodes(work.keys, size, tokens[i], parents[i], levels[i])
    return tokens, parents, levels, summary


@leaf_kernel
def _unpack_rule(values: Any) -> Any:
    """Return the Rule in a packed one."""
    return Rule(
        np.int64(values[0]), np.int64(values[1]), np.int64(values[2]), np.int64(values[3]),
        values[4], values[5], values[6], values[7],
    )  # fmt: skip


@kernel
def _new_work(rule: Any, budget: Any, segments: Any) -> Any:
    """Return scratch arrays for drafts of at most `budget` nodes."""
    most = rule.max_match + rule.depth
    # Without back-off only the longest match is read; else every suffix, each for less probability.
    room = (1 if rule.alpha + rule.beta == 0.0 else 4) * rule.rows + 2 * segments + 1
    size = 64
    while size < 2 * room:
        size *= 2
    return _Work(
        np.empty(most, np.int64), np.empty((budget + 1, most + 1, segments, 2), np.int64),
        np.empty((budget + 1, 2), np.int64), np.empty(budget, np.int64), np.empty(budget, np.float64),
        np.full(size, -1, np.int32), np.empty(room, np.int64), np.empty(room, np.int64),
        np.empty(room, np.float64), np.empty(room, np.int64), np.empty(room, np.int64),
        np.empty(room, np.float64),
    )  # fmt: skip


@leaf_kernel
def _unpack_nodes(keys: Any, size: Any, tokens: Any, parents: Any, levels: Any) -> Any:
    """Take the keys of nodes apart."""
    for i in range(size):
        tokens[i] = (keys[i] >> _TOKEN_SHIFT) & _TOKEN_MASK
        parents[i] = (keys[i] & _PARENT_MASK) - 1
        levels[i] = keys[i] >> _LEVEL_SHIFT


@leaf_kernel
def _draft(index: Any, rule: Any, work: Any, context: Any, max_level: Any) -> Any:
    """Fill `work.keys` for one context; return the nodes, the tokens of the longest match and its occurrences."""
    begin, end = _load_context(work.text, context, rule.max_match, index.vocab_size)
    match = _longest_match(index, work.text, begin, end, work.ranges[0])
    if match == 0 or match < rule.min_match or len(work.keys) == 0:
        return 0, 0, np.int64(0)
    work.lengths[0, 0] = match
    count = _count(work.ranges[0, match])
    return _grow(index, rule, work, begin, end, max_level), match, count


@leaf_kernel
def _load_context(text: Any, context: Any, max_match: Any, vocab_size: Any) -> Any:
    """Copy the last tokens to the front of `text`; return where the usable ones begin and end."""
    size = min(len(context), max_match)
    begin = 0
    for i in range(size):
        text[i] = context[len(context) - size + i]
        if text[i] < 0 or text[i] >= vocab_size:
            begin = i + 1
    return begin, size


@leaf_kernel
def _count(ranges: Any) -> Any:
    """Add up the rows of one suffix over all segments."""
    count = np.int64(0)
    for segment in range(len(ranges)):
        count += ranges[segment, 1] - ranges[segment, 0]
    return count


@leaf_kernel
def _find_suffix(index: Any, text: Any, stop: Any, length: Any, ranges: Any) -> Any:
    """Find the rows of the suffix of `text[:stop]` of one length in every segment; return their number."""
    start = stop - length
    for segment in range(len(index.segments)):
        lo = np.int64(index.first_rows[segment, text[start]])
        hi = np.int64(index.first_rows[segment, text[start] + 1])
        if length > 1 and lo < hi:
            lo, hi = find_rows(index, segment, lo, hi, 1, text, start, stop)
        ranges[segment, 0], ranges[segment, 1] = lo, hi
    return _count(ranges)


@leaf_kernel
def _narrow_suffix(index: Any, text: Any, stop: Any, length: Any, parent_ranges: Any, ranges: Any) -> Any:
    """Keep of the rows of a suffix one token shorter those that go on with the last token; return their number."""
    for segment in range(len(ranges)):
        lo, hi = parent_ranges[segment, 0], parent_ranges[segment, 1]
        if lo < hi:
            lo, hi = find_rows(index, segment, lo, hi, length - 1, text, stop - length, stop)
        ranges[segment, 0], ranges[segment, 1] = lo, hi
    return _count(ranges)


@leaf_kernel
def _longest_match(index: Any, text: Any, begin: Any, end: Any, ranges: Any) -> Any:
    """Return the length of the longest suffix that occurs, its rows in `ranges`.

    Where a suffix occurs, all shorter ones do: the length is bisected.
    """
    low, high = 0, end - begin
    middle = min(index.key_tokens, high)  # one look at the keys decides that many
    while low < high:
        if _find_suffix(index, text, end, middle, ranges[middle]) > 0:
            low = middle
        else:
            high = middle - 1
        middle = min((low + high + 1) // 2, low + 3)
    return low


@leaf_kernel
def _grow(index: Any, rule: Any, work: Any, begin: Any, end: Any, max_level: Any) -> Any:
    """Fill `work.keys` with the best nodes, ascending; return their number."""
    keys, budget = work.keys, len(work.keys)
    tail = _expand(index, rule, work, begin, end, 0, 0, 1.0, 0, max_level)
    head = 0
    while head < tail:
        key = keys[head]
        depth = (key >> _DEPTH_SHIFT) & _DEPTH_MASK
        least_child = (((key >> _LEVEL_SHIFT) << _DEPTH_BITS) | (depth + 1)) << _DEPTH_SHIFT
        if depth < rule.depth and (tail < budget or least_child < keys[tail - 1]):
            _load_path(work.text, keys, end, head + 1, depth)
            tail = _expand(index, rule, work, begin, end, head + 1, depth, work.probs[head], tail, max_level)
        head += 1
    return tail


@leaf_kernel
def _load_path(text: Any, keys: Any, end: Any, slot: Any, depth: Any) -> Any:
    """Write the tokens from the root to a node behind the context."""
    while slot > 0:
        key = keys[slot - 1]
        depth -= 1
        text[end + depth] = (key >> _TOKEN_SHIFT) & _TOKEN_MASK
        slot = key & _PARENT_MASK


@leaf_kernel
def _expand(
    index: Any, rule: Any, work: Any, begin: Any, end: Any, slot: Any, depth: Any, prob: Any, tail: Any, max_level: Any
) -> Any:
    """Share a node's probability out to the tokens that may follow it and enter them; return the new tail.

    Suffixes with equal counts have the same occurrences, so those are read once, for the sum of the shares.
    """
    floor = rule.floor if tail < len(work.keys) else max(rule.floor, work.probs[tail - 1])
    parent = work.keys[slot - 1] & _PARENT_MASK if slot > 0 else 0
    top = min(work.lengths[parent, 0] + 1, end + depth - begin) if slot > 0 else work.lengths[0, 0]
    work.lengths[slot, 0] = 0
    remaining, share = prob, 0.0
    count, kinds = np.int64(0), 0.0
    found, runs = 0, 0
    for length in range(top, rule.min_match - 1, -1):
        ranges = work.ranges[slot, length]
        if slot == 0 and length == top:
            occurrences = _count(ranges)  # the longest match, found before
        else:
            occurrences = _occurrences(index, work, end + depth, slot, parent, length)
        if occurrences == 0:
            continue
        if work.lengths[slot, 0] == 0:
            work.lengths[slot, 0] = length
        work.lengths[slot, 1] = length
        if occurrences != count:
            _hand_out(work, runs, share)
            share, count = 0.0, occurrences
            reads = min(count, np.int64(rule.rows * remaining) + 1, len(work.tokens) - found - 2 * len(ranges))
            if reads <= 0:
                runs = 0
                break
            found, runs, distinct = _read(index, work, ranges, length, count, reads, found)
            kinds = np.float64(distinct)
            if reads < count:
                kinds *= (count / reads) ** rule.gamma
        kept = remaining * (count / (count + rule.beta * kinds + rule.alpha))
        share += kept
        remaining -= kept
        if remaining <= floor:
            break
    _hand_out(work, runs, share)
    for i in range(found):
        work.table[work.cells[i]] = -1
        tail = _enter(work, tail, work.tokens[i], work.masses[i], depth + 1, slot, max_level)
    return tail


@leaf_kernel
def _occurrences(index: Any, work: Any, stop: Any, slot: Any, parent: Any, length: Any) -> Any:
    """Find the rows of one suffix of a node's text, from its parent's rows if they are known; return their number."""
    ranges = work.ranges[slot, length]
    if slot > 0 and length > work.lengths[parent, 1]:
        return _narrow_suffix(index, work.text, stop, length, work.ranges[parent, length - 1], ranges)
    return _find_suffix(index, work.text, stop, length, ranges)


@leaf_kernel
def _read(index: Any, work: Any, ranges: Any, offset: Any, count: Any, reads: Any, found: Any) -> Any:
    """Read the tokens that follow the rows of one suffix, `reads` of `count` rows, evenly spaced.

    Returns:
        The candidates so far, the runs of equal tokens in `work.run_places` and `work.run_shares`, and the
        distinct tokens read (the end of a document is one of them, though never a candidate).
    """
    runs, distinct, ended = 0, 0, 0
    for segment in range(len(ranges)):
        lo = ranges[segment, 0]
        size = ranges[segment, 1] - lo
        if size == 0:
            continue
        base = index.segments[segment, 0]
        part = size if reads == count else max(1, reads * size // count)
        step = np.float64(size) / part
        share = step / count
        run, token = 0, np.int64(-1)
        for i in range(part + 1):
            read = np.int64(-1)
            if i < part:
                row = lo + np.int64((i + 0.5) * step)
                read = np.int64(index.tokens[base + index.suffixes[base + row] + offset])
            if read != token and run > 0:
                if token < index.vocab_size:
                    place = _candidate(work, found, token)
                    found = max(found, place + 1)
                    distinct += work.stamps[place] != offset
                    work.stamps[place] = offset
                    work.run_places[runs] = place
                    work.run_shares[runs] = run * share
                    runs += 1
                else:
                    ended = 1
                run = 0
            token = read
            run += 1
    return found, runs, distinct + ended


@leaf_kernel
def _candidate(work: Any, found: Any, token: Any) -> Any:
    """Return the place of a token among the candidates; `found`, if it is a new one."""
    mask = len(work.table) - 1
    cell = ((token * 0x9E3779B1) >> 7) & mask
    while work.table[cell] >= 0:
        if work.tokens[work.table[cell]] == token:
            return np.int64(work.table[cell])
        cell = (cell + 1) & mask
    work.table[cell] = found
    work.cells[found] = cell
    work.tokens[found] = token
    work.masses[found] = 0.0
    work.stamps[found] = -1
    return np.int64(found)


@leaf_kernel
def _hand_out(work: Any, runs: Any, share: Any) -> Any:
    """Give the candidates of the rows last read their parts of a share of probability."""
    for i in range(runs):
        work.masses[work.run_places[i]] += share * work.run_shares[i]


@leaf_kernel
def _enter(work: Any, tail: Any, token: Any, prob: Any, depth: Any, parent: Any, max_level: Any) -> Any:
    """Put a node in its place among the keys, dropping the last of a full array; return the new tail."""
    keys, probs = work.keys, work.probs
    full = tail == len(keys)
    if full and prob < LEVEL_BOUNDS[keys[tail - 1] >> _LEVEL_SHIFT]:
        return tail
    level = _level(prob)
    if level > max_level:
        return tail
    key = (((((np.int64(level) << _DEPTH_BITS) | depth) << _TOKEN_BITS) | token) << _PARENT_BITS) | parent
    if full:
        if key > keys[tail - 1]:
            return tail
        tail -= 1
    place = tail
    while place > 0 and keys[place - 1] > key:
        keys[place] = keys[place - 1]
        probs[place] = probs[place - 1]
        place -= 1
    keys[place] = key
    probs[place] = prob
    return tail + 1


@leaf_kernel
def _level(prob: Any) -> Any:
    """Return the level of a probability: the first whose bound it reaches, 256 if none.

    The logarithm only guesses: what decides is the comparison with the bounds, the same on every machine.
    """
    if prob < LEVEL_BOUNDS[_LEVELS - 1]:
        return _LEVELS
    level = max(0, np.int64(0.5 - LEVELS_PER_OCTAVE * math.log2(prob)))
    while level > 0 and prob >= LEVEL_BOUNDS[level - 1]:
        level -= 1
    while prob < LEVEL_BOUNDS[level]:
        level += 1
    return level
