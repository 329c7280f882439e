"""Shared parts of the commands: drafting options, progress bars on stderr."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import click
from pydantic import Field
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
from rich.table import Column
from rich.text import Text

from draftstore.assembly import Strategy
from draftstore.cli.output import console, printable
from draftstore.errors import DraftstoreError
from draftstore.options import Options, Shown
from draftstore.storage.manifest import TOKENIZER_FOLDER, Manifest
from draftstore.stores.crest.entries import Backend
from draftstore.stores.registry import Store, open_store, strategies_of
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.trees.frontier import BUDGET, MAX_BUDGET

STORE = click.Path(path_type=Path)
LINE_SECONDS = 5
"""Seconds between two lines of progress, where stderr is not a terminal."""


class Drafting(Options):
    """Options of commands that draft from stores without a model."""

    budget: int = Field(BUDGET, ge=0, le=MAX_BUDGET, description="Maximum number of nodes in a draft.")
    min_prob: float = Field(0.0, ge=0, le=1, description="Minimum probability of a node.")
    strategy: Strategy = None
    backend: Backend = None
    tokenizer: Annotated[str | None, Shown(unset="the store's")] = Field(
        None, description="Check that the store was built with this tokenizer."
    )

    def open(self, path: Path) -> tuple[Store, TextTokenizer]:
        """Open a store with its own tokenizer or the given copy of it; StoreError or TokenizerError if that fails."""
        store = open_store(path, self.backend)
        own = path / TOKENIZER_FOLDER, store.manifest.tokenizer.name
        loaded = load_tokenizer(self.tokenizer) if self.tokenizer else load_tokenizer(*own)
        store.manifest.require_tokenizer(loaded.identity, path)
        return store, loaded

    def check_strategy(self, kinds: Iterable[str]) -> None:
        """Refuse a strategy that no store of these kinds supports."""
        known = strategies_of(kinds)
        if self.strategy is not None and self.strategy not in known:
            expected = f"expected one of {', '.join(sorted(known)) or 'none'}"
            raise DraftstoreError(f"no store here supports the strategy {self.strategy!r}: {expected}")

    def strategy_of(self, store: Store) -> str:
        """Return the requested strategy if the store supports it, else the store's default."""
        return self.strategy if self.strategy in store.strategies else store.default_strategy


def bytes_text(manifest: Manifest) -> str:
    """Describe the size of a store, in total and per entry, and of its copy of the tokenizer."""
    index = manifest.index_size
    an_entry = index / max(manifest.counts["entries"], 1)
    return f"{index:,} ({an_entry:.2f} per entry), and {manifest.size - index:,} for the tokenizer"


class _Amount(ProgressColumn):
    """The amount done of a task, with its unit and details, such as `3 of 10 files`."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        super().__init__(Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        """Return the amount."""
        total = "" if task.total is None else f" of {task.total:,.0f}"
        text = f"{task.completed:,.0f}{total} {self._unit} {task.fields['detail']}"
        return Text(" ".join(text.split()).replace(" ,", ","))


@contextmanager
def count_progress(unit: str) -> Iterator[Progress]:
    """Show a progress bar with a known or unknown total; off a terminal, lines."""
    amount = _Amount(unit)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=10),
        amount,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    shown = console(err=True)
    progress = Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal)

    def text() -> str:
        tasks = [task for task in progress.tasks if not task.finished] or progress.tasks[-1:]
        return "; ".join(f"{task.description}: {amount.render(task)}" for task in tasks)

    with progress, nullcontext() if shown.is_terminal else _lines(text):
        yield progress


@contextmanager
def _lines(text: Callable[[], str]) -> Iterator[None]:
    """Write a new line to stderr at most every few seconds, so that a log shows what takes long."""
    done, stream = threading.Event(), sys.stderr  # which loading a model redirects

    def write() -> None:
        last = ""
        while not done.wait(LINE_SECONDS):
            if (line := text()) != last:
                click.echo(printable(line), file=stream)
                last = line

    threading.Thread(target=write, daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextmanager
def status(message: str) -> Iterator[None]:
    """Show a spinner during a slow operation."""
    shown = console(err=True)
    with shown.status(Text(printable(message))) if shown.is_terminal else _lines(lambda: message):
        yield


class _Warmable(Protocol):
    def warm_up(self) -> None: ...


D = TypeVar("D", bound=_Warmable)


def warm(drafter: D) -> D:
    """Compile the kernels of a drafter, which takes seconds, once per installation."""
    with status("compiling kernels (once per installation)"):
        drafter.warm_up()
    return drafter
