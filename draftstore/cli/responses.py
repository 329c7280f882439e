"""`draftstore responses`: a model's own answers, as a corpus for its stores and recordings to replay."""

import time
from pathlib import Path

import click

from draftstore.answers.responses import Responder, ResponseOptions, Responses, make_responses
from draftstore.cli.build import problems_json, show_problems
from draftstore.cli.common import progress_bars
from draftstore.cli.options import SpreadCommand, takes
from draftstore.cli.output import json_option, print_fields, print_json, say

LEFT_OUT = {
    "bad_records": "bad records",
    "repeated": "repeated prompts",
    "too_long": "prompts too long",
    "empty": "empty answers",
    "special": "answers that spell a special token",
}


@click.command(cls=SpreadCommand)
@takes(by=Responder, options=ResponseOptions)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of the answers: .jsonl, .jsonl.gz or .jsonl.zst.",
)
@click.option("--overwrite", is_flag=True, help="Replace other answers in the file, finished or not.")
@json_option
def responses(by: Responder, options: ResponseOptions, out: Path, overwrite: bool, as_json: bool) -> None:
    """Record a model's answers as a corpus for its stores.

    Stores of a model's own answers draft better than those of other texts. Run the same command again to resume a
    killed run. `build --corpus` and `replay --replays` read the file.

    \b
    Examples:
      draftstore responses --model ./model --prompts questions.jsonl --out answers.jsonl.zst
      draftstore responses --model ./model --prompts p.jsonl --temperature 0.7 --top-p 0.95 --samples 3 --out a.jsonl
    """
    begin = time.perf_counter()
    with progress_bars() as progress:
        made = make_responses(
            options, by.model, out,
            dtype=by.dtype, device=by.device, batch=by.batch, overwrite=overwrite,
            on_progress=progress("decoding", "answers"),
        )  # fmt: skip
    _report(made, time.perf_counter() - begin, as_json)


def _report(made: Responses, seconds: float, as_json: bool) -> None:
    counts = made.counts
    if as_json:
        done = {"path": made.path, "reused": made.reused, "seconds": round(seconds, 2)}
        return print_json({**done, "counts": counts, "problems": problems_json(made.problems)})
    if made.problems:
        show_problems(counts["bad_records"], made.problems)
    fields = {
        "answers": counts["answers"],
        "tokens decoded": counts["tokens"],
        "cut at the token limit": counts["cut"],
        **{what: f"{counts[key]:,}, skipped" for key, what in LEFT_OUT.items() if counts[key]},
        "time": "already complete" if made.reused else f"{seconds:.1f} s",
    }
    print_fields(fields, err=True)
    return say(str(made.path))
