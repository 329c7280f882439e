"""The stages of a run, in order of value. Each measures its cells; what fails outside of a cell ends its stage only."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from benchmarks.decoding.ways import LOOP, Way
from benchmarks.gpu import exact, peers
from benchmarks.gpu.cells import Figures
from benchmarks.gpu.forced import force
from benchmarks.gpu.kit import TESTS_SECONDS, Run, free
from benchmarks.gpu.passes import (
    ATTENTION,
    CUDA,
    Change,
    Passes,
    ceilings,
    compiled_pieces,
    fused_norms,
    within,
)
from benchmarks.measure import progress
from draftstore.decoding.budget import CostPlanner
from draftstore.decoding.curve import CostCurve
from draftstore.decoding.planners import Fixed
from draftstore.hf import runner
from draftstore.hf.runner import MAX_ROWS
from draftstore.stores.rest.store import BUDGET

LOOKUP_TOKENS = 10
COMPILE_SECONDS = 40.0 if CUDA else 3.0
"""Compilation of a model with a static cache needs so long at least."""


def warm(run: Run) -> None:
    """Build the store, and compile the kernels that decoding needs, with a toy model."""
    run.rest.drafter().warm_up()
    progress("store built")
    model = run.make_model("tiny")
    planners = CostPlanner(CostCurve((1, MAX_ROWS), (1.0, 1.0)), BUDGET), Fixed(run.extent.nodes)
    for texts in (1, 3):
        for name, drafter in run.drafters().items():
            for planner in planners:
                way = Way(name, drafter, planner)
                force(model, way, run.some(texts), run.extent.tokens, texts, warm=False)


def gate(run: Run) -> bool:
    """Return whether a toy model decodes as it should, captured on a GPU; then wait for the tests."""

    def toy() -> Figures:
        if not CUDA and not run.quick:
            raise RuntimeError("torch finds no CUDA GPU")
        model = run.make_model("tiny")
        found = Passes(model, 2, 256).measure(4, 3)
        figures, _ = force(model, LOOP, run.some(2), run.extent.tokens, 2)
        return {**{f"pass_{key}": value for key, value in found.items()}, **figures}

    found = run.cells.measure("gate", "toy", toy, most=90)
    free()
    if found is None or not found["pass_captured"]:
        return False
    run.cells.measure("gate", "model", lambda: {"parameters": run.model.num_parameters()})
    run.wait_for("tests", TESTS_SECONDS)
    run.cells.measure("gate", "ceilings", ceilings)
    return True


def curve(run: Run) -> None:
    """Time of a pass by numbers of texts and rows."""
    if not run.curves:
        progress("there is no cost curve: drafts are not planned")


def decode(run: Run) -> None:
    """Tokens per second with forced outputs, and what the model itself would have emitted."""
    drafter = list(run.drafters().values())[-1]
    for texts in run.extent.rows:
        for way in _ways(run, texts):
            run.cells.measure("decode", _cell(texts, way), partial(_decoded, run, way, texts), need=8)
        sampled = Way("sampled", drafter, Fixed(run.extent.nodes))
        run.cells.measure("decode", _cell(texts, sampled), partial(_decoded, run, sampled, texts), need=10)
        free()


def _cell(texts: int, way: Way) -> str:
    return f"{texts} texts, {way.name}"


def _ways(run: Run, texts: int) -> Iterator[Way]:
    """Yield the greedy ways of decoding, the most valuable first."""
    drafters = dict(reversed(run.drafters().items()))
    best = next(iter(drafters))
    yield LOOP
    for curve in run.curves[:1]:
        yield from (
            Way(f"{name}, planned", each, CostPlanner(curve, BUDGET)) for name, each in drafters.items()
        )
    for nodes in (run.extent.nodes, run.extent.many) if texts == 1 else (run.extent.nodes,):
        yield Way(f"{best}, {nodes} nodes", drafters[best], Fixed(nodes))
    for curve in run.curves[1:] if texts > 1 else ():
        yield Way(f"{best}, curve to {MAX_ROWS}", drafters[best], CostPlanner(curve, BUDGET))


def _decoded(run: Run, way: Way, texts: int) -> Figures:
    """Measure a way, and its speedup over our loop without drafts."""
    recordings = run.some(4 if texts == 1 else texts if texts > 16 else 2 * texts)
    settings: dict[str, Any] = {"do_sample": True, "temperature": 0.7} if way.name == "sampled" else {}
    figures, picks = force(run.model, way, recordings, run.extent.tokens, texts, **settings)
    if not settings:
        run.picks[texts, way.name] = picks
    base = run.cells.stages["decode"][_cell(texts, LOOP)].get("tokens_per_second")
    return figures | ({"speedup": round(figures["tokens_per_second"] / base, 3)} if base else {})


def exactness(run: Run) -> None:
    """How often the ways would have emitted the same token along the same texts; a trained model by itself."""
    reference = run.picks.pop((1, LOOP.name), None)
    if reference is not None:
        whole = partial(exact.parallel_picks, run.model, run.some(4))
        run.cells.measure("exact", "one pass / single rows", lambda: exact.agreement(reference, whole()))
        for (texts, name), picks in run.picks.items():
            measure = partial(exact.agreement, reference, picks)
            run.cells.measure("exact", f"{texts} texts, {name}", measure)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        measure = partial(exact.trained, run.space.data, dtype, *run.extent.stories)
        run.cells.measure("exact", f"trained, {str(dtype)[6:]}", measure, need=10)


def float32(run: Run) -> None:
    """The large shape in float32, in which rounding must not decide any token."""
    run.cells.measure("float32", "16 nodes / single rows", partial(_in_float32, run), need=20)
    free()


def _in_float32(run: Run) -> Figures:
    model, tokens = run.make_model().float(), run.extent.exact_tokens
    recordings = [dataclasses.replace(each, output=each.output[:tokens]) for each in run.some(2)]
    way = Way("drafts", list(run.drafters().values())[-1], Fixed(run.extent.nodes))
    try:
        (_, single), (_, alone), (_, together) = (
            force(model, each, recordings, tokens, texts, warm=False)
            for each, texts in ((LOOP, 1), (way, 1), (way, 2))
        )
    finally:
        runner._IDLE.pop(model, None)
    return {
        name: exact.agreement(single, picks)["same"]
        for name, picks in (("same_alone", alone), ("same_together", together))
    } | {"positions": len(single)}


def baselines(run: Run) -> None:
    """What `generate` itself achieves, and its drafts from the prompt."""
    four, tokens = run.some(4), run.extent.tokens
    measure = partial(run.cells.measure, "peers")
    measure("1 texts, plain, dynamic", partial(peers.plain, run.model, four[:2], tokens, 1), need=8)
    measure(
        f"1 texts, prompt lookup {LOOKUP_TOKENS}",
        partial(peers.lookup, run.model, four, tokens, LOOKUP_TOKENS),
        need=15,
    )
    measure("1 texts, forced, no lookup", partial(peers.lookup, run.model, four[:1], tokens, 0), need=8)
    for texts in list(run.extent.rows)[1:]:
        name = f"{texts} texts, plain, dynamic"
        measure(name, partial(peers.plain, run.model, run.some(texts), tokens, texts))
    _static(run, 1)


def static(run: Run) -> None:
    """`generate` with a static cache for several texts, which it compiles anew."""
    for texts in list(run.extent.rows)[:0:-1]:
        _static(run, texts)


def _static(run: Run, texts: int) -> None:
    recordings = run.some(4 if texts == 1 else texts)
    measure = partial(peers.plain, run.model, recordings, run.extent.tokens, texts, static=True)
    run.cells.measure("peers", f"{texts} texts, plain, static", measure, need=COMPILE_SECONDS, most=150)
    free()


def more(run: Run) -> None:
    """What could be improved: kernels of attention in long texts, small kernels, all kernels by time."""
    past, context, small = run.extent.past, run.extent.context, {1: (1, 16)}
    _passes(run, "default", nullcontext, past, run.extent.long_rows)
    for name, change in ATTENTION.items():
        _passes(run, name, change, past, run.extent.long_rows)
    _passes(run, "fused norms", fused_norms, context, small)
    _passes(run, "compiled pieces", compiled_pieces, context, small, need=30)
    for texts, rows in ((1, 1), (1, 32), (8, 16)):
        passes = Passes(run.model, texts, context)
        run.cells.measure("kernels", f"{texts} x {rows}", partial(passes.kernels, rows), need=8)


def _passes(
    run: Run, name: str, change: Change, past: int, sizes: Mapping[int, tuple[int, ...]], need: float = 3.0
) -> None:  # fmt: skip
    """Measure passes in which the model computes in another way."""
    for texts, rows in ((texts, each) for texts, some in sizes.items() for each in some):
        passes = Passes(run.model, texts, past)
        measure = partial(within, change, partial(passes.measure, rows, run.extent.repeats))
        run.cells.measure("more", f"{name}, {past} past, {texts} x {rows}", measure, need=need)
        del passes, measure
        free()


STAGES: dict[str, Callable[[Run], object]] = {
    "gate": gate, "curve": curve, "decode": decode, "exact": exactness, "float32": float32, "peers": baselines,
    "more": more, "static": static,
}  # fmt: skip
NEED_STORE = frozenset({"decode", "float32"})
