"""The parts that decode: forced outputs of a shape, Token Recycling live, and a dense store from text to drafts.

Speedups are over the faster of plain `generate` with a dynamic cache and with a static one, which transformers compiles
with CUDA graphs. Live outputs are compared with plain `generate`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.decoding.ways import LOOP, PLAIN, Answers, Way, answer, differences
from benchmarks.gpu.curve import runner_of, time_pass
from benchmarks.gpu.forced import forced
from benchmarks.gpu.sheet import Sheet, free
from draftstore.decoding.budget import CostPlanner
from draftstore.decoding.curve import CostCurve
from draftstore.decoding.loop import Fixed
from draftstore.decoding.replay import Recording
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.projection import Projection
from draftstore.drafting.recycling import RecyclingDrafter
from draftstore.drafting.request import RequestDrafter
from draftstore.hf.passes import Wants
from draftstore.hf.states import ModelStates, last_states
from draftstore.stores.dresd.build import DIMS, DresdOptions, build_dresd
from draftstore.stores.dresd.store import DresdStore
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import BUDGET, RestStore

CACHES = ("dynamic", "static")
LEAST_OUTPUTS = 4
GRAPH_ROWS = 512
"""Maximum rows of a pass in decoding."""
Drafters = dict[str, Callable[[], Drafter]]


def run_forced(sheet: Sheet) -> None:
    """Measure tokens a second of one shape by texts at a time, drafts and planner."""
    bench = sheet.bench
    model, size = bench.model(sheet.shape), bench.vocab_size

    def measured() -> dict[str, Any]:
        curve = bench.curve(model, sheet.shape)
        return {"rows": curve.rows, "seconds": curve.seconds, "padded": curve.padded}

    found = sheet.cell("cost curve", measured)
    if found is None:
        return
    curve = CostCurve(tuple(found["rows"]), tuple(found["seconds"]), bool(found["padded"]))
    drafters: Drafters = {
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
    """Measure one way, behind a run that compiles or captures what it needs."""
    model, tokens = sheet.bench.model(sheet.shape), sheet.bench.extent.tokens
    prompts = [each.prompt for each in recordings]
    answers = Answers()
    with forced(recordings):
        answer(model, prompts, way, tokens, Answers(), together=texts, cache=cache)
        answer(model, prompts, way, tokens, answers, together=texts, cache=cache)
    if not way.plain and answers.outputs != [each.output.tolist() for each in recordings]:
        raise AssertionError("the outputs are not those recorded")
    return {"texts": texts, "way": way.name, **answers.figures()}


def run_recycling(sheet: Sheet) -> None:
    """Measure what candidates add to a pass of each shape, then live drafts."""
    bench, extent = sheet.bench, sheet.bench.extent
    for shape in extent.shapes:
        for texts in (extent.batches[0], extent.batches[-1]):
            most = min(extent.together, GRAPH_ROWS)
            rows = max(each for each in extent.rows if texts * each <= most)
            name = f"candidates, {shape}, {texts} x {rows}"
            sheet.cell(name, partial(_candidates, sheet, shape, texts, rows))
    bench.forget()
    size = bench.live.vocab_size
    drafters: Drafters = {
        "recycling": lambda: RecyclingDrafter(size),
        "request": lambda: RequestDrafter(size),
        "recycling and request": lambda: Mixture([RequestDrafter(size), RecyclingDrafter(size)]),
    }
    _run_live(sheet, drafters)


def _candidates(sheet: Sheet, shape: str, texts: int, rows: int) -> dict[str, Any]:
    """Time the same pass with and without the 8 most likely tokens of every row."""
    extent, context = sheet.bench.extent, sheet.bench.extent.contexts[0]
    found: dict[str, Any] = {"shape": shape, "texts": texts, "rows": rows}
    with runner_of(sheet.bench.model(shape), texts, context, extent.together) as runner:
        for name, wants in (("best", Wants()), ("candidates", Wants(candidates=True))):
            timed = time_pass(runner, texts, rows, context, extent.repeats, wants)
            found[f"{name}_milliseconds"] = timed["milliseconds"]
    return found


def _run_live(sheet: Sheet, drafters: Drafters) -> None:
    """Measure the live model with drafters: one text at a time, and several."""
    bench, extent, loaded = sheet.bench, sheet.bench.extent, sheet.bench.live
    model: Any = loaded.model
    prompts = [each.prompt for each in bench.questions]
    planner, expected = CostPlanner(bench.curve(model, loaded.name), BUDGET), Answers()
    answer(model, prompts, PLAIN, extent.tokens, expected)
    ways = [PLAIN, LOOP, *(Way(name, drafter, planner) for name, drafter in drafters.items())]

    def live(way: Way, texts: int) -> dict[str, Any]:
        found = Answers()
        answer(model, prompts[:texts], way, extent.tokens, Answers(), together=texts)
        answer(model, prompts, way, extent.tokens, found, together=texts)
        parted = differences(model, prompts, expected, found)
        unexcused = sum(not each["excused"] for each in parted)
        return {
            "texts": texts,
            "way": way.name,
            **found.figures(),
            "differ": len(parted),
            "failed": unexcused,
        }

    for texts in (extent.batches[0], extent.batches[min(2, len(extent.batches) - 1)]):
        for way in ways:
            sheet.cell(f"{texts} texts, {way.name}", partial(live, way, texts))
        free()


def run_dense(sheet: Sheet) -> None:
    """Measure states a second of each shape, then a store of the live model from text to drafts, beside REST."""
    bench = sheet.bench
    for shape in bench.extent.shapes:
        sheet.cell(f"states, {shape}", partial(_read_states, sheet, shape))
    bench.forget()
    (corpus,), loaded = bench.space.inputs(bench.extent.dense), bench.live
    out = bench.space.work / "stores" / bench.extent.dense.name
    options = DresdOptions(corpus=(corpus,), name=out.name, dims=min(DIMS, loaded.hidden_size or DIMS))

    def build() -> dict[str, Any]:
        begin = perf_counter()
        built = build_dresd(options, loaded.text, ModelStates(loaded), out, overwrite=True)
        counts = built.manifest.counts
        return {"store_seconds": round(perf_counter() - begin, 2), "entries": counts["entries"]}

    if sheet.cell("store", build) is None:
        return
    build_dresd(options, loaded.text, ModelStates(loaded), out)
    store = DresdStore.open(out, target_model=loaded.name, tokenizer=loaded.text.identity)
    rest = out.with_name(f"{out.name}-rest")
    build_rest(RestOptions(corpus=(corpus,), name=rest.name), loaded.text, rest)
    texts = RestStore.open(rest)
    _run_live(
        sheet,
        {
            "DReSD": store.drafter,
            "REST": texts.drafter,
            "DReSD and REST": lambda: Mixture([texts.drafter(), store.drafter()]),
        },
    )


def _read_states(sheet: Sheet, shape: str) -> dict[str, Any]:
    """Read the recordings with a random model of a shape, projected as for a store."""
    model = sheet.bench.model(shape)
    chosen = sheet.bench.recordings[: sheet.bench.extent.texts]
    texts = [np.concatenate([each.prompt, each.output]) for each in chosen]
    hidden = int(model.config.hidden_size)
    weights = np.random.default_rng(0).standard_normal((min(DIMS, hidden), hidden)).astype(np.float32)
    projection = Projection(weights, np.zeros(len(weights), np.float32))
    list(last_states(model, texts[:2], projection=projection))
    begin = perf_counter()
    states = sum(len(states) for _, states in last_states(model, texts, projection=projection))
    rate = round(states / (perf_counter() - begin), 1)
    return {"shape": shape, "texts": len(texts), "states": states, "states_per_second": rate}
