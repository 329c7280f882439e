"""The part `decode`: tokens a second of a shape with forced outputs, by texts at a time, drafts and planner.

Every way writes the same outputs. Speedups are over the faster of plain `generate` with a dynamic cache and with a
static one (which transformers compiles, with CUDA graphs), and over our loop without drafts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.batch_runs import Request, forced_requests, run_plain, run_together
from benchmarks.decode_runs import LOOP, Way
from benchmarks.gpu_bench import Part, free
from draftstore.decoding.budget import CostPlanner
from draftstore.decoding.curve import CostCurve
from draftstore.decoding.loop import Fixed, Planner
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.hf.batches import Batch
from draftstore.hf.tuning import measure
from draftstore.stores.rest.store import BUDGET, RestStore

CACHES = ("dynamic", "static")
PLANNED = "planned"


def run(part: Part) -> None:
    """Measure one shape."""
    curve = curve_of(part)
    if curve is None:
        return
    for texts in part.extent.batches:
        requests = requests_of(part, texts)
        for cache in CACHES:
            part.cell(
                f"{texts} texts, plain generate, {cache} cache", partial(_plain, part, requests, texts, cache)
            )
        ways = ways_of(part, curve)
        names = {f"{texts} texts, {way.name}": way for way in ways}
        if all(part.known(name) for name in names):
            continue
        batch = Batch(part.bench.model(part.shape), most=texts)
        for name, way in names.items():
            part.cell(name, partial(_drafted, part, batch, way, requests, texts))
        del batch
        free()


def requests_of(part: Part, texts: int) -> list[Request]:
    """Return the requests for so many texts at a time."""
    extent = part.extent
    count = max(extent.requests, 2 * texts if texts > 1 else 1)
    return forced_requests(part.bench.recordings, count, extent.tokens, extent.longest)


def curve_of(part: Part) -> CostCurve | None:
    """Return the cost curve of the part's model, which is a cell of its own; None if there was no time for it."""
    size: dict[str, Any] = {"context": 16, "repeats": 1} if part.bench.args.quick else {}

    def measured() -> dict[str, Any]:
        curve = measure(part.bench.model(part.shape), name=part.shape, **size)
        return {"rows": curve.rows, "seconds": curve.seconds, "padded": curve.padded}

    found = part.cell("cost curve", measured)
    if found is None:
        return None
    return CostCurve(tuple(found["rows"]), tuple(found["seconds"]), bool(found["padded"]))


def ways_of(part: Part, curve: CostCurve) -> list[Way]:
    """Return the ways of decoding in batches, that without drafts first."""
    rest, vocab_size = part.bench.rest, part.bench.vocab_size
    makers = drafters_of(rest, vocab_size)
    planners: dict[str, Callable[[], Planner]] = {PLANNED: lambda: CostPlanner(curve, BUDGET)}
    planners |= {f"{budget} nodes": partial(Fixed, budget) for budget in part.extent.budgets}
    drafting = [
        Way(f"{name}, {how}", drafter, planner())
        for name, drafter in makers.items()
        for how, planner in planners.items()
        if how == PLANNED or name == "all"
    ]
    return [Way(LOOP), *drafting]


def drafters_of(rest: RestStore, vocab_size: int) -> dict[str, Callable[[], Drafter]]:
    """Return drafters that need nothing of the model."""
    return {
        "request": lambda: RequestDrafter(vocab_size),
        "REST": rest.drafter,
        "all": lambda: Mixture([RequestDrafter(vocab_size), rest.drafter()]),
    }


def _plain(part: Part, requests: list[Request], texts: int, cache: str) -> dict[str, Any]:
    """Measure plain generate, behind a run that compiles it."""
    model = part.bench.model(part.shape)
    run_plain(model, requests[:texts], texts, cache)
    return {"texts": texts, "way": f"plain, {cache}"} | run_plain(model, requests, texts, cache).figures()


def _drafted(part: Part, batch: Batch, way: Way, requests: list[Request], texts: int) -> dict[str, Any]:
    """Measure our loop, behind a run that captures its graphs."""
    model = part.bench.model(part.shape)
    run_together(model, batch, way, requests)
    found = run_together(model, batch, way, requests)
    return {"texts": texts, "way": way.name} | found.figures()


def speedups(cells: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of ways with their speedups, as far as both were measured."""
    rows = [cell for cell in cells.values() if "tokens_per_second" in cell]
    found = []
    for row in rows:
        same = [other for other in rows if other["texts"] == row["texts"]]
        plain = [other["tokens_per_second"] for other in same if other["way"].startswith("plain")]
        loop = [other["tokens_per_second"] for other in same if other["way"] == LOOP]
        own = row["tokens_per_second"]
        found.append(
            row
            | ({"over_plain": round(own / max(plain), 3)} if plain else {})
            | ({"over_loop": round(own / loop[0], 3)} if loop else {})
        )
    return found
