"""Passes: their time for the host and on the GPU, the kernels in them, and what the card can do at best."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks.cells import Figures
from draftstore.hf import runner
from draftstore.hf.checks import vocab_size
from draftstore.hf.passes import Wants
from draftstore.hf.runner import MAX_ROWS, PassShape, Runner
from draftstore.hf.tuning import tree_entry

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
POSITIONS = 2048
TOGETHER = 4096
"""Maximum rows of a pass over several texts here: more than in decoding."""
PROFILED, TOP_KERNELS = 5, 24

Change = Callable[[], AbstractContextManager[object]]
"""Makes the context of a pass that is computed in another way."""


def sync() -> None:
    """Wait for the GPU."""
    if CUDA:
        torch.cuda.synchronize()


@contextmanager
def pass_times() -> Iterator[Callable[[], list[float]]]:
    """Yield a function that returns the milliseconds of all passes in the block: on a GPU, of the replayed graphs.

    A pass that captures its graph is none of them. The time on a GPU includes the launch of the graph.
    """
    name = "_replay" if CUDA else "_compute"
    original, marks = getattr(Runner, name), list[list[Any]]()

    def timed(self: Runner, shape: PassShape, *rest: int | None) -> Any:
        usual = not CUDA or self._captured.get(shape) is not None
        events: Any = [torch.cuda.Event(enable_timing=True) for _ in range(2 * CUDA)]  # type: ignore[no-untyped-call]
        begin = events[0].record() if CUDA else perf_counter()
        result = original(self, shape, *rest)
        end = events[1].record() if CUDA else perf_counter()
        if usual:
            marks.append(events or [begin, end])
        return result

    def milliseconds() -> list[float]:
        sync()
        return [first.elapsed_time(last) if CUDA else 1000 * (last - first) for first, last in marks]

    with patch.object(Runner, name, timed):
        yield milliseconds


class Passes:
    """Passes of a model over some texts, in a pool of random keys and values, which is made for the first pass."""

    def __init__(self, model: Any, texts: int, context: int, change: Change = nullcontext) -> None:
        self._model, self.texts, self.context, self._change = model, texts, context, change

    @cached_property
    def _runner(self) -> Runner:
        with patch.object(runner, "MAX_TOGETHER", TOGETHER):
            made = runner.new_runner(self._model, 1 if self.texts == 1 else self.texts + 1)
        made.pool.resize(
            max(self.context, POSITIONS) + MAX_ROWS, 0, 0
        )  # as in decoding: more than a pass sees
        with torch.inference_mode(mode=False), torch.no_grad():
            for states in made.pool._states:
                states.normal_()
        return made

    def run(self, rows: int, wants: Wants) -> None:
        """Run a pass over a binary tree in every text, until its tokens are on the host."""
        drafted = tree_entry(rows, self.context, vocab_size(self._model), self.texts)
        with self._change():
            self._runner.run(drafted, wants)[0].best()

    def measure(self, rows: int, repeats: int) -> Figures:
        """Return median times of a pass, without and with the 8 candidates of each row."""
        found: Figures = {"texts": self.texts, "rows": rows, "context": self.context}
        for suffix, wants in (("", Wants()), ("_top8", Wants(candidates=True))):
            begin = perf_counter()
            for _ in range(2):
                self.run(rows, wants)
            found[f"capture_s{suffix}"] = round(perf_counter() - begin, 3)
            with pass_times() as times:
                walls = [_seconds(partial(self.run, rows, wants)) for _ in range(repeats)]
            found[f"wall_ms{suffix}"] = round(1000 * median(walls), 4)
            found[f"gpu_ms{suffix}"] = round(median(times()), 4) if times() else None
        return found | {"captured": not CUDA or None not in self._runner._captured.values()}

    def kernels(self, rows: int) -> Figures:
        """Return the time of a pass by kind of kernel, from the profiler."""
        self.measure(rows, 1)
        with profile(activities=[ProfilerActivity.CUDA if CUDA else ProfilerActivity.CPU]) as traced:
            for _ in range(PROFILED):
                self.run(rows, Wants())
            sync()
        spent = "self_device_time_total" if CUDA else "self_cpu_time_total"
        kinds = [
            (each.key[:90], each.count // PROFILED, getattr(each, spent)) for each in traced.key_averages()
        ]
        kinds.sort(key=lambda kind: -kind[2])
        return {
            "total_us": round(sum(time for _, _, time in kinds) / PROFILED, 1),
            "kernels": sum(count for _, count, _ in kinds),
            "top": [(name, count, round(time / PROFILED, 1)) for name, count, time in kinds[:TOP_KERNELS]],
        }


def _seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call, with what it leaves to the GPU."""
    sync()
    begin = perf_counter()
    call()
    sync()
    return perf_counter() - begin


ATTENTION: dict[str, Change] = {
    name: partial(sdpa_kernel, getattr(SDPBackend, kind))
    for name, kind in (("efficient", "EFFICIENT_ATTENTION"), ("cudnn", "CUDNN_ATTENTION"), ("math", "MATH"))
}
"""Kernels of attention other than torch's own choice; the first two need a GPU."""


def ceilings() -> Figures:
    """Return what the card does: bytes copied and bf16 products per second."""
    size, side = (2**30, 8192) if CUDA else (2**24, 256)
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    one, two = (torch.randn(side, side, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    copy, product = (
        min(_seconds(call) for _ in range(6)) for call in (lambda: target.copy_(source), lambda: one @ two)
    )
    return {
        "copy_tb_per_s": round(2 * size / copy / 1e12, 3),
        "bf16_tflops": round(2 * side**3 / product / 1e12, 1),
    }
