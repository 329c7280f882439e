"""Candidates of a node, the tokens that follow the occurrences of a suffix, and their probabilities."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import kernel, leaf_kernel
from draftstore.search.suffix import token_at


class Candidates(NamedTuple):
    """The candidates of one node, with a hash table from tokens to indices.

    Attributes:
        table: int32 [power of two], index of the candidate whose token hashes here; -1: free.
        cells: int64 [room], slot of each candidate in the table.
        tokens: int64 [room].
        probs: float64 [room].
        stamps: int64 [room], length of the last suffix that each was seen after.
        run_places: int64 [room], candidate of each run of equal tokens in the rows last read.
        run_shares: float64 [room], fraction of the rows in each run.
    """

    table: NDArray[np.int32]
    cells: NDArray[np.int64]
    tokens: NDArray[np.int64]
    probs: NDArray[np.float64]
    stamps: NDArray[np.int64]
    run_places: NDArray[np.int64]
    run_shares: NDArray[np.float64]


@kernel
def new_candidates(room: Any) -> Any:
    """Return an empty table for at most `room` candidates, at most half full."""
    size = 64
    while size < 2 * room:
        size *= 2
    return Candidates(
        np.full(size, -1, np.int32),
        np.empty(room, np.int64),
        np.empty(room, np.int64),
        np.empty(room, np.float64),
        np.empty(room, np.int64),
        np.empty(room, np.int64),
        np.empty(room, np.float64),
    )


@leaf_kernel
def read_following(
    index: Any, candidates: Any, ranges: Any, offset: Any, count: Any, reads: Any, found: Any
) -> Any:
    """Read the tokens that follow the rows of one suffix, `reads` of `count` rows, evenly spaced.

    Returns:
        The number of candidates so far, the number of runs of equal tokens in `run_places` and `run_shares`, and the
        distinct tokens read (the end of a document counts as one, but is never a candidate).
    """
    runs, distinct, ended = 0, 0, 0
    for segment in range(len(ranges)):
        lo = np.int64(ranges[segment, 0])
        size = ranges[segment, 1] - lo
        if size == 0:
            continue
        base, n = index.segments[segment, 0], index.segments[segment, 1]
        part = size if reads == count else max(1, reads * size // count)
        step = np.float64(size) / part
        share = step / count
        begin = np.int64(0)
        token = _following(index, base, n, lo + np.int64(0.5 * step), offset)
        # Only a damaged store, with rows out of order, has more runs than room.
        while begin < part and runs < len(candidates.run_places):
            end, after = _run_end(index, base, n, lo, begin, part, step, offset, token)
            if token < index.vocab_size:
                place = place_of(candidates, found, token)
                found = max(found, place + 1)
                distinct += candidates.stamps[place] != offset
                candidates.stamps[place] = offset
                candidates.run_places[runs] = place
                candidates.run_shares[runs] = (end - begin) * share
                runs += 1
            else:
                ended = 1
            begin, token = end, after
    return found, runs, distinct + ended


@leaf_kernel
def _following(index: Any, base: Any, n: Any, row: Any, offset: Any) -> Any:
    """Return the token after a row's first `offset` ones; `vocab_size` at the end of the document or segment."""
    token = token_at(index.tokens, base, n, np.int64(index.suffixes[base + row]) + offset)
    return token if token >= 0 else np.int64(index.vocab_size)


@leaf_kernel
def _run_end(
    index: Any, base: Any, n: Any, lo: Any, begin: Any, part: Any, step: Any, offset: Any, token: Any
) -> Any:
    """Return the end of the run of `token` that starts at a read, and the token after it.

    The tokens after the rows are sorted, so the end of a run is found by galloping and bisection.
    """
    last, stride = begin, np.int64(1)
    after = token
    while last + stride < part:
        after = _following(index, base, n, lo + np.int64((last + stride + 0.5) * step), offset)
        if after != token:
            break
        last += stride
        stride *= 2
    high = min(last + stride, part)
    if high == part:
        after = token
    while high - last > 1:
        middle = (last + high) // 2
        read = _following(index, base, n, lo + np.int64((middle + 0.5) * step), offset)
        if read == token:
            last = middle
        else:
            high, after = middle, read
    return high, after


@leaf_kernel
def place_of(candidates: Any, found: Any, token: Any) -> Any:
    """Return the index of a token among the candidates; `found` if it is new."""
    mask = len(candidates.table) - 1
    cell = ((token * 0x9E3779B1) >> 7) & mask
    while candidates.table[cell] >= 0:
        if candidates.tokens[candidates.table[cell]] == token:
            return np.int64(candidates.table[cell])
        cell = (cell + 1) & mask
    candidates.table[cell] = found
    candidates.cells[found] = cell
    candidates.tokens[found] = token
    candidates.probs[found] = 0.0
    candidates.stamps[found] = -1
    return np.int64(found)


@leaf_kernel
def hand_out(candidates: Any, runs: Any, share: Any) -> Any:
    """Distribute a share of probability to the candidates of the rows last read."""
    for i in range(runs):
        candidates.probs[candidates.run_places[i]] += share * candidates.run_shares[i]


@leaf_kernel
def clear_table(candidates: Any, found: Any) -> Any:
    """Remove the first `found` candidates from the table."""
    for i in range(found):
        candidates.table[candidates.cells[i]] = -1
