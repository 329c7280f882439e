"""One measurement for benchmarks.growth, in a fresh process: `python -m benchmarks.growthprobe JSON`.

The memory of a build is watched from outside, over all processes that it starts: `watched`.
"""

import gc
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.measure import (
    cpu_seconds,
    percentiles,
    time_calls,
    undisturbed,
)
from draftstore.jit import read_only
from draftstore.search.suffix import SuffixIndex, index_segment, key_layout, segment_table
from draftstore.storage.manifest import TOKENIZER_FOLDER
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.rest.segments import Piece, lay_out, read_segments, sort_segments
from draftstore.stores.rest.store import KIND, STRATEGIES, RestDrafter, RestStore, read_digests
from draftstore.text.sealing import seal_store
from draftstore.text.tokenizer import load_tokenizer
from draftstore.text.tokens import sentinel

KEPT = 100
"""Most common ids, the same in every copy of a text."""
EVERY = 0.05
"""Seconds between two looks at the memory."""


def measure_crest(rest: str, out: str, megabytes: int) -> dict[str, Any]:
    """Distil a CREST store of at most so many megabytes and time it."""
    begin, spent = perf_counter(), cpu_seconds()
    options = CrestOptions(Path(out).name, max_bytes=megabytes * 1_000_000)
    built = build_crest(options, Path(rest), Path(out), overwrite=True)
    return {
        "build_seconds": round(perf_counter() - begin, 1),
        "cpu_seconds": round(cpu_seconds() - spent, 1),
        "entries": built.manifest.counts["entries"],
        "bytes": built.manifest.parameters["lmdb_bytes"],
    }


def measure_segments(store: str, contexts: str, counts: Sequence[int]) -> dict[str, dict[str, float]]:
    """Time drafts of one store's tokens, sorted anew in so many segments, on one core; by that number."""
    index = RestStore.open(Path(store)).index
    prompts = np.load(contexts)
    found = {}
    for count in counts:
        cut = cut_index(index.tokens, index.vocab_size, count)
        drafter = RestDrafter(cut, STRATEGIES["backoff"])
        drafter.warm_up()
        with undisturbed():
            times = time_calls([drafter.session(prompt[prompt >= 0]).propose for prompt in prompts])
        found[str(len(cut.segments))] = percentiles(times)
    return found


def cut_index(tokens: NDArray[Any], vocab_size: int, count: int) -> SuffixIndex:
    """Return an index of tokens in about so many segments of equal size, each of whole documents."""
    ends = np.flatnonzero(tokens == sentinel(tokens.dtype)) + 1
    cuts = np.unique(ends[np.searchsorted(ends, np.linspace(0, len(tokens), count + 1)[1:])])
    parts = [index_segment(part, vocab_size) for part in np.split(tokens, cuts[:-1])]
    suffixes, keys, first_rows = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    segments = segment_table(np.diff(cuts, prepend=0))[:-1]
    return SuffixIndex(
        read_only(np.ascontiguousarray(tokens)),
        read_only(suffixes),
        read_only(keys),
        read_only(first_rows.reshape(len(parts), -1)),
        read_only(segments),
        vocab_size,
        *key_layout(vocab_size),
    )


def measure_repeat(store: str, out: str, tokens: int) -> dict[str, float]:
    """Make a store of at least so many tokens from another one's first segment; return the seconds of the steps."""
    base, path = RestStore.open(Path(store)), Path(out)
    tokenizer, size = load_tokenizer(base.path / TOKENIZER_FOLDER), base.index.vocab_size
    path.parent.mkdir(parents=True, exist_ok=True)
    plan = {"plan": {"kind": KIND}}
    steps: dict[str, Callable[[], object]] = {
        "lay out": lambda: lay_out(path, _copies(base, tokens), size, tokens),
        "sort": lambda: sort_segments(
            path, range(len(read_segments(path))), size, os.cpu_count() or 1, lambda _done, _all: None
        ),
        "hash": lambda: seal_store(
            path, path.name, tokenizer, plan, base.manifest.corpus, base.manifest.counts
        ),
    }
    return {name: round(time_calls([step])[0] / 1e6, 1) for name, step in steps.items()}


def _copies(store: RestStore, tokens: int) -> Iterator[list[Piece]]:
    """Yield segments of together at least so many tokens: the first one of a store, each time with other ids."""
    base, length, _ = store.index.segments[0].tolist()
    text = np.asarray(store.index.tokens[base : base + length])
    counts = np.bincount(text, minlength=np.iinfo(text.dtype).max + 1)
    rare = np.setdiff1d(np.arange(store.index.vocab_size), np.argsort(-counts)[:KEPT])
    digests = read_digests(store.path, store.manifest)
    assert digests is not None
    own = digests[: int(counts[sentinel(text.dtype)])]
    for copy in range(-(-tokens // length)):
        table = np.arange(len(counts), dtype=text.dtype)
        if copy:
            table[rare] = np.random.default_rng(copy).permutation(rare)
        yield [Piece(table[text], np.ascontiguousarray(own ^ np.uint8(copy)))]


def measure_cold(store: str, contexts: str, queries: int) -> dict[str, dict[str, float]]:
    """Draft with nothing of a store in memory: bytes that a draft reads from the disk, and its µs with these reads.

    The system reads ahead around each page that is missing.
    """
    RestStore.open(Path(store)).drafter("backoff").warm_up()
    bytes_read, times = [], []
    for prompt in np.load(contexts)[:queries]:
        _forget_files(Path(store))
        opened = RestStore.open(Path(store))
        session = opened.drafter("backoff").session(prompt[prompt >= 0])
        before = psutil.Process().io_counters().read_bytes
        times += time_calls([session.propose])
        bytes_read.append(psutil.Process().io_counters().read_bytes - before)
        del session
        opened.close()
    return {"bytes": percentiles(bytes_read), "us": percentiles(times)}


def _forget_files(folder: Path) -> None:
    """Let the system drop what it keeps of files in memory, but for pages that a process has mapped."""
    gc.collect()  # maps of stores that were closed
    for path in folder.glob("*.bin"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def watched() -> Iterator[dict[str, int]]:
    """Watch the memory of the processes that are started meanwhile; the peaks are there when the block ends.

    Yields:
        `peak_anonymous`, bytes that only they hold; `peak_resident`, those and the pages of files that they map, which
        the system may take back. A page that two of them map counts twice.
    """
    peaks = {"peak_anonymous": 0, "peak_resident": 0}
    ended = threading.Event()

    def look() -> None:
        own = psutil.Process()
        while not ended.wait(EVERY):
            held = [_held(process) for process in own.children(recursive=True)]
            peaks["peak_anonymous"] = max(peaks["peak_anonymous"], sum(each for each, _ in held))
            peaks["peak_resident"] = max(peaks["peak_resident"], sum(each for _, each in held))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield peaks
    finally:
        ended.set()
        watcher.join()


def _held(process: psutil.Process) -> tuple[int, int]:
    """Return the anonymous and all resident bytes of a process; nothing if it has ended."""
    with suppress(psutil.Error):
        memory = process.memory_info()
        return memory.rss - memory.shared, memory.rss
    return 0, 0


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    measures: dict[str, Any] = {
        "crest": measure_crest,
        "segments": measure_segments,
        "cold": measure_cold,
        "repeat": measure_repeat,
    }
    print(json.dumps(measures[arguments.pop("what")](**arguments)))
