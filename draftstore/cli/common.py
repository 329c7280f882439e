"""What the commands share: options, progress bars on stderr, JSON on stdout, opening stores and tokenizers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from draftstore.rest import TOKENIZER_FOLDER, RestDrafter, RestStore
from draftstore.tokenizer import TextTokenizer, load_tokenizer

STORE = click.Path(path_type=Path)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")


class ManyValues(click.Command):
    """A command whose repeatable options also take several values at once: `--corpus a b c`."""

    many = frozenset({"--corpus", "--glob"})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Rewrite `--corpus a b` to `--corpus a --corpus b` before parsing."""
        rewritten: list[str] = []
        option: str | None = None
        fresh = False
        for position, argument in enumerate(args):
            if argument == "--":
                rewritten += args[position:]
                break
            if argument.startswith("-"):
                option = argument if argument in self.many else None
                fresh = True
            elif option and not fresh:
                rewritten.append(option)
            else:
                fresh = False
            rewritten.append(argument)
        return super().parse_args(ctx, rewritten)


def print_json(value: Any) -> None:
    """Print one JSON document on one line."""
    click.echo(json.dumps(value, ensure_ascii=False))


def stderr_console() -> Console:
    """Return the console of everything that is not the result."""
    return Console(stderr=True)


@contextmanager
def count_progress(unit: str) -> Iterator[Progress]:
    """Show a bar over a known or unknown number of steps."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{unit} {{task.fields[detail]}}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr_console(), transient=True) as progress:
        yield progress


@contextmanager
def status(message: str) -> Iterator[None]:
    """Show a spinner while something takes its time."""
    with stderr_console().status(message):
        yield


def open_store(path: Path, tokenizer: str | None) -> tuple[RestStore, TextTokenizer]:
    """Open a store with its own tokenizer, or with another copy of it that the user names.

    Raises:
        StoreError: the store cannot be opened.
        TokenizerError: the tokenizer cannot be loaded, or is not the store's.
    """
    store = RestStore.open(path)
    name = store.manifest.tokenizer.name
    loaded = load_tokenizer(tokenizer) if tokenizer else load_tokenizer(path / TOKENIZER_FOLDER, name=name)
    store.manifest.require_tokenizer(loaded.identity, path)
    return store, loaded


def warm(drafter: RestDrafter) -> RestDrafter:
    """Have the kernels compiled, which takes seconds once after an install."""
    with status("compiling kernels (once after an install)"):
        drafter.warm_up()
    return drafter
