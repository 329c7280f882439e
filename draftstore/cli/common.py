"""Shared parts of the commands: drafting options, progress bars on stderr."""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import click
from pydantic import Field
from rich.progress import (
    BarColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from draftstore.assembly.sources import Strategy
from draftstore.cli.output import console, printable
from draftstore.errors import DraftstoreError
from draftstore.options import Options, Shown
from draftstore.storage.manifest import TOKENIZER_FOLDER, Manifest
from draftstore.storage.report import Progress
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


def read_stdin() -> str:
    """Return the text on stdin, without its last line break; DraftstoreError if it is not UTF-8."""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise DraftstoreError(f"the text on stdin is not UTF-8: {error}") from None


def bytes_text(manifest: Manifest) -> str:
    """Describe the size of a store in total, as lists have it, and what of it is the copy of the tokenizer."""
    index = manifest.index_size
    an_entry = index / max(manifest.counts["entries"], 1)
    return f"{manifest.size:,}: {index:,} ({an_entry:.2f} per entry), and {manifest.size - index:,} for the tokenizer"


class _Amount(ProgressColumn):
    """The amount done of a task and its details, such as `3 of 10 files`."""

    def render(self, task: Task) -> Text:
        """Return the amount."""
        total = "" if task.total is None else f" of {task.total:,.0f}"
        return Text(f"{task.completed:,.0f}{total} {task.fields['detail']}".rstrip())


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Show a bar for each step of some work, on stderr; off a terminal, lines."""
    amount = _Amount(Column(no_wrap=True))
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=10),
        amount,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    shown = console(err=True)
    bars = Bars(*columns, console=shown, transient=True, disable=not shown.is_terminal)

    def text() -> str:
        tasks = [task for task in bars.tasks if not task.finished] or bars.tasks[-1:]
        return "; ".join(f"{task.description}: {amount.render(task)}" for task in tasks)

    with bars, nullcontext() if shown.is_terminal else _lines(text):
        yield partial(_Bar, bars)


class _Bar:
    """The bar of one step, shown from its first report on, with its speed."""

    def __init__(self, bars: Bars, title: str, unit: str) -> None:
        self._bars, self._title, self._unit = bars, title, unit
        self._task: TaskID | None = None
        self._begin, self._first = 0.0, 0

    def __call__(self, done: int, total: int | None, detail: str = "") -> None:
        """Report the amount done."""
        now = time.perf_counter()
        if self._task is None:
            self._begin, self._first = now, done
            self._task = self._bars.add_task(self._title, total=total, detail="")
        rate = (done - self._first) / max(now - self._begin, 1e-9)
        parts = [self._unit, detail, _per_second(rate) if done > self._first else ""]
        shown = ", ".join(filter(None, parts))
        self._bars.update(self._task, completed=done, total=total, detail=shown)


def _per_second(rate: float) -> str:
    """Return a rate with a suitable number of digits: models are a hundred times slower than tokenizers."""
    return f"{rate / 1e6:.2f} M/s" if rate >= 1e5 else f"{rate:,.{0 if rate >= 10 else 1}f}/s"


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
