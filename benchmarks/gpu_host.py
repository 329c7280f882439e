"""The part `host`: the share of a step that is host work.

A step is everything between two passes: drafts, the pass, acceptance, the move of rows. CUDA events around the pass
tell how long the GPU was at it, with the microseconds in which the graph is launched; the rest of the step is the
host's. Without a GPU the pass is timed as it runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch

from benchmarks.batch_runs import Request, run_together
from benchmarks.decode_runs import Way
from benchmarks.gpu_bench import Part, free
from benchmarks.gpu_decode import curve_of, requests_of, ways_of
from benchmarks.measure import percentiles
from draftstore.hf.batches import Batch
from draftstore.hf.graph_runner import GraphRunner
from draftstore.hf.pass_shapes import PassShape

GOAL = 0.10
"""Most of a step that may be host work."""


def run(part: Part) -> None:
    """Measure steps of one shape, without drafts and with all of them."""
    curve = curve_of(part)
    if curve is None:
        return
    ways = [way for way in ways_of(part, curve) if way.drafter is None or way.name.startswith("all")]
    sizes = part.extent.batches
    for texts in sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]}):
        batch = Batch(part.bench.model(part.shape), most=texts)
        for way in ways:
            part.cell(
                f"{texts} texts, {way.name}",
                partial(_steps, part, batch, way, requests_of(part, texts), texts),
            )
        del batch
        free()


class DeviceTimes:
    """The seconds of passes on the device."""

    def __init__(self) -> None:
        """Begin without any."""
        self._events: list[tuple[Any, Any]] = []
        self._seconds = 0.0

    @contextmanager
    def of(self, runner: GraphRunner) -> Iterator[None]:
        """Time the passes of a runner inside the block."""
        cuda = torch.cuda.is_available()
        name = "_replay" if cuda else "_compute"
        call: Callable[[PassShape], Any] = getattr(runner, name)

        def timed(shape: PassShape) -> Any:
            if not cuda:
                begin = perf_counter()
                found = call(shape)
                self._seconds += perf_counter() - begin
                return found
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            first.record()
            found = call(shape)
            last.record()
            self._events.append((first, last))
            return found

        setattr(runner, name, timed)
        try:
            yield
        finally:
            delattr(runner, name)

    def seconds(self) -> float:
        """Return the seconds of all passes so far, once they are done."""
        if self._events:
            torch.cuda.synchronize()
        return self._seconds + float(sum(first.elapsed_time(last) for first, last in self._events)) / 1000


def _steps(part: Part, batch: Batch, way: Way, requests: list[Request], texts: int) -> dict[str, Any]:
    """Measure steps in which no prompt is read, behind a run that captures the graphs."""
    model = part.bench.model(part.shape)
    run_together(model, batch, way, requests)
    device, steps, work = DeviceTimes(), [], 0.0

    def around(step: Callable[[], Any]) -> Any:
        nonlocal work
        reading = bool(batch._reading)
        before = perf_counter()
        if reading:
            return step()
        with device.of(batch._runner):
            found = step()
        steps.append(perf_counter() - before)
        work += sum(each.step.draft_ns for each in found if each.step is not None) / 1e9
        return found

    result = run_together(model, batch, way, requests, around)
    wall = sum(steps)
    return {
        "texts": texts,
        "way": way.name,
        "steps": len(steps),
        "step_us": percentiles([1e6 * each for each in steps]),
        "host_share": round(max(0.0, 1 - device.seconds() / wall), 4),
        "drafting_share": round(work / wall, 4),
        "tokens_per_second": result.figures()["tokens_per_second"],
    }
