"""Work that is killed: in separate processes, forked from one that has loaded what they need.

kill_when(rest_store, (corpus, tokenizer, out), marker.exists)
run(rest_store, (corpus, tokenizer, out))
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

Work = Callable[..., None]
"""Takes what it calls when it is about to begin in earnest, then its arguments."""
SECONDS = 120.0
"""How long any work may take."""

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__, "tests.fakes.loaded", "tests.fakes.state_sources"])


def kill_when(work: Work, arguments: Sequence[Any], moment: Callable[[], bool]) -> bool:
    """Begin a work and kill it at a moment; return whether it lived to see it."""
    with closing(_started(work, arguments)) as process:
        end = time.monotonic() + SECONDS
        while process.is_alive() and not moment():
            assert time.monotonic() < end
            time.sleep(0.001)
        process.kill()
        process.join()
        return process.exitcode == -signal.SIGKILL


def run(work: Work, arguments: Sequence[Any]) -> None:
    """Do a work to its end."""
    with closing(_started(work, arguments)) as process:
        process.join(SECONDS)
        assert process.exitcode == 0


def _started(work: Work, arguments: Sequence[Any]) -> ForkServerProcess:
    """Return a process once it is about to begin in earnest."""
    ready = _processes.Event()
    process = _processes.Process(target=_work, args=(work, ready, arguments))
    process.start()
    while not ready.wait(0.01):
        assert process.is_alive() or ready.is_set(), "it ended before it began"
    return process


def _work(work: Work, ready: Event, arguments: Sequence[Any]) -> None:
    """Do a work as a process that a terminal's signals do not reach."""
    os.setsid()
    work(ready.set, *arguments)


def rest_store(ready: Callable[[], None], corpus: Path, tokenizer: Path, out: Path, workers: int = 2) -> None:
    from draftstore.stores.rest.build import RestOptions, build_rest
    from draftstore.text.tokenizer import load_tokenizer

    ready()
    options = RestOptions(corpus=(corpus,), name="test", segment_tokens=8_000)
    build_rest(options, load_tokenizer(tokenizer, name="t"), out, workers=workers)


def crest_store(ready: Callable[[], None], rest: Path, ngrams: int, out: Path) -> None:
    from draftstore.stores.crest.build import CrestOptions, build_crest

    ready()
    build_crest(CrestOptions(name="test", max_n=3, ngrams=ngrams), rest, out)


def joined_store(ready: Callable[[], None], stores: Sequence[Path], out: Path) -> None:
    from draftstore.stores.rest.joining import join_rest

    ready()
    join_rest(stores, out)


def hashed_store(ready: Callable[[], None], corpus: Path, tokenizer: Path, out: Path) -> None:
    """Build a dense store of states that no model had to compute."""
    from draftstore.stores.dresd.build import DresdOptions, build_dresd
    from draftstore.stores.dresd.kernels import passages
    from draftstore.text.tokenizer import load_tokenizer
    from tests.fakes.state_sources import HashedStates

    passages.BLOCK_TOKENS = 3_000
    ready()
    options = DresdOptions(corpus=(corpus,), name="test", dims=8, sample=15_000)
    build_dresd(options, load_tokenizer(tokenizer, name="t"), HashedStates(), out)
