"""The `draftstore` command line: commands that need only files, and those added by other packages.

A package adds a click command with an entry point in the group `draftstore.commands`. It is imported on use, so that a
broken dependency affects only its own command. Commands of the separate wheel `draftstore-server` are listed if it is
installed.
"""

import errno
import sys
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from io import StringIO
from typing import ClassVar

import click

import draftstore
from draftstore.cli.build import build, count, export, responses
from draftstore.cli.demo import demo
from draftstore.cli.gain import gain
from draftstore.cli.generate import generate
from draftstore.cli.inspect import info, live, verify
from draftstore.cli.models import check_model, tune
from draftstore.cli.options import Group
from draftstore.cli.output import fit_terminal, say
from draftstore.cli.query import query
from draftstore.cli.quickstart import quickstart
from draftstore.cli.replay import replay
from draftstore.errors import DraftstoreError

ADVICE = {
    errno.ENOSPC: "the disk is full: make room and run the command again; finished steps are kept",
    errno.EACCES: "no permission: choose another path, or change its permissions",
    errno.EROFS: "the file system is read-only: choose another path",
}

TITLES = {
    "First steps": ("quickstart", "gain", "demo", "generate"),
    "Stores": ("build", "query", "info", "replay", "responses", "export", "count", "verify"),
    "Models and services": ("worker", "serve", "tune", "check-model", "tokens", "live"),
    "Catalogue and renewal": ("catalogue", "releases", "recordings", "corpus", "sql", "db"),
}
"""The commands by title in help, the most essential first."""


class Commands(Group):
    """Built-in commands and those from entry points."""

    titles = TITLES

    added: ClassVar = {
        entry_point.name: entry_point
        for entry_point in entry_points(group="draftstore.commands")
        if find_spec(entry_point.module.partition(".")[0])
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted({*super().list_commands(ctx), *self.added})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; if it cannot be imported, it reports this when called and in its help."""
        if (entry_point := self.added.get(cmd_name)) is None:
            return super().get_command(ctx, cmd_name)
        try:
            command: click.Command = entry_point.load()
        except ImportError as error:
            return _absent(entry_point, error)
        return command


def _absent(entry_point: EntryPoint, error: ImportError) -> click.Command:
    package = entry_point.module.partition(".")[0]
    sentence = (
        f"the command {entry_point.name!r} needs a package that is not installed ({error}): "
        f"pip install 'draftstore[{package}]'"
    )

    def refuse(**_: object) -> None:
        raise DraftstoreError(sentence)

    options = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(entry_point.name, callback=refuse, help=sentence, context_settings=options)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(draftstore.__version__, package_name="draftstore", prog_name="draftstore")
def cli() -> None:
    """Build, inspect and benchmark draft stores.

    \b
    Examples:
      draftstore build rest --corpus texts.jsonl.zst --tokenizer ./tokenizer --out stores/chat
      draftstore build crest --rest stores/chat --out stores/chat-small --max-bytes 10MB
      draftstore query stores/chat --text "The quick brown"
      draftstore replay stores/chat --replays outputs.jsonl
    """


for command in (
    build, count, info, verify, query, replay, quickstart, demo, tune, check_model, generate, responses, export,
    live, gain,
):  # fmt: skip
    cli.add_command(command)


def main() -> None:
    """Run the command line; errors are one sentence on stderr and an exit status, never a traceback."""
    fit_terminal()
    try:
        if status := cli(standalone_mode=False):  # the status of an `Exit`, which click returns
            sys.exit(status)
    except click.ClickException as error:
        error.show(shown := StringIO())
        say(shown.getvalue().rstrip(), err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        say("interrupted: run the same command again to resume", err=True)
        sys.exit(130)
    except SystemError as error:
        if not isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            raise
        say("interrupted", err=True)  # while numba was loading a kernel
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads our output any more
        sys.exit(141)
    except DraftstoreError as error:
        say(f"error: {error.spelled(lambda name: '--' + name.replace('_', '-'))}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        advice = ADVICE.get(error.errno or 0)
        say(f"error: {error}" + (f": {advice}" if advice else ""), err=True)
        sys.exit(1)
