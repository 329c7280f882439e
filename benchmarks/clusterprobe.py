"""The map stages of a build in one way, in a fresh process: `python -m benchmarks.clusterprobe JSON`.

Used by benchmarks.cluster.
"""

import functools
import hashlib
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.buildprobe import Phase, warm_up_sorting
from benchmarks.measure import pin_to_one_core
from draftstore.cluster import DaskPool, open_pool
from draftstore.mapping import Pool
from draftstore.search.ngrams import count_ngrams
from draftstore.storage.manifest import load_manifest
from draftstore.stores.crest import counts as counts_module
from draftstore.stores.crest.counts import build_counts
from draftstore.stores.rest import segments as segments_module
from draftstore.stores.rest.build import Progress, RestOptions, build_rest
from draftstore.text.tokenizer import load_tokenizer
from draftstore.text.tokenizing import CorpusOptions, build_tokens

COUNTED_ROWS = 1 << 20
"""Rows of a range of first tokens: small enough for several ranges in a short run, and the same in all ways."""


IDLE_SECONDS = 4.0


class Stages:
    """Wall and processor seconds of the stages, of this process and of all that work for it.

    A cluster that waits is not idle: its processes talk to each other. What that takes grows with time, not with the
    work.
    """

    def __init__(self, pool: Pool | None) -> None:
        self._pool = pool
        self.figures: dict[str, Any] = {}
        busy = self._busy()
        time.sleep(IDLE_SECONDS)
        self.idle = (self._busy() - busy) / IDLE_SECONDS

    def measure(self, name: str, phase: Phase, work: Callable[[], object]) -> None:
        """Do the work of a stage; its map part is what `phase` hears of."""
        busy, begin = self._busy(), time.perf_counter()
        phase.begin = begin
        work()
        self.figures[name] = {
            "map_seconds": phase.seconds,
            "seconds": round(time.perf_counter() - begin, 2),
            "processor_seconds": round(self._busy() - busy, 2),
            "idle_seconds": round(self.idle * (time.perf_counter() - begin), 2),
        }

    def _busy(self) -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = time.process_time() + children.ru_utime + children.ru_stime
        workers = self._pool.client.run(time.process_time) if isinstance(self._pool, DaskPool) else {}
        return float(found + sum(workers.values()))


def load_and_count(tokenizer: str) -> None:
    """Import and load all that stages need, in this process, and compile kernels if an install is new."""
    text = load_tokenizer(tokenizer)
    warm_up_sorting(text.vocab_size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "c.txt").write_text("to be or not to be")
        build_rest(RestOptions((folder / "c.txt",), "warm"), text, folder / "rest", workers=1)
        build_counts(folder / "rest", folder / "counts")


def warm_up(tokenizer: str, pool: Pool | None) -> None:
    """Prepare this process and the workers, outside of what is timed."""
    load_and_count(tokenizer)
    if isinstance(pool, DaskPool):
        pool.client.run(load_and_count, tokenizer)


def measure_build(
    inputs: list[str], tokenizer: str, out: str, segment_tokens: int, cluster: str | None, cores: int
) -> dict[str, Any]:
    """Tokenize, sort and count, each from nothing, on one core, on all, or on a cluster that has started."""
    if cores == 1:
        pin_to_one_core()
    in_ranges = functools.partial(count_ngrams, part_rows=COUNTED_ROWS)
    vars(counts_module).update(PART_ROWS=COUNTED_ROWS, count_ngrams=in_ranges)
    if cores == 1:
        segments_module.SMALL_TOKENS = 1 << 62  # sorted in this process
    paths = tuple(map(Path, inputs))
    tokens, rest, counts = (Path(out) / name for name in ("tokens", "rest", "counts"))
    text = load_tokenizer(tokenizer, name=Path(tokenizer).name)
    options = RestOptions(paths, "cluster", segment_tokens=segment_tokens)
    begin = time.perf_counter()
    with open_pool(cluster) as pool:
        started = time.perf_counter() - begin
        warm_up(tokenizer, pool)
        stages, tokenizing, sorting, counting = Stages(pool), Phase(), Phase(), Phase()
        stages.measure(
            "tokenize",
            tokenizing,
            lambda: build_tokens(
                CorpusOptions(paths, "cluster"), text, tokens, pool=pool, on_progress=tokenizing
            ),
        )
        progress = Progress(sorted=sorting)
        stages.measure(
            "sort",
            sorting,
            lambda: build_rest(
                options, text, rest, tokens=tokens, workers=cores, pool=pool, progress=progress
            ),
        )
        stages.measure("count", counting, lambda: build_counts(rest, counts, pool=pool, progress=counting))
    files = {**load_manifest(rest).files, **load_manifest(counts).files}
    listing = json.dumps({name: entry.sha256 for name, entry in sorted(files.items())})
    return {
        "tokens": load_manifest(rest).counts["tokens"],
        "segments": load_manifest(rest).counts["segments"],
        "start_seconds": round(started, 2),
        "stages": stages.figures,
        "digest": hashlib.sha256(listing.encode()).hexdigest(),
    }


if __name__ == "__main__":
    print(json.dumps(measure_build(**json.loads(sys.argv[1]))))
