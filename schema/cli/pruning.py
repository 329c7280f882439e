"""`draftstore builds prune`: old builds of flows, and what killed ones left."""

import re
from datetime import timedelta

import click

from draftstore.cli.common import json_option, print_json, printable
from draftstore.errors import counted
from schema import catalogue
from schema.cli.common import catalogue_session
from schema.home import data_home

UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


class Duration(click.ParamType[timedelta]):
    """A length of time, such as `90m`, `12h`, `7d` or `2w`."""

    name = "duration"

    def convert(
        self, value: str | timedelta, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        """Return the length."""
        if isinstance(value, timedelta):
            return value
        found = re.fullmatch(r"(\d{1,6})([smhdw])", value)
        if not found:
            self.fail(
                f"{value!r} is not a length of time: expected one such as 90m, 12h, 7d or 2w", param, ctx
            )
        return timedelta(**{UNITS[found[2]]: int(found[1])})


@click.command()
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    required=True,
    metavar="N",
    help="Number of finished builds of each kind and name that stay.",
)
@click.option(
    "--older-than",
    type=Duration(),
    default=timedelta(0),
    metavar="DURATION",
    help="Remove only what is older than this, such as 12h or 7d.",
)
@click.option("--dry-run", is_flag=True, help="Remove nothing, print what would be removed.")
@json_option
def prune(keep: int, older_than: timedelta, dry_run: bool, as_json: bool) -> None:
    """Remove old builds of flows from $DRAFTSTORE_HOME/stores: files, tables, and leftovers of killed builds.

    These stay: the newest N builds of each kind and name, what a release points at or would be rolled back to, what a
    process has open, and unfinished builds that may be resumed. Stores in other places are never touched.

    \b
    Examples:
      draftstore builds prune --keep 3 --dry-run
      draftstore builds prune --keep 3 --older-than 7d
    """
    found = catalogue.prune(catalogue_session, data_home(), keep, older_than=older_than, dry_run=dry_run)
    if as_json:
        removed = [removal._asdict() for removal in found.removed]
        print_json({"removed": removed, "in_use": found.in_use, "bytes": found.bytes, "dry_run": dry_run})
        return
    for removal in found.removed:
        build = f", build {removal.build_id}" if removal.build_id is not None else ""
        click.echo(f"{removal.what}{build}: {printable(removal.path)}, {removal.bytes:,} bytes")
    for path in found.in_use:
        click.echo(f"in use, stays: {printable(path)}", err=True)
    would = "would be removed" if dry_run else "removed"
    click.echo(f"{would}: {counted(len(found.removed), 'thing')}, {found.bytes:,} bytes")
