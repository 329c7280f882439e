"""Accepted length against bytes, REST and CREST: `python -m benchmarks.crest_curve`.

The figures 6 to 9 of the CREST paper, on recorded outputs: REST with more and more of the documents, counted as its
authors store it; CREST stores of several sizes, by selection; n-grams of one length; n-grams up to a length. Bytes of
CREST are those of its whole LMDB file. Tables and claims first, pictures in OUT; the last line of stdout is one JSON
document, also written to OUT/crest_curve.json.

Points that are in the work folder already are taken from there, unless the code that they depend on has changed since;
`--trust` takes them even so.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.crest_curve --work ~/bench --trust rest,single
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.claims import show_claims, state_claims
from benchmarks.common import (
    CHAT,
    CODE,
    STRATEGY_NAMES,
    RecordingSet,
    Source,
    Workspace,
    add_arguments,
    open_workspace,
)
from benchmarks.curve_points import (
    AUTHORS_TOKEN_BYTES,
    CrestPoint,
    Notes,
    Point,
    RestPoint,
    Subject,
    measure_points,
)
from benchmarks.curves import Curve, in_units, save_curves
from benchmarks.measure import progress
from benchmarks.report import COLORS, describe_machine, finish, show_table, without
from draftstore.storage.manifest import manifest_digest
from draftstore.stores.crest.selection import GAIN, SELECTIONS
from draftstore.stores.crest.store import BUDGET, DEFAULT_STRATEGY

SHARES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0)
FRACTIONS = {"1/100": 100.0, "1/13.5": 13.5}
"""Parts of REST's bytes that the claims are about."""
MEGABYTES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
FEW_MEGABYTES = (1.0, 4.0, 32.0)
"""Beside 1/13.5, for the lines of figures 8 and 9."""
RANKED = (GAIN, "combined", "global")
LENGTHS = (1, 2, 3, 4, 5)
MAX_N = 5
QUICK_ROWS = 8
QUICK_MEGABYTES = 0.5
QUICK_SOURCE = Source("chat_sharegpt_1M", CHAT.files, tokens=1_000_000)
LENGTH_COLORS = {1: "#7a7a7a", 2: "#1f5f8b", 3: "#3d8f5f", 4: "#c8862a", 5: "#b3541e"}
DETAILS = {"directory_bytes", "miss_rate", "passes", "raw_bytes_an_entry"}
"""What the file of results leaves out."""
SELECTION_COLORS = {GAIN: COLORS["backoff"], "global": "#3d8f5f", "combined": "#8a5a9e"}


@dataclasses.dataclass(frozen=True)
class CurveSet:
    """One curve: a corpus, recorded outputs, and what CREST should gain at 1/13.5 of REST's bytes, in percent."""

    name: str
    source: Source
    recorded: RecordingSet
    goal: float


SETS = (
    CurveSet("chat", CHAT, RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5"), 18.0),
    CurveSet("code", CODE, RecordingSet("humaneval.jsonl.zst", "CodeLlama-7b-Instruct-hf"), 10.0),
)


def main() -> None:
    """Measure every set and finish with the JSON document."""
    args = parse_arguments()
    with open_workspace(args) as workspace:
        notes = Notes(workspace.work / "crest_curve", args.trust.split(","))
        sets = [curve for curve in SETS if curve.name in args.sets.split(",")]
        if args.quick:
            sets = [dataclasses.replace(SETS[0], source=QUICK_SOURCE)]
        results = [run_set(workspace, curve, notes, QUICK_ROWS if args.quick else None) for curve in sets]
    document = {
        "quick": args.quick,
        "trusted": args.trust,
        "budget": BUDGET,
        "rest_bytes_per_token": AUTHORS_TOKEN_BYTES,
        "sets": results,
    }
    finish(args.out, "crest_curve", describe_machine(["lmdb", "zstandard"]) | without(document, DETAILS))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crest_curve", description=__doc__)
    add_arguments(parser, code=True)
    names = [curve.name for curve in SETS]
    parser.add_argument("--sets", default=",".join(names), help="any of %(default)s, joined by commas")
    kinds = (RestPoint.kind, *SELECTIONS)
    parser.add_argument(
        "--trust", default="", metavar="KINDS",
        help=f"take these points from the work folder whatever has changed: any of {','.join(kinds)}",
    )  # fmt: skip
    args = parser.parse_args()
    for option, known in (("sets", names), ("trust", kinds)):
        unknown = set(filter(None, getattr(args, option).split(","))) - set(known)
        if unknown:
            parser.error(f"unknown {option} {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    return args


def run_set(workspace: Workspace, curve: CurveSet, notes: Notes, rows: int | None) -> dict[str, Any]:
    """Measure all points of one set; print its tables and claims, save its pictures."""
    store = workspace.store(curve.source)
    manifest = store.manifest
    store.close()
    subject = Subject(store.path, manifest_digest(store.path), workspace.data, curve.recorded, rows)
    rest_bytes = AUTHORS_TOKEN_BYTES * manifest.counts["tokens"]
    points = plan_points(rest_bytes, *([(QUICK_MEGABYTES,)] * 2 if rows else [MEGABYTES, FEW_MEGABYTES]))
    figures: dict[Point, dict[str, Any]] = {}
    for point, measured in measure_points(subject, points, notes):
        figures[point] = measured
        progress(f"  {len(figures)}/{len(points)} {point}: M {measured[DEFAULT_STRATEGY]['accepted_length']}")
    rest = [figures[point] for point in points if isinstance(point, RestPoint)]
    crest = [figures[point] for point in points if isinstance(point, CrestPoint)]
    result = {
        "set": curve.name,
        "store": manifest.name,
        "documents": manifest.counts["documents"],
        "tokens": manifest.counts["tokens"],
        "recordings": dataclasses.asdict(curve.recorded),
        "rows": len(workspace.recordings(curve.recorded)[:rows]),
        "rest_bytes": rest_bytes,
        "rest": rest,
        "crest": crest,
    }
    _show(result)
    result["claims"] = state_claims(result, FRACTIONS, curve.goal)
    show_claims(result)
    _draw(workspace, result)
    return result


def plan_points(rest_bytes: int, megabytes: Sequence[float], few_megabytes: Sequence[float]) -> list[Point]:
    """Return all points, each once, in the order of the tables.

    Args:
        rest_bytes: of the REST store; the parts of it that claims are about are among the sizes.
        megabytes: sizes of the curve of each selection.
        few_megabytes: sizes of the lines that compare lengths.
    """
    exact = [int(rest_bytes / part) for part in FRACTIONS.values()]
    sizes = sorted({*exact, *(int(size * 1e6) for size in megabytes)})
    few = sorted({exact[-1], *(int(size * 1e6) for size in few_megabytes)})
    points: list[Point] = [RestPoint(share) for share in SHARES]
    points += [CrestPoint(selection, MAX_N, size) for selection in RANKED for size in sizes]
    points += [CrestPoint("single", n, size) for n in LENGTHS for size in few]
    shorter = [n for n in LENGTHS if 1 < n < MAX_N]
    points += [CrestPoint(name, n, size) for name in (GAIN, "combined") for n in shorter for size in few]
    return points


def _show(result: dict[str, Any]) -> None:
    """Print the points of a set."""
    whole = result["rest"][-1]
    base = whole["longest"]["accepted_length"]
    columns = ["store", "MB", "REST / bytes", "entries", *(f"M {name}" for name in STRATEGY_NAMES)]
    columns += [f"{name} to REST longest" for name in STRATEGY_NAMES]
    rows = []
    for point in [*result["rest"], *result["crest"]]:
        accepted = [point[name]["accepted_length"] for name in STRATEGY_NAMES]
        rows.append([
            _name(point), point["bytes"] / 1e6, result["rest_bytes"] / point["bytes"],
            point.get("entries", ""), *accepted, *(f"{value / base - 1:+.1%}" for value in accepted),
        ])  # fmt: skip
    title = (
        f"{result['set']}: {result['rows']} outputs of {result['recordings']['model']}, store {result['store']} "
        f"({result['tokens']:,} tokens); REST at {AUTHORS_TOKEN_BYTES} bytes a token"
    )
    show_table(title, columns, rows)


def _name(point: dict[str, Any]) -> str:
    """Name a point of the table."""
    if "share" in point:
        return f"REST, {point['share']:.0%} of the documents"
    length = f"n = {point['max_n']}" if point["selection"] == "single" else f"n <= {point['max_n']}"
    return f"CREST {point['selection']}, {length}"


def _draw(workspace: Workspace, result: dict[str, Any]) -> None:
    """Save the three pictures of a set."""
    crest = DEFAULT_STRATEGY

    compared = {point["max_bytes"] for point in result["crest"] if point["selection"] == "single"}

    def line(name: str, color: str, selection: str, max_n: int, dashed: bool = False) -> Curve:
        chosen = [p for p in result["crest"] if p["selection"] == selection and p["max_n"] == max_n]
        if color == LENGTH_COLORS[max_n]:  # one of several lengths, at the sizes that all have
            chosen = [p for p in chosen if p["max_bytes"] in compared]
        points = sorted((p["bytes"], p[crest]["accepted_length"]) for p in chosen)
        return Curve(name, points, color, dashed)

    rest = [
        Curve(f"REST {each}", [(p["bytes"], p[each]["accepted_length"]) for p in result["rest"]], "#b3541e", dashed)
        for each, dashed in (("longest", False), ("backoff", True))
    ]  # fmt: skip
    ranked = [line(f"CREST {name}", SELECTION_COLORS[name], name, MAX_N) for name in RANKED]
    single = [line(f"n = {n}", LENGTH_COLORS[n], "single", n) for n in LENGTHS]
    combined = [line(f"combined, n ≤ {n}", LENGTH_COLORS[n], "combined", n, True) for n in LENGTHS[1:]]
    gain = [line(f"gain, n ≤ {n}", LENGTH_COLORS[n], GAIN, n) for n in LENGTHS[1:]]
    marks = {f"{name} of REST": result["rest_bytes"] / part for name, part in FRACTIONS.items()}
    marks["REST"] = result["rest_bytes"]
    subject = f"{result['set']}: {result['rows']} outputs of {result['recordings']['model']}"
    for name, title, curves in (
        ("curve", f"REST and CREST ({crest}), {subject}", [*rest, *ranked]),
        ("single", f"CREST of one length ({crest}), {subject}", single),
        ("lengths", f"CREST up to a length ({crest}), {subject}", [*combined, *gain]),
    ):
        own = marks if name == "curve" else {key: value for key, value in marks.items() if key != "REST"}
        save_curves(workspace.out / f"crest_{name}_{result['set']}.png", title, curves, rest[0], own)
    progress(f"  pictures in {workspace.out}, REST has {in_units(result['rest_bytes'])}")


if __name__ == "__main__":
    main()
