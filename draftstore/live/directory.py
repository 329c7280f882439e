"""Which documents of a memory answer which prompt: places in its ring buffer, by hashes of prompts."""

from collections import deque
from typing import NamedTuple, TypeAlias

ANSWERS = 16
"""Maximum answers to one prompt; of more, those of the newest versions are found."""
TOKENS = 16_384
"""Maximum tokens of the answers that are found; of a single longer one, the last are."""
Cursor: TypeAlias = tuple[int, int]
"""What a store had forgotten or reloaded, and the number of answers it had got; see `recall.Answers`."""
CHANGES = 4096
"""Latest changes that can be told apart."""


class Changes:
    """The prompts that got answers, in their order; not thread-safe. `number` counts these answers."""

    def __init__(self) -> None:
        self._latest = deque[int](maxlen=CHANGES)
        self.number = 0

    def add(self, prompt: int) -> None:
        """Add the prompt of a new answer."""
        self._latest.append(prompt)
        self.number += 1

    def since(self, number: int) -> tuple[int, set[int] | None]:
        """Return the present number, and the prompts of answers after the first `number`; None: too many to tell."""
        if not self.number - len(self._latest) <= number <= self.number:
            return self.number, None
        return self.number, {self._latest[place] for place in range(number - self.number, 0)}


class Place(NamedTuple):
    """A document from `start` to `stop`, counted from the first token that was ever appended; sorted by version."""

    version: int
    start: int
    stop: int


class Directory:
    """Answers by prompt; not thread-safe.

    Attributes:
        places: all documents with the hashes of their prompts, oldest first.
        changes: the prompts that got answers.
    """

    def __init__(self) -> None:
        self.changes = Changes()
        self._answers: dict[int, list[Place]] = {}
        self.places = deque[tuple[int, Place]]()

    def add(self, prompt: int, version: int, start: int, stop: int) -> None:
        """Add a document; its prompt may be unknown (0)."""
        place = Place(version, start, stop)
        self.places.append((prompt, place))
        if prompt:
            answers = self._answers.setdefault(prompt, [])
            answers.append(place)
            answers.sort()
            del answers[:-ANSWERS]
            self.changes.add(prompt)

    def evict(self, start: int) -> None:
        """Drop answers whose first tokens come before a place."""
        while self.places and self.places[0][1].start < start:
            prompt, place = self.places.popleft()
            answers = [each for each in self._answers.pop(prompt, ()) if each != place]
            if answers:
                self._answers[prompt] = answers

    def find(self, prompt: int, count: int) -> list[tuple[int, int]]:
        """Return the beginnings and ends of answers to a prompt, at most `count`, newest version last."""
        found, tokens = list[tuple[int, int]](), 0
        for _, start, stop in reversed(self._answers.get(prompt, ())):
            tokens += stop - start
            if len(found) == count or (found and tokens > TOKENS):
                break
            found.append((max(start, stop - TOKENS), stop))
        return found[::-1]
