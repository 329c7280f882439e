"""A growing text with an index of its n-grams, and the draft tree of their continuations: kernels of requests.

Each n-gram length in `LENGTHS` has a hash table, whose slots start linked lists of occurrences, latest first. Tables
and lists hold only positions in the text, where the n-grams themselves can be read.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import require_limits
from draftstore.jit import kernel, leaf_kernel
from draftstore.search.candidates import clear_table, new_candidates, place_of
from draftstore.search.expand import LIMITS, enter_all, floor_of, load_path
from draftstore.trees.frontier import MAX_DEPTH, finish, grow, new_frontier

LENGTHS = (1, 2, 4, 8)
"""Lengths of the indexed n-grams; longer matches are found among the occurrences of the longest."""
MAX_ROWS = 4096
_SCATTER = 0x1E3779B97F4A7C15


class RequestRule(NamedTuple):
    """Parameters of drafts from the text, see `draftstore.search.expand.Rule`, tuned as docs/findings.md says.

    Attributes:
        rows: occurrences read of each indexed n-gram, latest first.
        doubt: probability that a node's text goes on as no occurrence did, however many agree. Without it long copies
            get twice the probability that they deserve, since what ends one is not in the text.
    """

    max_match: int = 32
    depth: int = MAX_DEPTH
    rows: int = 32
    floor: float = 0.01
    alpha: float = 0.0
    beta: float = 2.0
    doubt: float = 0.02

    def check(self) -> None:
        """Refuse invalid values, with a DraftstoreError."""
        limits = LIMITS | {"rows": (1, MAX_ROWS), "doubt": (0, 1)}
        require_limits(
            "a rule of requests", {name: (value, *limits[name]) for name, value in self._asdict().items()}
        )


class _History(NamedTuple):
    """A text and the occurrences of its n-grams; an n-gram's position is that of its last token."""

    tokens: NDArray[np.int32]  # [capacity]
    links: NDArray[
        np.int32
    ]  # [len(LENGTHS), capacity], previous occurrence of the n-gram at this position; -1: none
    heads: NDArray[
        np.int32
    ]  # [len(LENGTHS), power of two], latest position of the n-grams with this hash; -1: free
    size: int  # tokens of the text


class _Scratch(NamedTuple):
    """Buffers for the current node."""

    text: NDArray[np.int64]  # [max_match + depth], the last tokens of the text, followed by the path
    firsts: NDArray[np.int64]  # [len(LENGTHS)], latest occurrence of the n-grams that end here; -1: none
    counts: NDArray[np.int64]  # [max_match + 1], occurrences read, by match length
    kinds: NDArray[np.int64]  # [max_match + 1], candidates, by length of their longest match
    shares: NDArray[np.float64]  # [max_match + 1], share of an occurrence, by match length
    places: NDArray[np.int64]  # [room], candidate of each occurrence read
    lengths: NDArray[np.int64]  # [room], its match length


@kernel
def append_tokens(tokens: Any, links: Any, heads: Any, size: Any, ids: Any) -> Any:
    """Append ids to a text with enough room, see `_History`; return its new size."""
    for token in ids:
        tokens[size] = token
        size += 1
        key, order = np.int64(0), 0
        for length in range(1, min(size, LENGTHS[-1]) + 1):
            key = _mix(key, tokens[size - length])
            if length == LENGTHS[order]:
                cell = _find_cell(heads, order, tokens, tokens, size, key)
                links[order, size - 1] = heads[order, cell]
                heads[order, cell] = size - 1
                order += 1
    return size


@kernel
def draft_text(
    tokens: Any, links: Any, heads: Any, size: Any, packed_rule: Any, budget: Any, max_level: Any
) -> Any:
    """Grow a draft tree for the text of a `_History`, by a RequestRule as float64 [7]; return its arrays."""
    history = _History(tokens, links, heads, size)
    rule = RequestRule(
        int(packed_rule[0]), int(packed_rule[1]), int(packed_rule[2]),
        packed_rule[3], packed_rule[4], packed_rule[5], packed_rule[6],
    )  # fmt: skip
    room = len(LENGTHS) * rule.rows
    scratch = _Scratch(
        np.empty(rule.max_match + rule.depth, np.int64), np.empty(len(LENGTHS), np.int64),
        np.empty(rule.max_match + 1, np.int64), np.empty(rule.max_match + 1, np.int64),
        np.empty(rule.max_match + 1, np.float64), np.empty(room, np.int64), np.empty(room, np.int64),
    )  # fmt: skip
    nodes = new_frontier(budget)
    end = min(size, rule.max_match)
    scratch.text[:end] = tokens[size - end : size]
    state = history, rule, scratch, new_candidates(room), end
    return finish(nodes, grow(nodes, rule.depth, _enter_following, state, max_level))


@leaf_kernel
def _mix(key: Any, token: Any) -> Any:
    """Return the key of an n-gram extended to the left by a token."""
    return (key + token + 1) * _SCATTER


@leaf_kernel
def _find_cell(heads: Any, order: Any, tokens: Any, text: Any, stop: Any, key: Any) -> Any:
    """Return the slot of the n-gram that ends before `stop` in `text`: its own, or a free one."""
    mask = heads.shape[1] - 1
    cell = (key ^ (key >> 29)) & mask
    while heads[order, cell] >= 0:
        length = LENGTHS[order]
        if _match(tokens, np.int64(heads[order, cell]), text, stop, 0, length) == length:
            break
        cell = (cell + 1) & mask
    return cell


@leaf_kernel
def _match(tokens: Any, place: Any, text: Any, stop: Any, length: Any, most: Any) -> Any:
    """Return the match length, at most `most`, of the texts before a position and before `stop`; at least `length`."""
    most = min(most, place + 1)
    while length < most and tokens[place - length] == text[stop - 1 - length]:
        length += 1
    return length


@leaf_kernel
def _enter_following(
    state: Any, nodes: Any, slot: Any, _parent: Any, depth: Any, prob: Any, tail: Any, max_level: Any
) -> Any:
    history, rule, scratch, candidates, end = state
    floor, stop = floor_of(nodes, tail, rule.floor), end + depth
    load_path(scratch.text, nodes, stop, slot)
    found = _gather(history, rule, scratch, candidates, stop, prob, floor)
    return enter_all(nodes, candidates, found, tail, depth + 1, slot, max_level)


@leaf_kernel
def _gather(history: Any, rule: Any, scratch: Any, candidates: Any, stop: Any, prob: Any, floor: Any) -> Any:
    """Distribute a node's probability to the tokens that may follow; return the number of candidates."""
    upper = min(stop, rule.max_match)
    _look_up(history, scratch, stop, upper)
    found, seen, count, kinds = 0, 0, np.int64(0), np.int64(0)
    remaining = prob * (1.0 - rule.doubt)
    for order in range(len(LENGTHS) - 1, -1, -1):
        if scratch.firsts[order] < 0:
            continue
        found, seen = _read(history, rule, scratch, candidates, stop, order, upper, found, seen)
        for length in range(upper, LENGTHS[order] - 1, -1):
            count += scratch.counts[length]
            kinds += scratch.kinds[length]
            if count > 0:
                taken = remaining * (count / (count + rule.beta * kinds + rule.alpha))
                scratch.shares[length] = taken / count
                remaining -= taken
                if remaining <= floor:
                    break
        if count > 0 and remaining <= floor:
            break
        upper = LENGTHS[order] - 1
    _hand_out(scratch, candidates, seen)
    clear_table(candidates, found)
    return found


@leaf_kernel
def _look_up(history: Any, scratch: Any, stop: Any, most: Any) -> Any:
    """Find the latest occurrences of the n-grams that end before `stop`, and reset the buffers."""
    scratch.counts[:] = 0
    scratch.kinds[:] = 0
    scratch.shares[:] = 0.0
    scratch.firsts[:] = -1
    key, order = np.int64(0), 0
    for length in range(1, min(most, LENGTHS[-1]) + 1):
        key = _mix(key, scratch.text[stop - length])
        if length == LENGTHS[order]:
            cell = _find_cell(history.heads, order, history.tokens, scratch.text, stop, key)
            scratch.firsts[order] = history.heads[order, cell]
            if scratch.firsts[order] < 0:
                break  # longer n-grams cannot occur either
            order += 1


@leaf_kernel
def _read(
    history: Any, rule: Any, scratch: Any, candidates: Any, stop: Any, order: Any, upper: Any, found: Any,
    seen: Any,
) -> Any:  # fmt: skip
    """Read the last occurrences of an n-gram that match at most `upper` tokens; return candidates and reads so far."""
    place, rows = scratch.firsts[order], 0
    longest = min(stop, rule.max_match)
    while place >= 0 and rows < rule.rows:
        if place + 1 < history.size:
            rows += 1
            length = _match(
                history.tokens, place, scratch.text, stop, LENGTHS[order], min(upper + 1, longest)
            )
            if length <= upper:
                candidate = place_of(candidates, found, np.int64(history.tokens[place + 1]))
                found = max(found, candidate + 1)
                before = candidates.stamps[candidate]
                if length > before:
                    scratch.kinds[length] += 1
                    candidates.stamps[candidate] = length
                    if before > 0:
                        scratch.kinds[before] -= 1
                scratch.places[seen] = candidate
                scratch.lengths[seen] = length
                scratch.counts[length] += 1
                seen += 1
        place = np.int64(history.links[order, place])
    return found, seen


@leaf_kernel
def _hand_out(scratch: Any, candidates: Any, seen: Any) -> Any:
    """Give each occurrence the shares of its match length and of all shorter ones."""
    total = 0.0
    for length in range(len(scratch.shares)):
        total += scratch.shares[length]
        scratch.shares[length] = total
    for i in range(seen):
        candidates.probs[scratch.places[i]] += scratch.shares[scratch.lengths[i]]
