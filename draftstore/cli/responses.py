"""`draftstore responses`: a model's own answers, as a corpus for its stores and as recordings to replay."""

import time
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from draftstore.answers.responses import BATCH, ResponseOptions, Responses, make_responses
from draftstore.cli.build import show_problems
from draftstore.cli.common import (
    ManyValues,
    count_progress,
    json_option,
    print_json,
    printable,
    stderr_console,
)
from draftstore.cli.sources import (
    device_option,
    dtype_option,
    model_option,
    temperature_option,
    top_p_option,
)

LEFT_OUT = {
    "bad_records": "bad records",
    "repeated": "repeated prompts",
    "too_long": "prompts too long",
    "empty": "empty answers",
    "special": "answers that spell a special token",
    "other_models": "logged answers of other models",
}
FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(cls=ManyValues)
@model_option
@click.option(
    "--prompts",
    multiple=True,
    type=FILE,
    metavar="FILE...",
    help="JSON Lines (.jsonl, .ndjson, .json; packed: .gz, .zst) with `prompt` (a text or messages), `messages` (the "
    "turns before the assistant's first are the prompt) or `text`; may be repeated.",
)
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=FILE,
    metavar="FILE...",
    help="Response log of a worker: take over this model's answers without decoding. May be repeated.",
)
@click.option(
    "--logged-as", metavar="NAME", help="Name of the model in the logs. [default: the one of --model]"
)
@click.option("--out", required=True, type=FILE, help="File of the answers: .jsonl, .jsonl.gz or .jsonl.zst.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Maximum number of tokens in an answer.",
)
@temperature_option
@top_p_option
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of answers to each prompt; several need a --temperature above 0.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Seed of the random numbers.",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    default=BATCH,
    show_default=True,
    help="Number of answers decoded at once; halved if memory runs out.",
)
@click.option(
    "--max-prompt-tokens",
    type=click.IntRange(min=1),
    help="Skip prompts with more tokens. [default: what the model has room for]",
)
@click.option("--limit", type=click.IntRange(min=1), help="Maximum number of prompts.")
@click.option("--system", metavar="TEXT", help="System message for conversations without one.")
@click.option(
    "--chat/--raw",
    "chat",
    default=None,
    help="Ask texts in the model's chat template, or continue them as they are. [default: --chat if it has one]",
)
@click.option("--strict", is_flag=True, help="Stop at the first bad record instead of counting it.")
@click.option("--overwrite", is_flag=True, help="Replace other answers in the file, finished or not.")
@device_option
@dtype_option
@json_option
def responses(
    model: str,
    out: Path,
    batch: int,
    overwrite: bool,
    device: str | None,
    dtype: str | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Write down what a model answers, as a corpus for its stores.

    Stores of a model's own answers draft better than those of other texts. A killed run goes on where it stopped when
    the same command runs again. `build --corpus` and `replay --replays` read the file.

    \b
    Examples:
      draftstore responses --model ./model --prompts questions.jsonl --out answers.jsonl.zst
      draftstore responses --model ./model --prompts p.jsonl --temperature 0.7 --top-p 0.95 --samples 3 --out a.jsonl
      draftstore responses --model ./model --log worker-answers.jsonl --out own.jsonl
    """
    begin = time.perf_counter()
    with count_progress("answers") as bars:
        task = bars.add_task("loading", total=None, detail="")
        start = 0.0

        def show(done: int, total: int, tokens: int) -> None:
            nonlocal start
            now = time.perf_counter()
            start = start or now
            speed = f", {tokens / (now - start):,.0f} tokens/s" if tokens else ""
            bars.update(task, description="decoding", completed=done, total=total, detail=speed)

        made = make_responses(
            ResponseOptions(**asked),
            model,
            out,
            dtype=dtype,
            device=device,
            batch=batch,
            overwrite=overwrite,
            on_progress=show,
        )
    _report(made, time.perf_counter() - begin, as_json)


def _report(made: Responses, seconds: float, as_json: bool) -> None:
    """Print what was answered and what was skipped."""
    if as_json:
        print_json(
            {
                "path": str(made.path),
                "reused": made.reused,
                "seconds": round(seconds, 2),
                "counts": made.counts,
                "problems": [{"place": problem.place, "reason": problem.reason} for problem in made.problems],
            }
        )
        return
    console = stderr_console()
    if made.problems:
        show_problems(console, made.counts["bad_records"], made.problems)
    table = Table(show_header=False, box=None)
    counts = made.counts
    table.add_row("answers", f"{counts['answers']:,}")
    if counts["logged"]:
        table.add_row("of them logged", f"{counts['logged']:,}")
    table.add_row("tokens decoded", f"{counts['tokens']:,}")
    table.add_row("cut at their limit", f"{counts['cut']:,}")
    for key, what in LEFT_OUT.items():
        if counts[key]:
            table.add_row(what, f"{counts[key]:,}, left out")
    table.add_row("time", "already there" if made.reused else f"{seconds:.1f} s")
    console.print(table)
    click.echo(printable(made.path))
