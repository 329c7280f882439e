"""`draftstore live`: the log of a live store, and its limit."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from draftstore.cli.common import STORE
from draftstore.cli.output import json_option, print_fields, print_json
from draftstore.errors import DraftstoreError
from draftstore.live import log
from draftstore.live.target import LEAST


@click.command()
@click.argument("directory", type=STORE)
@click.option(
    "--tokens",
    type=click.IntRange(LEAST, 2**31 - 1),
    help="Keep the log for a memory of so many tokens at most: the oldest documents beyond are deleted, now and later.",
)
@json_option
def live(directory: Path, tokens: int | None, as_json: bool) -> None:
    """Show the log of a live store, or lower its limit.

    A log is kept for the largest memory of the processes that have used it, up to 64 times the bytes of its ids. A
    process that starts with more TOKENS than the limit raises it again.

    \b
    Examples:
      draftstore live live/team
      draftstore live live/team --tokens 200000
    """
    if not (directory / "live.json").exists():
        raise DraftstoreError(
            f"{directory} is not the log of a live store: name the DIR of `--live NAME=DIR`"
        )
    deleted = log.limit(directory, tokens) if tokens else 0
    found = _found(directory) | {"deleted_documents": deleted}
    if as_json:
        print_json(found)
    else:
        print_fields({label.replace("_", " "): value for label, value in found.items()})


def _found(directory: Path) -> dict[str, Any]:
    """Return what a log holds."""
    settings, paths, size = log.settings_of(directory), log.segments(directory), 0
    for path in paths:
        with suppress(FileNotFoundError):  # put to rest, or deleted
            size += path.stat().st_size
    return {
        "path": directory,
        "tokenizer": settings.vocabulary and settings.vocabulary.fingerprint,
        "vocab_size": settings.vocabulary and settings.vocabulary.size,
        "limit_tokens": settings.tokens,
        "limit_bytes": log.most_bytes(settings.tokens),
        "bytes": size,
        "documents": sum(1 for path in paths for _ in log.documents(path)),
        "processes": sum(map(log.is_open, paths)),
        "segments": len(paths),
        "segments_at_rest": sum(path.suffix == log.REST for path in paths),
        "damaged_bytes": sum(map(log.damage, paths)),
    }
