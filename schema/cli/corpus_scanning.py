"""Scans of collections, as commands make them: with a progress bar, and a word on what could not be read."""

from draftstore.cli.common import count_progress, printable, stderr_console
from draftstore.errors import counted
from draftstore.text.scans import Scan
from draftstore.text.tokenizer import TextTokenizer
from schema import collecting
from schema.collection_models import Collection


def scan_with_progress(collection: Collection, tokenizer: TextTokenizer | None) -> Scan:
    """Scan a collection under a progress bar."""
    with count_progress("files") as bars:
        task = bars.add_task("scanning", total=None, detail="")

        def on_progress(done: int, total: int, documents: int) -> None:
            bars.update(task, completed=done, total=total, detail=f"{documents:,} documents read")

        return collecting.scan_collection(collection, tokenizer, on_progress=on_progress)


def warn_of_problems(found: Scan) -> None:
    """Say on stderr which records of a scan could not be read."""
    report = found.report
    if report.bad_records:
        first = f"{report.problems[0].place}: {report.problems[0].reason}"
        stderr_console().print(
            f"{counted(report.bad_records, 'bad record')}, the first one {printable(first)}"
        )
