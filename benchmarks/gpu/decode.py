"""The part `decode`: tokens per second of a shape with forced outputs, by batch size, drafts and planner.

Speedups are relative to the faster of plain `generate` with a dynamic cache and with a static one, which transformers
compiles with CUDA graphs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.decoding.ways import LOOP, Answers, Way, answer
from benchmarks.gpu.forced import forced
from benchmarks.gpu.sheet import Sheet, free
from draftstore.decoding.budget import CostPlanner
from draftstore.decoding.curve import CostCurve
from draftstore.decoding.planners import Fixed
from draftstore.decoding.replay import Recording
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.stores.rest.store import BUDGET

CACHES = ("dynamic", "static")
LEAST_OUTPUTS = 4


def run(sheet: Sheet) -> None:
    """Measure tokens per second of one shape by batch size, drafts and planner."""
    bench = sheet.bench
    model, size = bench.model(sheet.shape), bench.vocab_size

    def measured() -> dict[str, Any]:
        curve = bench.curve(model, sheet.shape)
        return {"rows": curve.rows, "seconds": curve.seconds, "padded": curve.padded}

    found = sheet.cell("cost curve", measured)
    if found is None:
        return
    curve = CostCurve(tuple(found["rows"]), tuple(found["seconds"]), bool(found["padded"]))
    drafters: dict[str, Callable[[], Drafter]] = {
        "request": lambda: RequestDrafter(size),
        "REST": bench.rest.drafter,
        "both": lambda: Mixture([RequestDrafter(size), bench.rest.drafter()]),
    }
    ways = [
        LOOP,
        *(Way(f"{name}, planned", each, CostPlanner(curve, BUDGET)) for name, each in drafters.items()),
    ]
    ways += [Way(f"both, {nodes} nodes", drafters["both"], Fixed(nodes)) for nodes in bench.extent.budgets]
    for texts in bench.extent.batches:
        count = max(LEAST_OUTPUTS, 2 * texts) if texts > 1 else LEAST_OUTPUTS
        recordings = [bench.recordings[place % len(bench.recordings)] for place in range(count)]
        for cache in CACHES:
            plain = Way(f"plain, {cache}", plain=True)
            sheet.cell(
                f"{texts} texts, {plain.name}", partial(_force, sheet, plain, recordings, texts, cache)
            )
        for way in ways:
            sheet.cell(f"{texts} texts, {way.name}", partial(_force, sheet, way, recordings, texts, None))
        free()


def _force(
    sheet: Sheet, way: Way, recordings: Sequence[Recording], texts: int, cache: str | None
) -> dict[str, Any]:
    """Measure one way after a warm-up run that compiles or captures what it needs."""
    model, tokens = sheet.bench.model(sheet.shape), sheet.bench.extent.tokens
    prompts = [each.prompt for each in recordings]
    answers = Answers()
    with forced(recordings):
        answer(model, prompts, way, tokens, Answers(), together=texts, cache=cache)
        answer(model, prompts, way, tokens, answers, together=texts, cache=cache)
    if not way.plain and answers.outputs != [each.output.tolist() for each in recordings]:
        raise AssertionError("the outputs are not those recorded")
    return {"texts": texts, "way": way.name, **answers.figures()}
