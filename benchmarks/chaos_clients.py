"""Clients over HTTP that never stop asking, compare every answer, and note from when to when they got none."""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.keeping import TROUBLE, ask
from draftstore.storage.manifest import manifest_digest
from draftstore.stores.registry import open_store

WRONG = "wrong"
TOKENS = 48
"""Of a completion."""
Drafted = list[tuple[int, int]]
"""Token and parent of each node."""


class Away(NamedTuple):
    """Some time in which a client got no answer; `what` it got instead."""

    begin: float
    end: float
    what: str


class Client(threading.Thread):
    """Asks one question after the other.

    Attributes:
        answers: right ones.
        wrong: those that were answered otherwise than they should.
        away: when nothing was answered, or a request was refused.
    """

    def __init__(self, name: str, questions: Sequence[Callable[[], str]], pause: float) -> None:
        """Prepare.

        Args:
            name: for figures.
            questions: each returns what is wrong with its answer, empty if nothing is; `WRONG` begins what it should
                not say, everything else is a refusal.
            pause: seconds between two of them.
        """
        super().__init__(name=name, daemon=True)
        self.answers = 0
        self.wrong: list[str] = []
        self.away: list[Away] = []
        self._questions, self._pause = questions, pause
        self._stopped = threading.Event()

    def run(self) -> None:
        """Ask."""
        since, what = 0.0, ""
        for question in itertools.cycle(self._questions):
            begin = time.monotonic()
            try:
                problem = question()
            except TROUBLE as error:
                problem = type(error).__name__
            if problem.startswith(WRONG):
                self.wrong.append(problem)
            elif problem:
                since, what = since or begin, what or problem
            else:
                self.answers += 1
                if since:
                    self.away.append(Away(since, time.monotonic(), what))
                since, what = 0.0, ""
            if self._stopped.wait(self._pause):
                break
        if since:
            self.away.append(Away(since, time.monotonic(), f"{what}, to the end"))

    def stop(self) -> None:
        """End."""
        self._stopped.set()
        self.join()


def complete(url: str, prompt: str) -> tuple[int, str]:
    """Ask a decoding worker for a greedy completion; return status and text."""
    asked = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0}
    status, found = ask(f"{url}/v1/completions", asked)
    return status, found["choices"][0]["text"] if status == 200 else ""


def completions(url: str, texts: Mapping[str, str]) -> list[Callable[[], str]]:
    """Return questions for completions that must be these texts, by their prompts."""

    def question(prompt: str) -> str:
        status, text = complete(url, prompt)
        return (f"{WRONG}: {text!r}" if text != texts[prompt] else "") if status == 200 else str(status)

    return [lambda prompt=prompt: question(prompt) for prompt in texts]  # type: ignore[misc]


def drafts(
    url: str, release: str, stores: Sequence[Path], contexts: NDArray[np.int32]
) -> list[Callable[[], str]]:
    """Return questions for drafts in JSON that must be those of the build that they name, one of `stores`.

    Args:
        url: of the service.
        release: asked for.
        stores: builds that may stand behind it.
        contexts: int32 [contexts, width].
    """
    expected = {manifest_digest(path)[:16]: _drafted(path, contexts) for path in stores}

    def question(place: int) -> str:
        asked = {"release": release, "contexts": [contexts[place].tolist()], "budget": 32}
        status, found = ask(f"{url}/v1/draft", asked)
        if status != 200:
            return str(status)
        nodes = [(node["token"], node["parent"]) for node in found["drafts"][0]["nodes"]]
        right = expected.get(found["build"])
        return "" if right and right[place] == nodes else f"{WRONG}: build {found['build']}, context {place}"

    return [lambda place=place: question(place) for place in range(len(contexts))]  # type: ignore[misc]


def _drafted(path: Path, contexts: NDArray[np.int32]) -> list[Drafted]:
    """Return what a store drafts for each context."""
    store: Any = open_store(path, "lmdb")
    trees = [draft.tree for draft in store.drafter().draft(contexts, 32)]
    store.close()
    return [list(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)) for tree in trees]
