"""`draftstore gain`: what drafts yield on one's own log, before anything is installed in an engine."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import click
from pydantic import Field

from draftstore.answers.gain import TOKENS, Gain, measure_gain
from draftstore.answers.picture import draw_gain
from draftstore.cli.common import progress_bars
from draftstore.cli.options import Command, takes
from draftstore.cli.output import json_option, print_json, print_table, say
from draftstore.decoding.curve import CostCurve
from draftstore.errors import counted
from draftstore.options import Shown
from draftstore.stores.kind import TOKENIZER
from draftstore.text.records import TURNS
from draftstore.text.selecting import PairOptions
from draftstore.text.tokenizer import load_tokenizer


class GainOptions(PairOptions):
    """Options of a forecast."""

    tokenizer: Annotated[str, Shown(metavar="T")] = Field(
        min_length=1, description=f"That of the model that will decode. {TOKENIZER}"
    )
    curve: Annotated[Path | None, Shown(metavar="FILE")] = Field(
        None,
        description="Costs of the model's passes, from `draftstore tune --out FILE`: adds tokens per second.",
    )
    picture: Annotated[Path | None, Shown(metavar="FILE")] = Field(None, description="Draw the table as SVG.")
    tokens: int = Field(TOKENS, ge=2, description="Maximum number of replayed tokens, drawn by conversation.")
    seed: int = Field(0, ge=0, lt=2**63, description="Another number splits the log in other halves.")
    work: Annotated[Path | None, Shown(unset="a temporary one", metavar="DIR")] = Field(
        None, description="Folder in which to keep the halves and their stores."
    )


@click.command(cls=Command)
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="LOG...")
@takes(options=GainOptions)
@json_option
def gain(logs: tuple[Path, ...], options: GainOptions, as_json: bool) -> None:
    """Forecast what drafts yield on a log of conversations.

    LOG is a file or folder of conversations (JSON Lines or Parquet), such as a worker's response log. It is split in
    halves by conversation, each is built into a store, and the other is replayed from it: M is the number of tokens a
    pass. No text is measured with a store that contains it.

    \b
    Example:
      draftstore gain answers.jsonl --tokenizer ./llama2
      draftstore gain answers.1.jsonl answers.jsonl --tokenizer ./llama2 --curve a100.json --picture gain.svg
    """
    tokenizer = load_tokenizer(options.tokenizer)
    curve = CostCurve.load(options.curve) if options.curve else None
    with _folder(options.work) as work, progress_bars() as progress:
        found = measure_gain(
            logs, tokenizer, work, records=TURNS.changed(fields=options.fields),
            tokens=options.tokens, seed=options.seed, curve=curve, progress=progress,
        )  # fmt: skip
    if options.picture:
        draw_gain(options.picture, found)
    if as_json:
        return print_json(_json(found))
    _show(found)
    return None


@contextmanager
def _folder(work: Path | None) -> Iterator[Path]:
    with TemporaryDirectory(prefix="draftstore-gain-") if work is None else nullcontext(work) as folder:
        yield Path(folder)


def _json(found: Gain) -> dict[str, Any]:
    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return fields | {
        "rows": [dataclasses.asdict(row) for row in found.rows],
        "report": {
            "bad_records": found.report.bad_records,
            "problems": list(map(vars, found.report.problems)),
        },
    }


def _show(found: Gain) -> None:
    if found.report.bad_records:
        problem = found.report.problems[0]
        bad = counted(found.report.bad_records, "record")
        say(f"warning: {bad} skipped; the first: {problem.place}: {problem.reason}", err=True)
    speeds = [f"tokens/s at {texts}" for texts in found.plain]
    rows: list[Any] = [("none", "none", "1.00", "", "", *map(round, found.plain.values()))]
    for row in found.rows:
        low, high = row.interval
        figures = f"{row.length:.2f}", f"{low:.2f} to {high:.2f}", round(row.draft_us)
        rows.append((row.sources, row.drafts, *figures, *map(round, row.speeds.values())))
    print_table(("drafts from", "verified", "M", "95 %", "µs to draft", *speeds), rows)
    say(
        f"{counted(found.conversations, 'conversation')} with {counted(found.outputs, 'answer')}; replayed: "
        f"{counted(found.replayed, 'conversation')}, {counted(found.tokens, 'token')}"
    )
