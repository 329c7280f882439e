"""`draftstore doctor`: checks of the installation."""

import sys

import click

from draftstore.cli.common import status
from draftstore.cli.options import Command
from draftstore.cli.output import json_option, print_json, say
from draftstore.errors import counted
from schema.catalogue.publishing import verify_build, verify_present
from schema.cli.common import catalogue_session
from schema.db.home import data_home
from schema.doctor import examine


@click.command(cls=Command)
@click.option("--full", is_flag=True, help="Read every byte of the live stores, not only their sizes.")
@json_option
def doctor(full: bool, as_json: bool) -> None:
    """Check releases, builds and collections, and suggest fixes.

    Exits with status 1 if something is broken. Wasted space and resumable work are reported as notes.

    \b
    Examples:
      draftstore doctor
      draftstore doctor --full --json
    """
    with status("looking"):
        found = examine(catalogue_session, data_home(), verify_build if full else verify_present)
    problems = sum(finding.problem for finding in found)
    if as_json:
        print_json({"findings": [finding._asdict() for finding in found], "problems": problems})
    else:
        for finding in sorted(found, key=lambda finding: not finding.problem):
            kind = "problem" if finding.problem else "note"
            say(f"{kind}: {finding.what}\n  {finding.advice}")
        say(f"{counted(problems, 'problem')}, {counted(len(found) - problems, 'note')}")
    if problems:
        sys.exit(1)
