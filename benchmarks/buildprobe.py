"""One build of a store, phase by phase, in a fresh process: `python -m benchmarks.buildprobe JSON`.

Also the memory that sorting needs, in another fresh process. Used by benchmarks.scale.
"""

import dataclasses
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.measure import cpu_seconds, peak_resident, pin_to_one_core, reset_peak, resident
from draftstore.search.suffix import index_segment
from draftstore.stores.rest.build import Progress, RestOptions, build_rest
from draftstore.stores.rest.store import RestStore
from draftstore.text.tokenizer import load_tokenizer


@dataclasses.dataclass
class Phase:
    """When a phase of a build was first and last heard of, in seconds."""

    begin: float = 0.0
    end: float = 0.0

    def __call__(self, *_totals: int) -> None:
        """Take a report of progress."""
        self.end = perf_counter()
        self.begin = self.begin or self.end

    @property
    def seconds(self) -> float:
        """Duration."""
        return round(self.end - self.begin, 2)


def warm_up_sorting(vocab_size: int) -> None:
    """Load the sorting kernels, or compile them once after an install, outside of what is timed."""
    index_segment(np.random.default_rng(0).integers(0, 3, 1000).astype(np.uint16), vocab_size)


def measure_build(
    inputs: list[str], tokenizer: str, name: str, out: str, workers: int, segment_tokens: int | None = None
) -> dict[str, Any]:
    """Build a store and time it: on one core with one worker, else on all."""
    if workers == 1:
        pin_to_one_core()
    options = RestOptions(corpus=tuple(map(Path, inputs)), name=name)
    if segment_tokens:
        options = dataclasses.replace(options, segment_tokens=segment_tokens)
    text_tokenizer = load_tokenizer(tokenizer, name=Path(tokenizer).name)
    warm_up_sorting(text_tokenizer.vocab_size)
    tokenizing, sorting = Phase(), Phase()
    progress = Progress(tokenized=tokenizing, sorted=sorting)
    begin, spent = perf_counter(), cpu_seconds()
    built = build_rest(options, text_tokenizer, Path(out), overwrite=True, workers=workers, progress=progress)
    seconds = perf_counter() - begin
    counts = built.manifest.counts
    size = sum(path.stat().st_size for path in built.path.rglob("*") if path.is_file())
    return {
        "workers": workers,
        **{key: counts[key] for key in ("documents", "tokens", "entries", "segments")},
        "tokenize_seconds": tokenizing.seconds,
        "sort_seconds": sorting.seconds,
        "other_seconds": round(seconds - tokenizing.seconds - sorting.seconds, 2),
        "build_seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds() - spent, 2),
        "tokenize_tokens_per_second": round(counts["tokens"] / tokenizing.seconds),
        "sort_tokens_per_second": round(counts["entries"] / sorting.seconds),
        "build_tokens_per_second": round(counts["tokens"] / seconds),
        "bytes": size,
        "bytes_per_token": round(size / counts["tokens"], 3),
    }


def measure_sort_memory(store: str) -> dict[str, Any]:
    """Sort the first segment of a store again and measure the peak of memory beyond its tokens."""
    index = RestStore.open(store).index
    warm_up_sorting(index.vocab_size)
    tokens = np.array(index.tokens[: int(index.segments[0, 1])])
    reset_peak()
    before = sum(resident().values())
    index_segment(tokens, index.vocab_size)
    extra = peak_resident() - before
    return {"sort_peak_bytes": extra, "sort_peak_bytes_per_token": round(extra / len(tokens), 3)}


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    measure: Any = {"build": measure_build, "sort_memory": measure_sort_memory}[arguments.pop("what")]
    print(json.dumps(measure(**arguments)))
