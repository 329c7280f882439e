"""`draftstore build`: stores from text."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress as Bars
from rich.table import Table

from draftstore.cli.common import (
    ManyValues,
    bytes_text,
    count_progress,
    json_option,
    print_json,
    printable,
    stderr_console,
)
from draftstore.cluster import open_pool
from draftstore.errors import counted
from draftstore.storage.report import ReadReport, RecordProblem, passed_over_text
from draftstore.storage.staging import BuildResult
from draftstore.stores.rest.build import SEGMENT_TOKENS, Progress, RestOptions, build_rest
from draftstore.text.corpus import SOURCE_PATTERNS
from draftstore.text.tokenizer import load_tokenizer

SHOWN = 5
"""Maximum number of bad records and unread files to list by name."""


CORPUS_HELP = (
    "A file or folder; may be repeated. Files: JSON Lines (.jsonl, .ndjson, .json) or .parquet with `text` "
    "or `messages`; text and source files; all but .parquet also packed (.gz, .zst). In a folder the unpacked text "
    "and source files are read, or what --glob names."
)
TOKENIZER_HELP = "A folder with tokenizer.json, that file, or a name on the Hugging Face hub."


corpus_option = click.option(
    "--corpus",
    required=True,
    multiple=True,
    metavar="PATH...",
    type=click.Path(path_type=Path),
    help=CORPUS_HELP,
)
column_option = click.option(
    "--column", default="text", show_default=True, help="Key or column that holds the text of a record."
)
glob_option = click.option(
    "--glob",
    multiple=True,
    metavar="PATTERN...",
    help="Files of a folder to read, such as '*.jsonl'; may be repeated. [default: text and source]",
)
strict_option = click.option(
    "--strict", is_flag=True, help="Stop at the first bad record instead of counting it."
)
truncated_option = click.option(
    "--allow-truncated",
    is_flag=True,
    help="Build also from files that are cut short or damaged, up to that place, instead of failing.",
)
rehash_option = click.option(
    "--rehash",
    is_flag=True,
    help="Read large files to see whether they changed, even where size and times say that they did not.",
)
out_option = click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Directory of the new store."
)
name_option = click.option("--name", help="Name of the store, for people. [default: the directory's]")
cluster_option = click.option(
    "--cluster",
    metavar="ADDRESS",
    help="Work on a Dask cluster: the address of its scheduler, as tcp://machine:8786, or local:2 for two processes on "
    "this machine. All its machines need the files at the same paths. [default: this process and its own]",
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace an existing store.")


@click.group()
def build() -> None:
    """Build a store from text."""


@build.command(cls=ManyValues)
@corpus_option
@click.option("--tokenizer", required=True, metavar="T", help=TOKENIZER_HELP)
@out_option
@name_option
@column_option
@glob_option
@strict_option
@truncated_option
@rehash_option
@click.option(
    "--segment-tokens",
    default=SEGMENT_TOKENS,
    show_default=True,
    help="Maximum number of tokens in a suffix array.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Number of processes that sort segments. [default: all cores]",
)
@cluster_option
@overwrite_option
@json_option
def rest(
    corpus: tuple[Path, ...],
    tokenizer: str,
    out: Path,
    name: str | None,
    column: str,
    glob: tuple[str, ...],
    strict: bool,
    allow_truncated: bool,
    rehash: bool,
    segment_tokens: int,
    workers: int | None,
    cluster: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Build a REST store: the corpus as token ids with suffix arrays.

    A killed build goes on where it stopped when the same command runs again.

    \b
    Examples:
      draftstore build rest --corpus chats.jsonl.zst src/ --tokenizer ./llama2 --out stores/chat
      draftstore build rest --corpus /share/web --tokenizer /share/llama2 --out /share/web-store --cluster tcp://host:8786
    """
    options = RestOptions(
        corpus=corpus,
        name=name or out.name,
        column=column,
        glob=glob or SOURCE_PATTERNS,
        strict=strict,
        allow_truncated=allow_truncated,
        rehash=rehash,
        segment_tokens=segment_tokens,
    )
    loaded = load_tokenizer(tokenizer)
    begin = time.perf_counter()
    with open_pool(cluster) as pool, build_bars() as progress:
        result = build_rest(
            options, loaded, out, overwrite=overwrite, workers=workers, pool=pool, progress=progress
        )
    report_build(result, time.perf_counter() - begin, as_json)


@contextmanager
def build_bars() -> Iterator[Progress]:
    """Show one progress bar for each step of a build, on stderr."""
    with count_progress("") as bars:
        yield Progress(
            tokenized=Bar(bars, "tokenizing", "tokens").tokenized,
            sorted=Bar(bars, "sorting", "tokens").amount,
            hashed=Bar(bars, "hashing", "bytes").amount,
        )


class Bar:
    """One step of a build; shown from its first report on."""

    def __init__(self, bars: Bars, title: str, unit: str) -> None:
        self._bars, self._title, self._unit = bars, title, unit
        self._task: int | None = None
        self._begin, self._first = 0.0, 0

    def tokenized(self, documents: int, tokens: int, _characters: int) -> None:
        """Report a step of unknown size."""
        self._update(tokens, None, f"{self._unit}, {counted(documents, 'document')}")

    def amount(self, done: int, total: int) -> None:
        """Report a step of known size."""
        self._update(done, total, self._unit)

    def _update(self, done: int, total: int | None, detail: str) -> None:
        now = time.perf_counter()
        if self._task is None:
            self._begin, self._first = now, done
            self._task = self._bars.add_task(self._title, total=total, detail="")
        rate = (done - self._first) / max(now - self._begin, 1e-9)
        speed = f", {_per_second(rate)}" if done > self._first else ""
        self._bars.update(self._task, completed=done, total=total, detail=detail + speed)  # type: ignore[arg-type]


def _per_second(rate: float) -> str:
    """Return a rate with a suitable number of digits: a model reads a hundredth of a tokenizer's rate."""
    return f"{rate / 1e6:.2f} M/s" if rate >= 1e5 else f"{rate:,.0f}/s"


def report_build(result: BuildResult, seconds: float, as_json: bool) -> None:
    """Print what was built and what was skipped."""
    manifest, report = result.manifest, result.report
    if as_json:
        print_json(
            {
                "path": str(result.path),
                "name": manifest.name,
                "reused": result.reused,
                "seconds": round(seconds, 2),
                "bytes": manifest.size,
                "counts": manifest.counts,
                "bad_records": report.bad_records,
                "truncated": report.truncated,
                "empty_documents": report.empty_documents,
                "problems": [
                    {"place": problem.place, "reason": problem.reason} for problem in report.problems
                ],
                "unread": report.unread,
                "passed_over": report.passed_over,
            }
        )
        return
    console = stderr_console()
    _print_left_out(console, report)
    table = Table(show_header=False, box=None)
    for key, value in manifest.counts.items():
        table.add_row(key, f"{value:,}")
    if report.empty_documents:
        table.add_row("empty documents", f"{report.empty_documents:,}, left out")
    table.add_row("bytes", bytes_text(manifest))
    table.add_row("time", "already built" if result.reused else f"{seconds:.1f} s")
    console.print(table)
    click.echo(printable(result.path))


def _print_left_out(console: Console, report: ReadReport) -> None:
    """Print the skipped records and files, the first of each kind by name."""
    if report.bad_records:
        show_problems(console, report.bad_records, report.problems)
    for path in report.unread[:SHOWN]:
        console.print(f"nothing was read from {printable(path)}", style="yellow", soft_wrap=True)
    if len(report.unread) > SHOWN:
        more = counted(len(report.unread) - SHOWN, "more file")
        console.print(f"nothing was read from {more}", style="yellow", soft_wrap=True)
    if report.passed_over:
        console.print(passed_over_text(report.passed_over), style="yellow", soft_wrap=True)


def show_problems(console: Console, number: int, problems: Sequence[RecordProblem]) -> None:
    """Print the number of skipped records, the first of them by name."""
    were = "was" if number == 1 else "were"
    head = f"{counted(number, 'bad record')} {were} left out"
    console.print(head + ":" * bool(problems), style="yellow")
    for problem in problems[:SHOWN]:
        console.print(f"  {printable(problem.place)}: {printable(problem.reason)}", soft_wrap=True)
    if number > SHOWN and problems:
        console.print("  ...")
