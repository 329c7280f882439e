"""A model's answers become its store, day by day: `python -m benchmarks.flywheel`.

The recorded answers of one model to the AlpacaEval instructions are dealt into days, by the hash of their ids. What is
asked on a day is drafted from a store of the answers of the days before it, from some text of another origin, and from
both in one store; the first day's model has answered nothing yet. As the data has it, no instruction is asked twice:
what a store gains here is how the model writes, not what it has said before. Repeated questions would gain more.

Stores are built anew each night, by a plain build. Tables first, then the picture docs/flywheel.svg; the last line of
stdout is one JSON document, also written to OUT/flywheel.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.flywheel --work ~/bench
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.common import (
    CHAT,
    Source,
    Workspace,
    accepted_length,
    add_arguments,
    open_workspace,
    write_records,
)
from benchmarks.picture import save_svg
from benchmarks.report import describe_machine, finish, new_axes, show_table
from draftstore.decoding.replay import read_recordings
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import RestStore
from draftstore.text.records import read_json_records

PICTURE = Path("docs/flywheel.svg")
RECORDED = "alpaca_eval.jsonl.zst"
MODELS = ("vicuna-7b-v1.5", "Meta-Llama-3-8B-Instruct")
DAYS, QUICK_DAYS = 5, 2
QUICK_ROWS = 6
NODES = 64
BASE = Source("chat_sharegpt_1M", CHAT.files, tokens=1_000_000)
"""The text of another origin."""
ANSWERS, OTHER, BOTH = "its answers", "other text", "both"
COLORS = {ANSWERS: "#0f7b5f", OTHER: "#8a8a8a", BOTH: "#1f5f8b"}


def deal(records: Sequence[Mapping[str, Any]], days: int) -> list[list[Mapping[str, Any]]]:
    """Deal records into days of about equal size, by the hash of their ids: the same ones every time."""
    order = sorted(records, key=lambda record: sha256(str(record["id"]).encode()).digest())
    return [list(order[day::days]) for day in range(days)]


def run_model(workspace: Workspace, model: str, days: int, rows: int | None) -> list[dict[str, Any]]:
    """Return what each day brought."""
    file = workspace.data / "replays" / RECORDED
    records = [record for _, record in read_json_records(file) if record["model"] == model][:rows]
    folder = workspace.work / "flywheel" / model
    folder.mkdir(parents=True, exist_ok=True)
    base = workspace.inputs(BASE)
    answered: list[Path] = []
    found = []
    for day, asked in enumerate(deal(records, days), 1):
        today = folder / f"day-{day}.jsonl"
        write_records(today, asked)
        texts = {ANSWERS: tuple(answered), OTHER: base, BOTH: (*base, *answered)}
        ask = partial(_ask, workspace, today)
        lengths = {name: ask(files, folder / f"{day}-{name}") for name, files in texts.items() if files}
        found.append({"day": day, "requests": len(asked), **lengths})
        answered.append(_answers(today, folder / f"answers-{day}.jsonl"))
    return found


def _answers(recorded: Path, path: Path) -> Path:
    """Write recorded answers as conversations, as a decoding worker logs them."""
    lines = map(json.loads, recorded.read_text(encoding="utf-8").splitlines())
    answer = {"role": "assistant"}
    write_records(
        path,
        (
            {"id": line["id"], "messages": [*line["prompt"], answer | {"content": line["output"]}]}
            for line in lines
        ),
    )
    return path


def _ask(workspace: Workspace, recorded: Path, files: tuple[Path, ...], out: Path) -> dict[str, float]:
    """Build a store of some texts and replay a day; return the accepted length, and the tokens of the store."""
    built = build_rest(RestOptions(files, out.name), workspace.tokenizer, out, overwrite=True)
    store = RestStore.open(built.path)
    recordings = list(read_recordings(recorded, workspace.tokenizer))
    figures = accepted_length(store.drafter("backoff"), recordings, NODES)
    store.close()
    return {"accepted_length": figures["accepted_length"], "tokens": built.manifest.counts["tokens"]}


def draw(path: Path, models: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draw M by day: a line for each store, solid for the first model, dashed for the next."""
    figure, axes = new_axes("", "day", f"accepted length M, {NODES} nodes")
    figure.set_size_inches(7.2, 3.8)
    for (model, days), style in zip(models.items(), ("o-", "o--"), strict=False):
        for name, color in COLORS.items():
            known = [(each["day"], each[name]["accepted_length"]) for each in days if name in each]
            axes.plot(*zip(*known, strict=True), style, markersize=4, color=color, label=f"{name}, {model}")
    axes.set_xticks([each["day"] for each in next(iter(models.values()))])
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_svg(figure, path)


def show(model: str, days: Sequence[Mapping[str, Any]]) -> None:
    """Print M by day."""
    rows = [
        [str(each["day"]), each["requests"], each.get(ANSWERS, {}).get("tokens", 0)]
        + [each[name]["accepted_length"] if name in each else "" for name in COLORS]
        for each in days
    ]
    show_table(f"accepted length by day, {model}", ["day", "requests", "own tokens", *COLORS], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all days, print tables, draw, and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flywheel", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(arguments)
    days, rows = (QUICK_DAYS, QUICK_ROWS) if args.quick else (DAYS, None)
    with open_workspace(args) as workspace:
        models = {model: run_model(workspace, model, days, rows) for model in MODELS}
    for model, found in models.items():
        show(model, found)
    finish(args.out, "flywheel", describe_machine() | {"quick": args.quick, "nodes": NODES, "models": models})
    if not args.quick:
        draw(PICTURE, models)


if __name__ == "__main__":
    main()
