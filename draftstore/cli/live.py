"""`draftstore live`: the log of a live store, and its limit."""

from contextlib import suppress
from pathlib import Path

import click

from draftstore.cli.common import STORE
from draftstore.cli.output import json_option, print_fields, print_json
from draftstore.errors import DraftstoreError
from draftstore.live import log
from draftstore.live.store import LEAST_TOKENS


@click.command()
@click.argument("directory", type=STORE)
@click.option(
    "--tokens",
    type=click.IntRange(LEAST_TOKENS, 2**31 - 1),
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
    settings, size, count = log.settings_of(directory), 0, 0
    for path in log.segments(directory):
        with suppress(FileNotFoundError):  # put to rest, or deleted
            size += path.stat().st_size
            count += sum(1 for _ in log.documents(path))
    found = {
        "path": directory, "tokenizer": settings.vocabulary and settings.vocabulary.fingerprint,
        "limit_tokens": settings.tokens, "limit_bytes": log.most_bytes(settings.tokens), "bytes": size,
        "documents": count, "deleted_documents": deleted,
    }  # fmt: skip
    print_json(found) if as_json else print_fields(found)
