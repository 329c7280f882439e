"""Shared parts of the commands: options, progress bars on stderr, JSON on stdout, opening stores and tokenizers."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from draftstore.drafting.drafter import StoreDrafter
from draftstore.errors import DraftstoreError
from draftstore.storage.manifest import TOKENIZER_FOLDER, Manifest
from draftstore.stores.crest.entries import BACKENDS
from draftstore.stores.registry import KINDS, Store, kind_of, strategies_of
from draftstore.stores.registry import open_store as open_any_store
from draftstore.stores.rest.store import BUDGET
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.trees.frontier import MAX_BUDGET

STORE = click.Path(path_type=Path)
FILE_WIDTH = 160


def _known_strategies() -> str:
    """List the strategies of each kind of store."""
    titles: dict[tuple[str, ...], list[str]] = {}
    for kind in map(kind_of, KINDS):
        titles.setdefault(kind.strategies, []).append(kind.title)
    return "; ".join(
        f"{' and '.join(kinds)} {'know' if len(kinds) > 1 else 'knows'} {', '.join(strategies)}"
        for strategies, kinds in titles.items()
        if strategies
    )


strategy_option = click.option(
    "--strategy",
    type=click.Choice(sorted(strategies_of(KINDS))),
    help=f"How stores draft; a store that does not know the strategy uses its default. {_known_strategies()}. "
    "[default: each store's own]",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of a table."
)


def drafting_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of commands that draft: `budget`, `min_prob`, `strategy`, `backend` and `tokenizer`."""
    options = (
        click.option(
            "--budget",
            type=click.IntRange(0, MAX_BUDGET),
            default=BUDGET,
            show_default=True,
            help="Maximum number of nodes in a draft.",
        ),
        click.option(
            "--min-prob", type=click.FloatRange(0, 1), default=0.0, help="Minimum probability of a node."
        ),
        strategy_option,
        click.option(
            "--backend",
            type=click.Choice(BACKENDS),
            help="Backend that holds the entries of a CREST store. [default: the first that it was built for]",
        ),
        click.option(
            "--tokenizer",
            metavar="T",
            help="Check that the store was built with this tokenizer. [default: the store's]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


class ManyValues(click.Command):
    """A command whose repeatable options also take several values at once: `--corpus a b c`."""

    many = frozenset({"--corpus", "--glob", "--source", "--prompts", "--log"})

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
                name, attached, _ = argument.partition("=")
                option = name if name in self.many else None
                fresh = not attached
            elif option and not fresh:
                rewritten.append(option)
            else:
                fresh = False
            rewritten.append(argument)
        return super().parse_args(ctx, rewritten)


def print_json(value: Any) -> None:
    """Print a JSON document on one line; non-UTF-8 bytes of a path stay escaped."""
    click.echo(json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace"))


def printable(text: str | Path) -> str:
    """Return a path or name as text that any terminal can show."""
    return click.format_filename(str(text))


def stdout_console() -> Console:
    """Return the console for results: names are printed literally, and files get wide tables."""
    width = None if sys.stdout.isatty() else FILE_WIDTH
    return Console(markup=False, highlight=False, emoji=False, width=width)


def stderr_console() -> Console:
    """Return the console for everything except results."""
    return Console(stderr=True, markup=False, highlight=False, emoji=False)


def index_bytes(manifest: Manifest) -> int:
    """Return the size of a store in bytes, without its copy of the tokenizer."""
    prefix = f"{TOKENIZER_FOLDER}/"
    return sum(entry.size for name, entry in manifest.files.items() if not name.startswith(prefix))


def bytes_text(manifest: Manifest) -> str:
    """Return the size of a store, per entry, and of its copy of the tokenizer."""
    index = index_bytes(manifest)
    an_entry = index / max(manifest.counts["entries"], 1)
    return f"{index:,} ({an_entry:.2f} an entry), and {manifest.size - index:,} of tokenizer"


class CountColumn(ProgressColumn):
    """Steps done and in total: `1,234/5,678`."""

    def render(self, task: Task) -> Text:
        """Return both numbers; an unknown total is a question mark."""
        total = "?" if task.total is None else f"{int(task.total):,}"
        return Text(f"{int(task.completed):>{len(total)},}/{total}", style="progress.download")


@contextmanager
def count_progress(unit: str) -> Iterator[Progress]:
    """Show a bar over a known or unknown number of steps, on a terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        CountColumn(),
        TextColumn(f"{unit} {{task.fields[detail]}}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = stderr_console()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


@contextmanager
def status(message: str) -> Iterator[None]:
    """Show a spinner during a slow operation."""
    console = stderr_console()
    with console.status(message) if console.is_terminal else nullcontext():
        yield


def open_store(path: Path, tokenizer: str | None, backend: str | None) -> tuple[Store, TextTokenizer]:
    """Open a store with its own tokenizer, or with another copy of it named by the user.

    Raises:
        StoreError: the store cannot be opened.
        TokenizerError: the tokenizer cannot be loaded, or is not the store's.
    """
    store = open_any_store(path, backend)
    name = store.manifest.tokenizer.name
    loaded = load_tokenizer(tokenizer) if tokenizer else load_tokenizer(path / TOKENIZER_FOLDER, name=name)
    store.manifest.require_tokenizer(loaded.identity, path)
    return store, loaded


def check_strategy(strategy: str | None, kinds: Iterable[str]) -> None:
    """Refuse a strategy that no store of these kinds supports."""
    known = strategies_of(kinds)
    if strategy is not None and strategy not in known:
        raise DraftstoreError(
            f"no store here knows the strategy {strategy!r}: expected one of {', '.join(sorted(known)) or 'none'}"
        )


def strategy_of(store: Store, strategy: str | None) -> str:
    """Return the requested strategy if a store supports it, else the store's default."""
    return strategy if strategy in store.strategies else store.default_strategy


def warm(drafter: StoreDrafter) -> StoreDrafter:
    """Compile the kernels, which takes seconds once after an install."""
    with status("compiling kernels (once after an install)"):
        drafter.warm_up()
    return drafter
