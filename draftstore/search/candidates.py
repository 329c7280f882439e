"""The candidates of a node: the tokens that follow the occurrences of a suffix, with their probabilities."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import kernel, leaf_kernel
from draftstore.search.rows import BLOCK, following, run_end


class Candidates(NamedTuple):
    """The candidates of one node, at most `room`, with a hash table from tokens to indices.

    Attributes:
        table: index of the candidate whose token hashes here; -1: free.
        cells: slot of each candidate in the table.
        stamps: length of the last suffix after which each was seen.
        block: tokens of the current block of reads.
        run_places: candidate of each run of equal tokens in the rows last read; `run_shares` is its share of the rows.
    """

    table: NDArray[np.int32]
    cells: NDArray[np.int64]
    tokens: NDArray[np.int64]
    probs: NDArray[np.float64]
    stamps: NDArray[np.int64]
    block: NDArray[np.int64]
    run_places: NDArray[np.int64]
    run_shares: NDArray[np.float64]


@kernel
def new_candidates(room):
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
        np.empty(BLOCK, np.int64),
        np.empty(room + BLOCK, np.int64),
        np.empty(room + BLOCK, np.float64),
    )


@leaf_kernel
def read_following(index, candidates, rows, steps, offset, count, found):
    """Read the tokens that follow the rows of a suffix of `offset` tokens (see `Matches`) and add them as candidates.

    Returns the number of candidates so far, the number of runs of equal tokens in `run_places` and `run_shares`, and
    the distinct tokens read (the end of a document counts as one, but is never a candidate).
    """
    block, runs, distinct, ended = candidates.block, 0, 0, 0
    for segment in range(len(rows)):
        first, at, end = np.int64(rows[segment, 0]), np.int64(rows[segment, 1]), np.int64(rows[segment, 2])
        share = steps[segment] / count
        # Only a damaged store, with rows out of order, has more runs than room.
        while at < end and runs < len(candidates.run_places) - BLOCK:
            size = min(np.int64(BLOCK), end - at)
            for i in range(size):
                block[i] = following(index, segment, first, steps[segment], at + i, offset)
            begin = np.int64(0)
            while begin < size:
                token, stop = block[begin], begin + 1
                while stop < size and block[stop] == token:
                    stop += 1
                if stop == size and at + stop < end:
                    if begin > 0:
                        break  # the run may continue: the next block begins with it
                    stop = run_end(index, segment, first, steps[segment], at, end, offset, token) - at
                if token < index.vocab_size:
                    place = place_of(candidates, found, token)
                    found = max(found, place + 1)
                    distinct += candidates.stamps[place] != offset
                    candidates.stamps[place] = offset
                    candidates.run_places[runs] = place
                    candidates.run_shares[runs] = (stop - begin) * share
                    runs += 1
                else:
                    ended = 1
                begin = stop
            at += begin
    return found, runs, distinct + ended


@leaf_kernel
def place_of(candidates, found, token):
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
def hand_out(candidates, runs, share):
    """Distribute a share of probability to the candidates of the rows last read."""
    for i in range(runs):
        candidates.probs[candidates.run_places[i]] += share * candidates.run_shares[i]


@leaf_kernel
def clear_table(candidates, found):
    """Remove the first `found` candidates from the table."""
    for i in range(found):
        candidates.table[candidates.cells[i]] = -1
