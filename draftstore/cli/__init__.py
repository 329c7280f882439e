"""The command `draftstore`: commands that need files alone, and those that other packages add.

A package adds a command by an entry point in the group `draftstore.commands`, whose value is a click command.
"""

import errno
import sys
from importlib.metadata import entry_points

import click

import draftstore
from draftstore.cli.build import build
from draftstore.cli.inspect import info, verify
from draftstore.cli.query import query
from draftstore.cli.quickstart import quickstart
from draftstore.cli.replay import replay
from draftstore.errors import DraftstoreError

ADVICE = {
    errno.ENOSPC: "the disk is full: make room and run the command again, finished steps are kept",
    errno.EACCES: "no permission: choose another path, or change its permissions",
    errno.EROFS: "the file system is read-only: choose another path",
}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(draftstore.__version__, package_name="draftstore")
def cli() -> None:
    """Build draft stores from text, look into them, and measure what they save.

    \b
    Examples:
      draftstore build rest --corpus texts.jsonl.zst --tokenizer ./tokenizer --out stores/chat
      draftstore query stores/chat --text "The quick brown"
      draftstore replay stores/chat --replays outputs.jsonl
    """


for command in (build, info, verify, query, replay, quickstart):
    cli.add_command(command)
for entry_point in entry_points(group="draftstore.commands"):
    cli.add_command(entry_point.load(), entry_point.name)


def main() -> None:
    """Run the command line: an error is one sentence on stderr and exit status 1, never a traceback."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted: the same command goes on where it stopped", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; nothing is left to say
        sys.exit(141)
    except DraftstoreError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except OSError as error:
        advice = ADVICE.get(error.errno or 0)
        click.echo(f"error: {error}" + (f": {advice}" if advice else ""), err=True)
        sys.exit(1)
