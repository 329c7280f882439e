"""The stages of a run, in order of value. Each measures its cells; what fails outside of a cell ends its stage only."""

import argparse
import dataclasses
import gc
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import torch

from benchmarks.cells import Cells, Figures
from benchmarks.common import CHAT, RecordingSet, Source, Workspace
from benchmarks.decoding.ways import LOOP, Way
from benchmarks.gpu import compare
from benchmarks.gpu.forced import LARGE, TINY, Picks, force, random_model
from benchmarks.gpu.passes import ATTENTION, CUDA, Passes, ceilings
from draftstore.decoding.budget import CostPlanner, Fixed
from draftstore.decoding.curve import CostCurve, Costs
from draftstore.decoding.replay import Recording
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import BuildError
from draftstore.hf import runner
from draftstore.hf.runner import MAX_ROWS
from draftstore.stores.rest.store import RestStore
from draftstore.trees.frontier import BUDGET

Beside = Mapping[str, "subprocess.Popen[bytes]"]
RECORDED = RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5")
LONGEST_PROMPT, NODES, MANY_NODES, LOOKUP_TOKENS, SAMPLED = 256, 16, 63, 10, "sampled"
THREADS = 4
"""Threads of the store's drafter, as in the decoding worker."""
TESTS_SECONDS, WARM_SECONDS, SPARED_SECONDS = 90.0, 200.0, 60.0
"""Time for the tests and for the store at most, and what waiting for them leaves of the run at least."""
COMPILE_SECONDS = 40.0 if CUDA else 3.0
"""Compilation of a model with a static cache needs so long at least."""


@dataclasses.dataclass(frozen=True)
class Extent:
    """The extent of measurement: rows, by number of texts, of passes after `context` and after `past` tokens."""

    rows: Mapping[int, tuple[int, ...]]
    past_rows: Mapping[int, tuple[int, ...]]
    context: int = 512
    past: int = 1920
    repeats: int = 15
    tokens: int = 128
    exact_tokens: int = 48
    stories: tuple[int, int] = (12, 64)
    store: Source = CHAT


FULL = Extent(
    {1: (1, 2, 4, 8, 16, 32, 64, 128), 8: (1, 2, 4, 8, 16, 32, 64), 32: (1, 2, 4, 8, 16)},
    {1: (1, 16, 64), 8: (1, 16)},
)
QUICK = Extent(
    {1: (1, 4, 16), 3: (1, 4)}, {1: (2,), 3: (2,)}, context=16, past=16, repeats=2, tokens=8, exact_tokens=8,
    stories=(2, 8), store=Source("gpu_chat", CHAT.files, tokens=50_000),
)  # fmt: skip


class Run:
    """What the stages share; `picks` are the model's own tokens, by number of texts and name of the way."""

    def __init__(self, space: Workspace, args: argparse.Namespace, cells: Cells, beside: Beside) -> None:
        self.space, self.cells, self.quick = space, cells, bool(args.quick)
        self._beside = beside
        self.extent = QUICK if args.quick else FULL
        self.picks: dict[tuple[int, str], Picks] = {}

    @property
    def vocab_size(self) -> int:
        """Ids of the recordings."""
        return int(self.space.tokenizer.vocab_size)

    def make_model(self, *, tiny: bool = False) -> Any:
        """Return a random model."""
        return random_model(TINY if tiny or self.quick else LARGE, self.vocab_size)

    @cached_property
    def model(self) -> Any:
        """The model of most stages."""
        return self.make_model()

    @cached_property
    def _recordings(self) -> list[Recording]:
        tokens, found = self.extent.tokens, dict[tuple[int, ...], Recording]()
        for each in self.space.recordings(RECORDED):
            prompt = each.prompt[-LONGEST_PROMPT:]
            if len(each.output) >= tokens:
                found[tuple(prompt.tolist())] = Recording(each.id, prompt, each.output[:tokens])
        return list(found.values())

    def some(self, count: int) -> list[Recording]:
        """Return recorded outputs of equal length in the vocabulary of the store, with distinct prompts."""
        return self._recordings[:count]

    @cached_property
    def stored(self) -> bool:
        """Whether there is a store to draft from, once the process that builds it has ended."""
        return self.wait_for("warm", WARM_SECONDS)

    def wait_for(self, name: str, most: float) -> bool:
        """Wait for a process beside this one; return whether it succeeded, or was not started."""
        if name not in self._beside:
            return True
        found = self.cells.measure("gate", name, partial(self._ended, name, most), need=1, most=most + 10)
        return found is not None and found["exit"] == 0

    def _ended(self, name: str, most: float) -> Figures:
        """Wait for a process; end it where time is short, since it would disturb what is measured."""
        try:
            code: int | str = self._beside[name].wait(max(1.0, min(most, self.cells.left() - SPARED_SECONDS)))
        except subprocess.TimeoutExpired:
            self._beside[name].kill()
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
        """Return makers of drafters, the best one first."""
        request = partial(RequestDrafter, self.vocab_size)
        if not self.stored:
            return {"request": request}
        rest = partial(self.rest.drafter, threads=THREADS)
        return {"both": lambda: Mixture([request(), rest()]), "REST": rest, "request": request}

    @cached_property
    def curves(self) -> list[CostCurve]:
        """Cost curves: one of all measured passes, one of those of a single text; none if these failed."""
        known = list[Costs]()
        for texts, sizes in self.extent.rows.items():
            passes, seconds = Passes(self.model, texts, self.extent.context), dict[int, float]()
            for rows in sizes:
                measure = partial(passes.measure, rows, self.extent.repeats)
                if found := self.cells.measure("curve", f"{texts} x {rows}", measure):
                    seconds[rows] = found["wall_ms"] / 1000
            if 1 in seconds:
                known.append(Costs(texts, tuple(seconds), tuple(seconds.values())))
            del passes, measure
            free()
        if not known or known[0].texts > 1:
            return []
        single = CostCurve(known[0].rows, known[0].seconds, CUDA)
        return [dataclasses.replace(single, batches=tuple(known[1:])), single]


def free() -> None:
    """Return unused memory to the GPU."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def warm(run: Run) -> None:
    """Build the store, and compile the kernels that decoding needs, with a toy model."""
    run.rest.drafter().warm_up()
    model, curve = run.make_model(tiny=True), CostCurve((1, MAX_ROWS), (1.0, 1.0))
    for texts in (1, 3):
        for name, drafter in run.drafters().items():
            for planner in (CostPlanner(curve, BUDGET), Fixed(NODES)):
                force(model, Way(name, drafter, planner), run.some(texts), texts, warm=False)


def gate(run: Run) -> None:
    """Exit unless a toy model decodes as it should, captured on a GPU; then wait for the tests."""

    def toy() -> Figures:
        if not CUDA and not run.quick:
            raise RuntimeError("torch finds no CUDA GPU")
        model = run.make_model(tiny=True)
        return Passes(model, 2, 256).measure(4, 3) | force(model, LOOP, run.some(2), 2)[0]

    found = run.cells.measure("gate", "toy", toy, most=90)
    free()
    if found is None or not found["captured"]:
        sys.exit(GATE_FAILED)
    run.cells.measure("gate", "model", lambda: {"parameters": run.model.num_parameters()})
    run.wait_for("tests", TESTS_SECONDS)
    run.cells.measure("gate", "ceilings", ceilings)


def decode(run: Run) -> None:
    """Measure tokens per second with forced outputs, and note what the model itself would have emitted."""
    for texts in run.extent.rows:
        for way in _ways(run, texts):
            run.cells.measure(
                "decode", f"{texts} texts, {way.name}", partial(_decoded, run, way, texts), need=8
            )
        free()


def _ways(run: Run, texts: int) -> Iterator[Way]:
    """Yield the ways of decoding, the most valuable first."""
    drafters, curves = run.drafters(), run.curves
    best, drafter = next(iter(drafters.items()))
    yield LOOP
    for name, each in drafters.items() if curves else ():
        yield Way(f"{name}, planned", each, CostPlanner(curves[0], BUDGET))
    yield Way(f"{best}, {NODES} nodes", drafter, Fixed(NODES))
    if texts == 1:
        yield Way(f"{best}, {MANY_NODES} nodes", drafter, Fixed(MANY_NODES))
    elif curves:
        yield Way(f"{best}, curve to {MAX_ROWS}", drafter, CostPlanner(curves[1], BUDGET))
    yield Way(SAMPLED, drafter, Fixed(NODES))


def _decoded(run: Run, way: Way, texts: int) -> Figures:
    """Measure a way, and its speedup over our loop without drafts."""
    recordings = run.some(4 if texts == 1 else texts if texts > 16 else 2 * texts)
    settings: dict[str, Any] = {"do_sample": True, "temperature": 0.7} if way.name == SAMPLED else {}
    figures, picks = force(run.model, way, recordings, texts, **settings)
    if not settings:
        run.picks[texts, way.name] = picks
    base = run.cells.stages["decode"].get(f"{texts} texts, {LOOP.name}", {}).get("tokens_per_second")
    return ({"speedup": round(figures["tokens_per_second"] / base, 3)} if base else {}) | figures


def exactness(run: Run) -> None:
    """Compare what the ways would have emitted along the same texts, and the texts of a trained model."""
    reference = run.picks.pop((1, LOOP.name), {})
    if reference:
        whole = partial(compare.parallel_picks, run.model, run.some(4))
        run.cells.measure("exact", "one pass / single rows", lambda: compare.agreement(reference, whole()))
    for (texts, name), picks in run.picks.items():
        run.cells.measure("exact", f"{texts} texts, {name}", partial(compare.agreement, reference, picks))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        measure = partial(compare.trained, run.space.data, dtype, *run.extent.stories)
        run.cells.measure("exact", f"trained, {str(dtype)[6:]}", measure, need=10)


def float32(run: Run) -> None:
    """Compare ways in float32, in which rounding must not decide any token."""

    def measure() -> Figures:
        model, tokens = run.make_model().float(), run.extent.exact_tokens
        recordings = [dataclasses.replace(each, output=each.output[:tokens]) for each in run.some(2)]
        way = Way("drafts", next(iter(run.drafters().values())), Fixed(NODES))
        try:
            single, alone, together = (
                force(model, each, recordings, texts, warm=False)[1]
                for each, texts in ((LOOP, 1), (way, 1), (way, 2))
            )
        finally:
            runner._IDLE.pop(model, None)
        same = compare.agreement(single, together)["same"]
        return compare.agreement(single, alone) | {"same_together": same}

    run.cells.measure("float32", f"{NODES} nodes / single rows", measure, need=20)
    free()


def baselines(run: Run) -> None:
    """Measure what `generate` itself achieves, and its drafts from the prompt."""
    model, four, measure = run.model, run.some(4), partial(run.cells.measure, "peers")
    measure("1 texts, plain, dynamic", partial(compare.plain, model, four[:2], 1), need=8)
    drafted = f"1 texts, prompt lookup {LOOKUP_TOKENS}"
    measure(drafted, partial(compare.lookup, model, four, LOOKUP_TOKENS), need=15)
    measure("1 texts, forced, no lookup", partial(compare.lookup, model, four[:1], 0), need=8)
    for texts in list(run.extent.rows)[1:]:
        measure(f"{texts} texts, plain, dynamic", partial(compare.plain, model, run.some(texts), texts))
    static(run, [1])


def static(run: Run, batches: list[int]) -> None:
    """Measure `generate` with a static cache, which is compiled anew for each number of texts."""
    for texts in batches:
        measure = partial(compare.plain, run.model, run.some(4 if texts == 1 else texts), texts, static=True)
        run.cells.measure("peers", f"{texts} texts, plain, static", measure, need=COMPILE_SECONDS, most=150)
        free()


def more(run: Run) -> None:
    """Measure what could be improved: kernels of attention in long texts, and all kernels by time."""
    past, repeats = run.extent.past, run.extent.repeats
    for name, change in {"default": nullcontext, **ATTENTION}.items():
        for texts, sizes in run.extent.past_rows.items():
            passes = Passes(run.model, texts, past, change)
            for rows in sizes:
                measure = partial(passes.measure, rows, repeats)
                run.cells.measure("more", f"{name}, {past} past, {texts} x {rows}", measure)
            del passes, measure
            free()
    for texts, rows in ((1, 1), (1, 32), (8, 16)):
        kernels = Passes(run.model, texts, run.extent.context).kernels
        run.cells.measure("kernels", f"{texts} x {rows}", partial(kernels, rows), need=8)
        del kernels
        free()


STAGES: dict[str, Callable[[Run], object]] = {
    "gate": gate, "curve": lambda run: run.curves, "decode": decode, "exact": exactness, "float32": float32,
    "peers": baselines, "more": more, "static": lambda run: static(run, list(run.extent.rows)[:0:-1]),
}  # fmt: skip
NEED_STORE = frozenset({"decode", "float32"})
GATE_FAILED = 3
"""Exit status."""
