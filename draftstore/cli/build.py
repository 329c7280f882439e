"""`draftstore build`, `count`, `responses` and `export`: what is made of texts, models and stores."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from draftstore.answers.responses import Responder, ResponseOptions, Responses, make_responses
from draftstore.cli.common import STORE, bytes_text, progress_bars, status
from draftstore.cli.options import Command, Group, SpreadCommand, takes
from draftstore.cli.output import json_option, print_fields, print_json, printable, say
from draftstore.engines.llama_cpp import ExportOptions, export_cache
from draftstore.errors import counted
from draftstore.hf.building import materials
from draftstore.storage.report import Progress, ReadReport, RecordProblem, passed_over_text
from draftstore.storage.staging import BuildResult
from draftstore.stores.crest.counts import CountOptions, build_counts
from draftstore.stores.kind import Builder, TextSources
from draftstore.stores.registry import KINDS, builder_of
from draftstore.stores.rest.build import RestOptions, RestSources, build_rest
from draftstore.stores.rest.joining import join_rest
from draftstore.text.tokenizer import load_tokenizer

SHOWN = 5
"""Maximum number of bad records and unread files to list by name."""

LEFT_OUT = {
    "bad_records": "bad records",
    "repeated": "repeated prompts",
    "too_long": "prompts too long",
    "empty": "empty answers",
    "special": "answers that spell a special token",
}


def out_option(text: str, **accepted: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the option `--out`; see `click.Path` for what it accepts."""
    return click.option("--out", required=True, type=click.Path(path_type=Path, **accepted), help=text)


def overwrite_option(text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the option `--overwrite`."""
    return click.option("--overwrite", is_flag=True, help=text)


class Kinds(Group):
    """The build commands of all kinds of stores."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names of the kinds that have a builder."""
        return sorted(kind for kind in KINDS if builder_of(kind))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Return the command of a kind."""
        builder = builder_of(cmd_name)
        return builder and command_of(cmd_name, builder)


@click.group(cls=Kinds)
def build() -> None:
    """Build a store from text."""


def command_of(kind: str, builder: Builder) -> click.Command:
    """Return the command that builds stores of a kind."""

    @click.command(kind, cls=SpreadCommand, help=builder.help)
    @takes(sources=builder.sources, options=builder.options)
    @out_option("Directory of the new store.")
    @overwrite_option("Replace an existing store.")
    @json_option
    def command(sources: Any, options: Any, out: Path, overwrite: bool, as_json: bool) -> None:
        begin = time.perf_counter()
        options = options.model_copy(update={"name": options.name or out.name})
        with progress_bars() as progress:
            made = _materials(sources, out, progress)
            result = builder.build(options, out=out, overwrite=overwrite, progress=progress, **made)
        report_build(result, time.perf_counter() - begin, as_json)

    return command


def _materials(sources: Any, out: Path, progress: Progress) -> dict[str, Any]:
    """Load the materials of a store; build or join its REST store beside the new store, unless one is named."""
    match sources:
        case TextSources():
            return materials(sources, tokenizer=load_tokenizer(sources.tokenizer))
        case RestSources():
            _require_source(sources)
            rest = _make_rest(sources, out.with_name(f"{out.name}-rest"), progress)
            return materials(sources, rest=rest)
    with status(f"loading {printable(sources.model)}"):
        return materials(sources)


def _require_source(sources: RestSources) -> None:
    if bool(sources.rest) == bool(sources.corpus):
        raise click.UsageError("Give either --rest with a REST store, or --corpus with --tokenizer.")
    if sources.corpus and sources.tokenizer is None:
        raise click.UsageError("--corpus needs --tokenizer: that of the model that will decode.")


def _make_rest(sources: RestSources, out: Path, progress: Progress) -> Path:
    """Return the named REST store; join several, or build one from texts, at `out`."""
    if len(sources.rest) == 1:
        return sources.rest[0]
    if sources.rest:
        return join_rest(sources.rest, out, progress=progress).path
    options = RestOptions.of(sources, name=out.name)
    tokenizer = load_tokenizer(str(sources.tokenizer))
    workers, cluster = sources.workers, sources.cluster
    return build_rest(options, tokenizer, out, workers=workers, cluster=cluster, progress=progress).path


def report_build(result: BuildResult, seconds: float, as_json: bool) -> None:
    """Print what was built and what was skipped."""
    manifest, report = result.manifest, result.report
    if as_json:
        return print_json(
            {
                "path": result.path,
                "name": manifest.name,
                "reused": result.reused,
                "seconds": round(seconds, 2),
                "bytes": manifest.size,
                "counts": manifest.counts,
                "bad_records": report.bad_records,
                "truncated": report.truncated,
                "empty_documents": report.empty_documents,
                "filtered": report.filtered,
                "problems": problems_json(report.problems),
                "unread": report.unread,
                "passed_over": report.passed_over,
            }
        )
    _print_skipped(report)
    empty = report.empty_documents
    fields = manifest.counts | {
        "empty documents": f"{empty:,}, skipped" if empty else None,
        "filtered out": counted(report.filtered, "record") if report.filtered else None,
        "bytes": bytes_text(manifest),
        "time": "already built" if result.reused else f"{seconds:.1f} s",
    }
    print_fields(fields, err=True)
    return say(str(result.path))


def problems_json(problems: Sequence[RecordProblem]) -> list[dict[str, str]]:
    """Return bad records as JSON values."""
    return [{"place": problem.place, "reason": problem.reason} for problem in problems]


def _print_skipped(report: ReadReport) -> None:
    if report.bad_records:
        show_problems(report.bad_records, report.problems)
    for path in report.unread[:SHOWN]:
        say(f"no text in {path}", err=True)
    if len(report.unread) > SHOWN:
        say(f"no text in {counted(len(report.unread) - SHOWN, 'more file')}", err=True)
    if report.passed_over:
        say(passed_over_text(report.passed_over), err=True)


def show_problems(number: int, problems: Sequence[RecordProblem]) -> None:
    """Print the number of skipped records, naming the first few."""
    were = "was" if number == 1 else "were"
    say(f"{counted(number, 'bad record')} {were} skipped" + ":" * bool(problems), err=True)
    for problem in problems[:SHOWN]:
        say(f"  {problem.place}: {problem.reason}", err=True)
    if number > SHOWN and problems:
        say("  ...", err=True)


@click.command(cls=Command)
@click.argument("directory", type=STORE)
@out_option("Directory of the counts.")
@takes(options=CountOptions)
@overwrite_option("Replace existing counts.")
@json_option
def count(directory: Path, out: Path, options: CountOptions, overwrite: bool, as_json: bool) -> None:
    """Count all n-grams of a REST store, exactly, into Parquet files.

    \b
    Example:
      draftstore count stores/chat --out stores/chat-ngrams
    """
    begin = time.perf_counter()
    with progress_bars() as progress:
        result = build_counts(directory, out, options, overwrite=overwrite, progress=progress)
    report_build(result, time.perf_counter() - begin, as_json)


@click.command(cls=SpreadCommand)
@takes(by=Responder, options=ResponseOptions)
@out_option("File of the answers: .jsonl, .jsonl.gz or .jsonl.zst.", dir_okay=False)
@overwrite_option("Replace other answers in the file, finished or not.")
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
    _report_answers(made, time.perf_counter() - begin, as_json)


def _report_answers(made: Responses, seconds: float, as_json: bool) -> None:
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


@click.group(cls=Group)
def export() -> None:
    """Export a store to another program's format.

    \b
    Example:
      draftstore export llama-cpp stores/chat --out chat.bin
    """


@export.command("llama-cpp")
@click.argument("directory", type=STORE)
@out_option("The file.")
@takes(options=ExportOptions)
@overwrite_option("Replace an existing file.")
@json_option
def llama_cpp(directory: Path, out: Path, options: ExportOptions, overwrite: bool, as_json: bool) -> None:
    """Export followers of token pairs as a static cache for llama.cpp's lookup decoding.

    Takes a REST store, or its counts made by `draftstore count`. The file holds ids of the store's tokenizer: only
    models with the same tokenizer can use it. In memory it takes 17 times its size for each slot of llama-server.

    \b
    Example:
      draftstore export llama-cpp stores/chat --out chat.bin --max-bytes 10MB
      llama-server -m model.gguf --spec-type ngram-simple,ngram-cache --lookup-cache-static chat.bin --parallel 1 \\
          --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 8
    """
    begin = time.perf_counter()
    with progress_bars() as progress:
        made = export_cache(directory, out, options, overwrite=overwrite, progress=progress)
    seconds = time.perf_counter() - begin
    if as_json:
        found = {"ngrams": made.ngrams, "omitted": made.omitted}
        return print_json({"path": made.path, "bytes": made.size, "seconds": round(seconds, 2), **found})
    left = f", {made.omitted:,} omitted due to --max-bytes" * bool(made.omitted)
    say(f"{counted(made.ngrams, 'pair')} of tokens, {made.size:,} bytes, {seconds:.1f} s{left}", err=True)
    return say(str(made.path))
