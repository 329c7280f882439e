"""Decoding with drafts measured: `python -m benchmarks.decode`.

SmolLM2-135M-Instruct answers the prompts of three kinds of text (`benchmarks.decode_texts`) in seven ways that take
turns: plain `generate`, our loop without drafts, and our loop with drafts of REST, CREST, Token Recycling, the request,
and of all (REST, recycling and request in one tree). What is verified is planned by the cost curve, which is measured
first. Speedups are those of whole calls, prefill included: the median over rounds. Every output is compared with that
of plain `generate`.

With `--forced SHAPE` a model of that shape with random weights writes recorded outputs of Vicuna instead
(`benchmarks.forced`), on a GPU if there is one.

Tables first; the last line of stdout is one JSON document; each part is also written to OUT/decode_PART.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.decode --work ~/bench
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.common import CHAT, RecordingSet, Workspace, add_arguments, evenly, open_workspace
from benchmarks.decode_runs import LOOP, PLAIN, Series, Way, figures_of, run_ways
from benchmarks.decode_texts import QUICK as QUICK_TEXTS
from benchmarks.decode_texts import TINY_CHAT, Text, make_text
from benchmarks.decode_texts import Extent as TextExtent
from benchmarks.forced import LABEL, SHAPES, random_model, run_forced
from benchmarks.measure import progress
from benchmarks.report import describe_machine, save, show_table
from benchmarks.smollm import add_model_argument, smollm
from draftstore.cli.common import count_progress
from draftstore.decoding.budget import CostPlanner
from draftstore.decoding.curve import CostCurve
from draftstore.decoding.loop import Fixed, Planner
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.recycling import RecyclingDrafter
from draftstore.drafting.request import RequestDrafter
from draftstore.hf.loading import LoadedModel, load_model
from draftstore.hf.tuning import measure
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.crest.store import CrestStore
from draftstore.stores.rest.store import BUDGET, RestStore

PARTS = ("own", "apart", "copy")
RECORDED = RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5")
ROUNDS, QUICK_ROUNDS = 3, 1
FORCED_ROWS, QUICK_FORCED_ROWS = 10, 2
CREST_NGRAMS, QUICK_NGRAMS = 100_000, 2_000
GOALS = {"own": 1.3, "apart": 0.95}
"""Least speedup: of all drafts together on texts that resemble the store, and of every way on those that do not."""


def ways_of(
    vocab_size: int,
    rest: RestStore,
    crest: CrestStore,
    planner: Callable[[], Planner],
    *,
    recycling: bool = True,
) -> list[Way]:
    """Return the ways of decoding, those without drafts first.

    Args:
        vocab_size: ids of the model.
        rest: a store.
        crest: trees made from it.
        planner: makes the planner of each.
        recycling: whether the model's candidates mean something.
    """

    def everything() -> Drafter:
        parts: list[Drafter] = [RequestDrafter(vocab_size), rest.drafter()]
        return Mixture([*parts, RecyclingDrafter(vocab_size)] if recycling else parts)

    drafters: dict[str, Callable[[], Drafter]] = {
        "REST": rest.drafter,
        "CREST": crest.drafter,
        "Token Recycling": lambda: RecyclingDrafter(vocab_size),
        "request": lambda: RequestDrafter(vocab_size),
        "all": everything,
    }
    if not recycling:
        del drafters["Token Recycling"]
    drafting = [Way(name, drafter, planner()) for name, drafter in drafters.items()]
    return [Way(PLAIN, plain=True), Way(LOOP), *drafting]


def measure_text(
    loaded: LoadedModel, text: Text, curve: CostCurve, tokens: int, rounds: int
) -> dict[str, Any]:
    """Measure all ways on one kind of text."""
    ways = ways_of(loaded.vocab_size, text.rest, text.crest, lambda: CostPlanner(curve, BUDGET))
    with count_progress("answers") as bars:
        task = bars.add_task(text.name, total=len(ways) * len(text.prompts) * rounds, detail="")
        series = run_ways(
            loaded.model, ways, text.prompts, tokens=tokens, rounds=rounds,
            on_answer=lambda name: bars.update(task, advance=1, detail=name),
        )  # fmt: skip
    return {"text": text.about(), "most_tokens": tokens, "rounds": rounds, "ways": figures_of(series, curve)}


def measure_forced(
    space: Workspace, shape: str, *, quick: bool, rounds: int, rows: int | None
) -> dict[str, Any]:
    """Measure a model of a shape with random weights on recorded outputs."""
    rest = space.store(TINY_CHAT if quick else CHAT)
    ngrams = QUICK_NGRAMS if quick else CREST_NGRAMS
    options = CrestOptions(name=f"{rest.manifest.name}-crest", ngrams=ngrams)
    crest = CrestStore.open(
        build_crest(options, rest.path, space.work / "stores" / f"{options.name}-{ngrams}").path
    )
    recordings = [recording for recording in space.recordings(RECORDED) if len(recording.output) > 1]
    chosen = evenly(recordings, rows or (QUICK_FORCED_ROWS if quick else FORCED_ROWS))
    model = random_model(SHAPES[shape], rest.manifest.vocab_size)
    curve = measure_curve(model, f"{shape} shape, random weights", quick=quick)
    ways = ways_of(rest.manifest.vocab_size, rest, crest, lambda: CostPlanner(curve, BUDGET), recycling=False)
    ways.append(Way(f"all, {BUDGET} nodes every time", ways[-1].drafter, Fixed(BUDGET)))
    with count_progress("outputs") as bars:
        task = bars.add_task(f"{shape}: {LABEL}", total=len(ways) * len(chosen) * rounds, detail="")
        series = run_forced(
            model, ways, chosen, rounds=rounds,
            on_answer=lambda name: bars.update(task, advance=1, detail=name),
        )  # fmt: skip
    return {
        "label": LABEL,
        "shape": shape,
        "device": str(model.device),
        "dtype": str(model.dtype),
        "outputs": len(chosen),
        "rounds": rounds,
        "curve": curve_figures(curve),
        "ways": [
            row | _milliseconds(each) for row, each in zip(figures_of(series, curve), series, strict=True)
        ],
    }


def _milliseconds(series: Series) -> dict[str, float]:
    """Return what a step takes, by part."""
    tally = series.tally()
    parts = {"draft": tally.draft_ns, "forward": tally.forward_ns, "accept": tally.accept_ns}
    return {
        f"{name}_ms": round(value / 1e6 / tally.passes, 4) for name, value in parts.items() if tally.passes
    }


def measure_curve(model: Any, name: str, *, quick: bool) -> CostCurve:
    """Measure what passes cost."""
    progress(f"cost curve of {name}")
    return measure(model, name=name, context=16, repeats=1) if quick else measure(model, name=name)


def curve_figures(curve: CostCurve) -> dict[str, Any]:
    """Return a curve as JSON values, in milliseconds."""
    return {
        "rows": list(curve.rows),
        "milliseconds": [round(1000 * each, 3) for each in curve.seconds],
        "context": curve.context,
        "padded": curve.padded,
    }


def show_ways(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of one kind of text."""
    columns = (
        "way", "tokens/s", "over plain", "over loop", "least prompt", "by curve", "tokens a pass", "nodes",
        "draft %", "forward %", "accept %", "differ",
    )  # fmt: skip

    def percent(row: dict[str, Any], part: str) -> object:
        return round(100 * row[f"{part}_share"], 1) if f"{part}_share" in row else ""

    show_table(
        title,
        columns,
        [
            (
                row["way"], row["tokens_per_second"], row["over_plain"]["rounds"], row["over_loop"]["rounds"],
                min(row["over_plain"]["least_prompt"], row["over_loop"]["least_prompt"]),
                row.get("by_curve", ""), row.get("accepted_length", ""), row.get("nodes", ""), percent(row, "draft"),
                percent(row, "forward"), percent(row, "accept"), len(row["differences"]),
            )
            for row in rows
        ],
    )  # fmt: skip


def reached(part: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return whether the goals were reached."""
    by_way = {row["way"]: row for row in rows}
    differences = [difference for row in rows for difference in row["differences"]]
    found: dict[str, Any] = {"lossless": all(difference["excused"] for difference in differences)}
    drafting = [row for name, row in by_way.items() if name not in (PLAIN, LOOP)]
    chosen = [by_way["all"]] if part == "own" else drafting
    if part in GOALS:
        least = min(row[over]["rounds"] for row in chosen for over in ("over_plain", "over_loop"))
        found |= {"least_speedup": least, "goal": GOALS[part], "reached": least >= GOALS[part]}
    return found


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    add_arguments(parser)
    add_model_argument(parser)
    parser.add_argument("--parts", default=",".join(PARTS), help="any of %(default)s, joined by commas")
    parser.add_argument(
        "--forced", choices=SHAPES, help="a shape with random weights and recorded outputs instead"
    )
    parser.add_argument("--prompts", type=int, help=f"of each text (default: {TextExtent.prompts})")
    parser.add_argument("--tokens", type=int, help=f"of an answer at most (default: {TextExtent.tokens})")
    parser.add_argument("--rounds", type=int, help=f"(default: {ROUNDS})")
    parser.add_argument("--curve", type=Path, help="a cost curve of `draftstore tune` (default: measured)")
    args = parser.parse_args(arguments)
    if unknown := set(args.parts.split(",")) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    return args


def extent_of(args: argparse.Namespace) -> TextExtent:
    """Return how much is measured."""
    usual = QUICK_TEXTS if args.quick else TextExtent()
    return TextExtent(
        prompts=args.prompts or usual.prompts,
        tokens=args.tokens or usual.tokens,
        samples=usual.samples,
        chat=usual.chat,
        ngrams=usual.ngrams,
        longest=usual.longest,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts, and finish with the JSON document."""
    args = parse_arguments(arguments)
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    about = describe_machine(["torch", "transformers"]) | {"quick": args.quick}
    with open_workspace(args) as space:
        if args.forced:
            figures = measure_forced(space, args.forced, quick=args.quick, rounds=rounds, rows=args.prompts)
            show_ways(f"{args.forced} shape, {LABEL}", figures["ways"])
            save(args.out, f"decode_forced_{args.forced}", about | figures)
        else:
            figures = _run_parts(args, space, about, rounds)
    print(json.dumps(about | figures))


def _run_parts(
    args: argparse.Namespace, space: Workspace, about: dict[str, Any], rounds: int
) -> dict[str, Any]:
    """Run the parts with the real model."""
    extent = extent_of(args)
    loaded = load_model(smollm(space, args.model), dtype="float32", device="cpu")
    curve = (
        CostCurve.load(args.curve)
        if args.curve
        else measure_curve(loaded.model, loaded.name, quick=args.quick)
    )
    figures: dict[str, Any] = {}
    for part in (part for part in PARTS if part in args.parts.split(",")):
        begin, load = perf_counter(), os.getloadavg()[0]
        text = make_text(space, loaded, part, extent)
        found = measure_text(loaded, text, curve, extent.tokens, rounds)
        found |= reached(part, found["ways"])
        show_ways(f"{part}: {text.about()}", found["ways"])
        figures[part] = found | {
            "curve": curve_figures(curve), "load_average": load, "seconds": round(perf_counter() - begin),
        }  # fmt: skip
        save(args.out, f"decode_{part}", about | figures[part])
    return figures


if __name__ == "__main__":
    main()
