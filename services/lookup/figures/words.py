"""Layout of a process's counters in shared memory: int64 words, see `services.lookup.figures.counting`.

A slot, the part of one process, is a head and `RELEASES + 1` entries. Entry 0 counts requests that belong to no served
release (unknown names, broken requests); the others count one release each, in the order of first use.
"""

from itertools import accumulate

from draftstore.remote.wire import Status

RELEASES = 127
"""Maximum releases with their own counters in a worker's life; further ones count as none."""

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Contexts of a request, upper bounds; one more bucket is above them, as in every histogram here."""
MATCH_BUCKETS = tuple(range(17))
"""Match lengths in tokens; 0 is a miss."""
SECONDS_BUCKETS = (
    25e-6, 50e-6, 75e-6, 100e-6, 150e-6, 250e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3,
)  # fmt: skip
"""Seconds from the arrival of a whole request to its answer."""

WORD = 8
NAME_WORDS = 32
"""Words of a release's name: up to 255 bytes in a frame, and a terminating zero."""
LABEL_WORDS = 4


def _offsets(*sizes: int) -> tuple[int, ...]:
    """Return the offsets of fields with the given sizes, and the end of the last."""
    return tuple(accumulate(sizes, initial=0))


# The head of a slot.
(
    PID, STATE, HEARTBEAT, RESTARTS, IN_FLIGHT, CONNECTIONS, WAITING, READ, CATALOGUE, AWAY, USED, HEAD,
) = _offsets(*[1] * 11)  # fmt: skip

# An entry. The number of queries is the sum of its batches, that of contexts the sum of its matches.
(
    VERSION, NAME, KIND, BUILD, TOKENIZER, READY, MISSES, NODES, REQUESTED, ANSWERED, SWAPS, UNOPENED, LATENCY_SUM,
    FAILURES, BATCHES, MATCHES, LAPSES, ENTRY,
) = _offsets(
    1, NAME_WORDS, LABEL_WORDS, LABEL_WORDS, LABEL_WORDS, *[1] * 8,
    len(Status), len(BATCH_BUCKETS) + 1, len(MATCH_BUCKETS) + 1, len(SECONDS_BUCKETS) + 1,
)  # fmt: skip

SLOT = HEAD + (RELEASES + 1) * ENTRY


def entry_of(slot: memoryview, position: int) -> memoryview:
    """Return an entry of a slot."""
    start = HEAD + position * ENTRY
    return slot[start : start + ENTRY]


def read_text(words: memoryview) -> str:
    """Return zero-terminated text."""
    return bytes(words).partition(b"\0")[0].decode(errors="replace")


def write_text(words: memoryview, text: str) -> None:
    """Write text, truncated to what fits, with a terminating zero."""
    space = words.nbytes
    words.cast("B")[:] = text.encode()[: space - 1].ljust(space, b"\0")
