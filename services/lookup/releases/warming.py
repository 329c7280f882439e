"""Warming a store before the first request: reads its files into memory, compiles its kernels, drafts once.

Warming runs beside requests in the same process, so it works in pieces of a fraction of a millisecond, reads without
the GIL, and sleeps after each piece: a thread that never sleeps would block a busy processor for milliseconds.
"""

import logging
import time
from collections.abc import Iterable
from pathlib import Path

from draftstore.drafting.contexts import ContextDrafter
from draftstore.live import memory
from draftstore.stores.registry import KINDS, Store, kind_of
from draftstore.trees import batch

LOG = logging.getLogger(__name__)
PIECE = 1 << 20
"""Bytes read at a time."""
REST = 0.001
"""Seconds between two pieces: requests lose a twentieth of their time, not a fifth."""
SHARE = 0.5
"""Fraction of available memory that warming a store may fill."""
SAMPLES = 200
"""Drafts per warm-up."""


def warm_store(store: Store, drafters: Iterable[ContextDrafter]) -> float:
    """Warm a store; return the seconds that its slowest drafter takes for a context in a batch."""
    warm_files(store.path / name for name in store.manifest.files)
    batch.warm_up()
    contexts, hidden = store.samples(SAMPLES)
    slowest = 0.0
    for drafter in drafters:
        drafter.warm_up()
        for rows in (*(slice(row, row + 1) for row in range(len(contexts))), slice(None)):
            begin = time.perf_counter()
            drafter.draft_batch(
                contexts[rows], hidden=None if hidden is None else hidden[rows]
            ).encode_trees()
            seconds = time.perf_counter() - begin
            time.sleep(REST)
        slowest = max(slowest, seconds)
    return slowest / max(len(contexts), 1)


def warm_files(paths: Iterable[Path], most: int | None = None) -> int:
    """Read files into memory, small ones first; return the bytes read."""
    left = most = int(available_memory() * SHARE) if most is None else most
    for path in sorted(paths, key=lambda path: path.stat().st_size):
        with path.open("rb", buffering=0) as file:
            while data := file.read(min(PIECE, left)):
                left -= len(data)
                time.sleep(REST)
    return most - left


def available_memory() -> int:
    """Return the bytes that can be filled without evicting other pages."""
    _, _, rest = Path("/proc/meminfo").read_text(encoding="ascii").partition("MemAvailable:")
    return int(rest.split()[0]) * 1024


def load_kernels() -> None:
    """Compile all lookup kernels or load them from numba's cache, which holds the GIL for a tenth of a second."""
    LOG.info("loading kernels; the first start after an install compiles them, for a minute or two")
    steps = {"trees": batch.warm_up, "live": memory.warm_up}
    steps |= {name: kind_of(name).load_kernels for name in KINDS}
    for name, load in steps.items():
        begin = time.perf_counter()
        load()
        if (seconds := time.perf_counter() - begin) > 1:
            LOG.info("compiled the kernels of %s in %.0f s", name, seconds)
