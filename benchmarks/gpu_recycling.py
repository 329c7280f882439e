"""The part `recycling`: what candidates cost a pass, and Token Recycling live, beside what else needs no store.

A random model's candidates are noise, so the live model answers; its outputs are compared with plain `generate`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.batch_runs import Request, Together, run_plain, run_together
from benchmarks.decode_runs import LOOP, Way
from benchmarks.gpu_bench import Part, free
from benchmarks.gpu_curve import runner_of, time_pass
from benchmarks.lossless import compare
from draftstore.decoding.budget import CostPlanner
from draftstore.decoding.curve import CostCurve
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.recycling import RecyclingDrafter
from draftstore.drafting.request import RequestDrafter
from draftstore.hf.batches import Batch
from draftstore.hf.passes import Wants
from draftstore.hf.tuning import measure
from draftstore.stores.rest.store import BUDGET


def run(part: Part) -> None:
    """Measure the cost of candidates in each shape, then live drafts."""
    extent = part.extent
    context = extent.contexts[0]
    for shape in extent.shapes:
        for texts in (extent.batches[0], extent.batches[-1]):
            rows = max(each for each in extent.rows if texts * each <= graph_rows(extent.together))
            part.cell(
                f"candidates, {shape}, {texts} x {rows}",
                partial(_candidates, part, shape, texts, rows, context),
            )
    part.bench.forget()
    size = part.bench.live.vocab_size
    drafters: dict[str, Callable[[], Drafter]] = {
        "recycling": lambda: RecyclingDrafter(size),
        "request": lambda: RequestDrafter(size),
        "recycling and request": lambda: Mixture([RequestDrafter(size), RecyclingDrafter(size)]),
    }
    run_live(part, drafters)


def graph_rows(together: int) -> int:
    """Return the most rows of a pass in decoding."""
    return min(together, 512)


def _candidates(part: Part, shape: str, texts: int, rows: int, context: int) -> dict[str, Any]:
    """Time the same pass with and without the 8 most likely tokens of every row."""
    found: dict[str, Any] = {"shape": shape, "texts": texts, "rows": rows}
    with runner_of(part.bench.model(shape), texts, context, part.extent.together, "graphs") as runner:
        for name, wants in (("best", Wants()), ("candidates", Wants(candidates=True))):
            timed = time_pass(runner, texts, rows, context, part.extent.repeats, wants)
            found[f"{name}_milliseconds"] = timed["milliseconds"]
    return found


def run_live(part: Part, drafters: dict[str, Callable[[], Drafter]]) -> None:
    """Measure the live model with drafters: one text at a time, and several."""
    extent, loaded = part.extent, part.bench.live
    requests = [Request(each.prompt, extent.tokens) for each in part.bench.questions]
    model: Any = loaded.model
    size: dict[str, Any] = {"context": 16, "repeats": 1} if part.bench.args.quick else {}
    curve: CostCurve = measure(model, name=loaded.name, **size)
    for texts in (extent.batches[0], extent.batches[min(2, len(extent.batches) - 1)]):
        part.cell(f"{texts} texts, plain", partial(_plain, model, requests, texts))
        expected = run_plain(model, requests, 1, "dynamic").outputs
        batch = Batch(model, most=texts)
        ways = [Way(LOOP)]
        ways += [Way(name, drafter, CostPlanner(curve, BUDGET)) for name, drafter in drafters.items()]
        for way in ways:
            part.cell(
                f"{texts} texts, {way.name}", partial(_live, model, batch, way, requests, expected, texts)
            )
        del batch
        free()


def _plain(model: Any, requests: list[Request], texts: int) -> dict[str, Any]:
    run_plain(model, requests[:texts], texts, "dynamic")
    return {"texts": texts, "way": "plain, dynamic"} | run_plain(model, requests, texts, "dynamic").figures()


def _live(
    model: Any, batch: Batch, way: Way, requests: list[Request], expected: list[list[int]], texts: int
) -> dict[str, Any]:
    """Measure one way, behind a run that captures its graphs."""
    run_together(model, batch, way, requests[: 2 * texts])
    found = run_together(model, batch, way, requests)
    return {"texts": texts, "way": way.name} | found.figures() | identity(model, requests, expected, found)


def identity(
    model: Any, requests: Sequence[Request], expected: Sequence[list[int]], found: Together
) -> dict[str, Any]:
    """Return how many outputs are those of plain generate, and how many differences rounding excuses."""
    pairs = zip(requests, expected, found.outputs, strict=True)
    differences = [compare(model, request.prompt, right, ours) for request, right, ours in pairs]
    parted = [each for each in differences if each is not None]
    return {
        "outputs": len(expected),
        "identical": len(expected) - len(parted),
        "excused": sum(each.excused for each in parted),
        "margins": [round(each.margin, 7) for each in parted],
    }
