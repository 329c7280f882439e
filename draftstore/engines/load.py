"""How many drafted nodes pay at the load of an engine, whose cost of a pass is learned while it runs.

A pass over the texts of a batch and k of their drafted nodes yields texts + S_k tokens, where S_k is the sum of these
nodes' acceptance probabilities: those of the drafters, corrected in each text as `draftstore.decoding.budget` does. The
nodes of all texts compete, and the k most probable ones are verified that maximise

    (texts + S_k) / (pass(texts, k) + drafting)        against texts / pass(texts, 0) without drafts

A pass lasts from the end of one step's drafts to the next step, unless the engine did something else meanwhile: read a
prompt, had no text, or did not ask. Of the last such passes of about as many texts and rows, the lower quartile counts.
A cost that is unknown, or was measured long ago, is taken to be low, and so gets measured.

While drafts save no time on average, none are made, but for tests that take a hundredth of the time; while they do, a
pass without drafts is measured now and then.
"""

from collections import deque
from collections.abc import Callable
from math import log2
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

KEPT, AGE = 16, 1024
"""Measurements of a cost that count, and passes after which none does."""
PLAIN_EVERY, NEAR = 32, 4
"""Passes after which one without drafts is measured again, at least; bands of texts for which it counts: twofold."""
FEW = 2
"""Minimum measurements of a cost. Until passes without drafts have as many, every other pass is one."""
TESTS, LONGEST = 100, 64
"""Share of the time, 1 in so many, in which drafts are tested that did not pay; maximum passes between two tests."""
WEIGHT = 1 / 16
"""Weight of the last drafts in the mean time that drafts save."""


def octave(value: float) -> int:
    """Return the band of a number of at least 1: four for each octave."""
    return int(4 * log2(value) + 1e-9)


class Cost:
    """The last measurements of one cost.

    Attributes:
        at: mean of where they were taken, such as the number of texts.
        value: their lower quartile.
        last: pass of the last one.
    """

    def __init__(self) -> None:
        self.at, self.value, self.last = 0.0, 0.0, 0
        self._points: deque[tuple[float, float]] = deque(maxlen=KEPT)

    def __len__(self) -> int:
        return len(self._points)

    def add(self, at: float, value: float, step: int) -> None:
        """Add a measurement."""
        self._points.append((at, value))
        self.at, self.last = sum(at for at, _ in self._points) / len(self._points), step
        self.value = sorted(value for _, value in self._points)[len(self._points) // 4]


class PassCosts:
    """What passes cost by texts and drafted nodes.

    Attributes:
        plain: seconds of passes without drafts, by the octave of texts.
        ratios: seconds by those without drafts, by the octaves of texts, and of rows for each text.
        drafting: seconds to draft, by the octave of texts.
        step: number of passes so far.
    """

    def __init__(self) -> None:
        self.plain: dict[int, Cost] = {}
        self.ratios: dict[tuple[int, int], Cost] = {}
        self.drafting: dict[int, Cost] = {}
        self.step = 0

    def add(self, texts: int, nodes: int, seconds: float) -> None:
        """Add a pass."""
        band = octave(texts)
        if nodes == 0:
            self.plain.setdefault(band, Cost()).add(texts, seconds, self.step)
        elif (plain := self.seconds(texts)) > 0:
            rows = 1 + nodes / texts
            self.ratios.setdefault((band, octave(rows)), Cost()).add(rows, seconds / plain, self.step)

    def seconds(self, texts: int) -> float:
        """Return the seconds of a pass without drafts; 0 if no such pass has been measured."""
        known = sorted((cost.at, cost.value) for cost in self.plain.values())
        if not known:
            return 0.0
        return float(np.interp(texts, [at for at, _ in known], [value for _, value in known]))

    def is_known(self, texts: int, age: float = PLAIN_EVERY) -> bool:
        """Return whether passes of about as many texts without drafts were measured in the last `age` passes."""
        near = [cost for band, cost in self.plain.items() if abs(band - octave(texts)) <= NEAR]
        return sum(map(len, near)) >= FEW and self.step - max(cost.last for cost in near) < age

    def table(self) -> list[tuple[float, float, float]]:
        """Return the texts, rows and seconds of all costs that are known."""
        plain = [(cost.at, cost.at, cost.value) for _, cost in sorted(self.plain.items())]
        return plain + [
            (self.plain[band].at, self.plain[band].at * cost.at, self.plain[band].value * cost.value)
            for (band, _), cost in sorted(self.ratios.items())
            if band in self.plain and self.step - cost.last < AGE
        ]

    def relative(self, texts: int, most: int) -> NDArray[np.float64]:
        """Return float64 [most + 1], the cost of a pass over 0, 1, ... nodes by that of one without.

        Beyond twice the rows of known costs, it is infinite: larger passes are tried step by step.
        """
        band = octave(texts)
        known = sorted(
            (cost.at, cost.value)
            for (each, _), cost in self.ratios.items()
            if each == band and len(cost) >= FEW and self.step - cost.last < AGE
        )
        at, values = np.array([(1.0, 1.0), *known]).T
        rows = 1 + np.arange(most + 1) / texts
        return np.where(rows <= 2 * at[-1], np.interp(rows, at, values), np.inf)


class Load:
    """Chooses how many nodes to verify; not thread-safe.

    Attributes:
        costs: what passes cost.
        clock: returns the time in seconds.
        passes: number of steps with texts, and of those in which nothing was drafted.
        estimate: seconds that measured passes should have taken for their tokens without drafts, and with them.
    """

    def __init__(self, *, fixed_rows: bool = False, clock: Callable[[], float] = perf_counter) -> None:
        """Begin without knowledge; with `fixed_rows`, the engine verifies the same number of rows in any case."""
        self.costs, self.clock = PassCosts(), clock
        self.passes, self.estimate = [0, 0], [0.0, 0.0]
        self._fixed = fixed_rows
        self._last: tuple[frozenset[int], int, float, float] | None = (
            None  # texts, nodes, drafting, its begin
        )
        self._saved = 0.0  # mean time that drafts save, in passes without drafts
        self._wait = self._band = 0

    def measure(self, texts: frozenset[int], tokens: int, now: float, *, undisturbed: bool) -> None:
        """Learn from the pass between the last step and this one, if there was one.

        Args:
            texts: the texts of this step.
            tokens: number of their new ids.
            now: time of the clock when this step began.
            undisturbed: whether the engine has done nothing else.
        """
        last, self._last = self._last, None
        if last is None or not undisturbed or not texts or not texts <= last[0]:
            return
        before, nodes, drafting, begin = last
        nodes = 0 if self._fixed else nodes
        self.costs.add(len(before), nodes, now - begin)
        if texts == before and (plain := self.costs.seconds(len(texts))) > 0:
            self.estimate[0] += tokens / len(texts) * plain
            self.estimate[1] += float(self.costs.relative(len(texts), nodes)[-1]) * plain + drafting

    def wants_drafts(self, texts: int) -> bool:
        """Return whether to draft for so many texts in this step."""
        self.costs.step += 1
        if not texts:
            return False
        if octave(texts) < self._band:  # the load has fallen
            self._wait, self._saved = 0, 0.0
        self._band = octave(texts)
        self._wait -= 1
        age = max(PLAIN_EVERY, TESTS * self._saved)  # a pass without drafts loses what they save
        return self._wait < 0 and (self._fixed or self.costs.is_known(texts, age) or self.costs.step % 2 == 0)

    def choose(self, chances: NDArray[np.float64], drafting: float) -> NDArray[np.int32]:
        """Return the number of nodes of each draft to verify, int32 [batch].

        Args:
            chances: float64 [batch, nodes], see `Texts.chances`.
            drafting: seconds that these drafts took.
        """
        texts = len(chances)
        cost = self.costs.drafting.setdefault(octave(texts), Cost())
        cost.add(texts, drafting, self.costs.step)
        if (plain := self.costs.seconds(texts)) <= 0:
            return _count_from(chances, 0.0)
        ranked = -np.sort(-chances[chances > 0])
        yields = 1 + np.concatenate([[0.0], np.cumsum(ranked)]) / texts
        passes = self.costs.relative(texts, 0 if self._fixed else len(ranked))
        rates = yields / (passes + cost.value / plain)
        rates[1:-1][ranked[1:] == ranked[:-1]] = 0.0  # equal nodes are verified together
        best = int(np.argmax(rates))
        saved = yields[best] - passes[min(best, len(passes) - 1)] - cost.value / plain
        self._saved += (float(saved) - self._saved) * WEIGHT
        if self._saved < 0:
            self._wait = min(LONGEST, int(TESTS * cost.value / plain))
        return _count_from(chances, ranked[best - 1] if best else np.inf)

    def begin(self, texts: frozenset[int], nodes: int, drafting: float | None) -> None:
        """Note that a pass begins over some texts and nodes, whose drafts took some seconds; None: none were made."""
        if texts:
            self.passes[0] += 1
            self.passes[1] += drafting is None
        self._last = (texts, nodes, drafting or 0.0, self.clock())


def _count_from(chances: NDArray[np.float64], least: float) -> NDArray[np.int32]:
    counts: NDArray[np.int32] = ((chances > 0) & (chances >= least)).sum(axis=1, dtype=np.int32)
    return counts
