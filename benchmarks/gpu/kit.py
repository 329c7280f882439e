"""What the stages of a run share: extent of measurement, texts, store, model, cost curves."""

import argparse
import dataclasses
import gc
import shutil
import subprocess
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import torch

from benchmarks.common import CHAT, RecordingSet, Source, Workspace, evenly
from benchmarks.gpu.cells import Cells, Figures
from benchmarks.gpu.forced import SHAPES, Picks, random_model
from benchmarks.gpu.passes import CUDA, Passes
from draftstore.decoding.curve import CostCurve
from draftstore.decoding.replay import Recording
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import BuildError
from draftstore.hf.runner import MAX_ROWS
from draftstore.stores.rest.store import RestStore

Beside = Mapping[str, "subprocess.Popen[bytes]"]

RECORDED = RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5")
THREADS = 4
"""Threads of the store's drafter, as in the decoding worker."""
TESTS_SECONDS, WARM_SECONDS, SPARED_SECONDS = 90.0, 200.0, 60.0
"""Time for the tests and for the store at most, and what waiting for them leaves of the run at least."""


@dataclasses.dataclass(frozen=True)
class Extent:
    """The extent of measurement.

    `rows` has the rows of each text in a pass by number of texts, after `context` tokens and, with other kernels, after
    `past`. Outputs have `tokens` tokens, prompts at most `longest`, drafts without a plan `nodes` or `many`.
    """

    rows: Mapping[int, tuple[int, ...]]
    long_rows: Mapping[int, tuple[int, ...]]
    context: int = 512
    past: int = 1920
    repeats: int = 15
    tokens: int = 128
    exact_tokens: int = 48
    longest: int = 256
    stories: tuple[int, int] = (12, 64)
    nodes: int = 16
    many: int = 63
    store: Source = CHAT


FULL = Extent(
    rows={1: (1, 2, 4, 8, 16, 32, 64, 128), 8: (1, 2, 4, 8, 16, 32, 64), 32: (1, 2, 4, 8, 16)},
    long_rows={1: (1, 16, 64), 8: (1, 16)},
)
QUICK = Extent(
    rows={1: (1, 4, 16), 3: (1, 4)}, long_rows={1: (2,), 3: (2,)}, context=16, past=16, repeats=2, tokens=8,
    exact_tokens=8, longest=64, stories=(2, 8), store=Source("gpu_chat", CHAT.files, tokens=50_000),
)  # fmt: skip


class Run:
    """What the stages share.

    Attributes:
        space: the folders.
        cells: the cells.
        quick: whether the sizes are toys.
        extent: the extent of measurement.
        beside: processes that run beside the start: `tests`, `warm`.
        picks: by number of texts and name of the way, what the model would have emitted along forced outputs.
    """

    def __init__(self, space: Workspace, args: argparse.Namespace, cells: Cells, beside: Beside) -> None:
        self.space, self.cells, self.quick, self.beside = space, cells, bool(args.quick), beside
        self.extent = QUICK if args.quick else FULL
        self._shape = "tiny" if args.quick else args.shape
        self.picks: dict[tuple[int, str], Picks] = {}

    @property
    def vocab_size(self) -> int:
        """Ids of the recordings."""
        return int(self.space.tokenizer.vocab_size)

    @cached_property
    def recordings(self) -> list[Recording]:
        """Recorded outputs of equal length in the vocabulary of the store, with distinct prompts."""
        tokens, longest = self.extent.tokens, self.extent.longest
        found = {tuple(each.prompt[-longest:].tolist()): each for each in self.space.recordings(RECORDED)}
        cut = [
            dataclasses.replace(each, prompt=each.prompt[-longest:], output=each.output[:tokens])
            for each in found.values()
            if len(each.output) >= tokens
        ]
        return evenly(cut, len(cut))

    def some(self, count: int) -> list[Recording]:
        """Return so many recordings."""
        return [self.recordings[place % len(self.recordings)] for place in range(count)]

    def make_model(self, shape: str | None = None) -> Any:
        """Return a random model, of the shape of this run by default."""
        return random_model(SHAPES[shape or self._shape], self.vocab_size)

    @cached_property
    def model(self) -> Any:
        """The model of most stages."""
        return self.make_model()

    @cached_property
    def stored(self) -> bool:
        """Whether there is a store to draft from, once the process that builds it has ended."""
        return self.wait_for("warm", WARM_SECONDS)

    def wait_for(self, name: str, most: float) -> bool:
        """Wait for a process beside this one; return whether it succeeded, or was not started."""
        if name not in self.beside:
            return True
        found = self.cells.measure("gate", name, partial(self._ended, name, most), need=1, most=most + 10)
        return found is not None and found["exit"] == 0

    def _ended(self, name: str, most: float) -> Figures:
        """Wait for a process; end it where time is short, since it would disturb what is measured."""
        try:
            code: int | str = self.beside[name].wait(max(1.0, min(most, self.cells.left() - SPARED_SECONDS)))
        except subprocess.TimeoutExpired:
            self.beside[name].kill()
            code = "ended for lack of time"
        lines = (self.space.out / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        return {"exit": code, "last": lines[-1] if lines else ""}

    @cached_property
    def rest(self) -> RestStore:
        """The store, which is built anew if that in the work folder is of other files."""
        try:
            return self.space.store(self.extent.store)
        except BuildError:
            shutil.rmtree(self.space.work / "stores")
            return self.space.store(self.extent.store)

    def drafters(self) -> dict[str, Callable[[], Drafter]]:
        """Return makers of drafters, the best one last."""
        made: dict[str, Callable[[], Drafter]] = {"request": lambda: RequestDrafter(self.vocab_size)}
        if self.stored:
            rest = partial(self.rest.drafter, threads=THREADS)
            both = lambda: Mixture([RequestDrafter(self.vocab_size), rest()])  # noqa: E731
            made |= {"REST": rest, "both": both}
        return made

    @cached_property
    def curves(self) -> list[CostCurve]:
        """Cost curves: one of all measured passes, one of those of a single text; none if these failed."""
        known: dict[int, float] = {}
        for texts, sizes in self.extent.rows.items():
            passes = Passes(self.model, texts, self.extent.context)
            for rows in sizes:
                measure = partial(passes.measure, rows, self.extent.repeats)
                found = self.cells.measure("curve", f"{texts} x {rows}", measure)
                if found and (texts == 1 or rows >= MAX_ROWS // 4):
                    known.setdefault(texts * rows, found["wall_ms"] / 1000)
            del passes, measure
            free()
        points = sorted(known.items())
        if not points or points[0][0] != 1:
            return []
        short = [point for point in points if point[0] <= MAX_ROWS]
        return [
            CostCurve(tuple(rows for rows, _ in some), tuple(seconds for _, seconds in some), CUDA)
            for some in (points, short)
        ]


def free() -> None:
    """Return unused memory to the GPU."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
