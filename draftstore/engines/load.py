"""How many drafted nodes pay at the load of an engine, whose cost of a pass is learned while it runs.

A pass over the texts of a batch and k of their drafted nodes yields texts + S_k tokens, where S_k is the sum of these
nodes' acceptance probabilities: those of the drafters, corrected in each text as `draftstore.decoding.budget` does, and
by what nodes that were chosen have yielded, since those of the highest chances are overestimated most often. The nodes
of all texts compete, and the k most probable ones are verified that maximise

    (texts + S_k) / (pass(texts, k) + drafting)        against texts / pass(texts, 0) without drafts

A pass lasts from the end of one step's drafts to the next step, unless the engine did something else meanwhile: read a
prompt, had no text, or did not ask. Of the last such passes of about as many texts and rows, the lower quartile counts,
as a multiple of a pass without drafts; costs lie on a line through these. Until that is known, nothing is verified.
Passes of up to twice the known rows are tried as if further rows cost half as much as the known ones, but not again and
again if they are never measured.

Nothing is learned for good. While drafts save time, a pass without them is measured now and then, and soon if passes
take longer than expected. While they save none, they are made for a hundredth of the time, and sizes that seemed too
slow are tried again.
"""

from collections import deque
from collections.abc import Callable
from math import log2
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import as_input, kernel

KEPT, KEPT_PLAIN, FEW = 16, 2, 2
"""Measurements of a cost that count; of a pass without drafts; and minimum number for a cost to be known."""
AGE = 1024
"""Passes after which a cost of `KEPT` measurements is forgotten; one of fewer, sooner."""
FASTER, SLOWER = 0.6, 1.3
"""A pass that takes less than this share of its cost makes it forgotten: passes can be slowed down by something else,
but not sped up. If passes take more than this multiple on average, those without drafts are measured."""
NEAR, BORROWED = 1, 2
"""Bands of texts around one for which a pass without drafts counts: 1.4 times as many, or as few; and for which the
cost of rows counts until it is known itself: twice as many, or half."""
TRIALS = 8
"""Passes of an unknown size that are tried without being measured."""
PLAIN_EVERY, PLAIN_AT_MOST, PLAIN_AT_LEAST = 64, 256, 8
"""Passes between two measurements of passes without drafts: usually, if drafts save much, and if passes are slow."""
PLAIN_RUN = 2
"""Passes without drafts in a measurement, of which the first does not count: it is slower after one of another size."""
REMEMBERED, SURE, FORGIVEN = 1 - 1 / 64, 16.0, 1 / 256
"""Weight of earlier passes in the tokens that nodes should have added and did; tokens to begin with; and how fast these
return while no node is verified."""
SHARE, LONGEST = 100, 1024
"""Share of the time, 1 in so many, for tests of what does not pay, and maximum passes between two of them."""
WEIGHT, LEAST_SAVED = 1 / 16, -0.1
"""Weight of the last drafts in the mean time that drafts save, and its minimum, in passes without drafts."""


def band_of(value: float) -> int:
    """Return the band of a number of at least 1: two for each octave."""
    return int(2 * log2(value) + 1e-9)  # rounding must not put a power of 2 below its band


class Cost:
    """The last measurements of one cost.

    Attributes:
        at: where they were taken, the number of texts, or of rows for each text: lower quartile.
        value: lower quartile.
        last: pass of the last one.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self.at, self.value, self.last = 0.0, 0.0, 0
        self._points: deque[tuple[float, float]] = deque(maxlen=kept)

    def __len__(self) -> int:
        return len(self._points)

    def add(self, at: float, value: float, step: int) -> None:
        """Add a measurement."""
        faster = value < FASTER * self.value
        if faster or not self.is_known(step, few=1):
            self._points.clear()
        self._points.extend([(at, value)] * (FEW if faster else 1))
        self.last = step
        self.at, self.value = (sorted(each)[(len(each) - 1) // 4] for each in zip(*self._points, strict=True))

    def is_known(self, step: int, few: int = FEW) -> bool:
        """Return whether there are `few` measurements that are recent enough."""
        lasts = AGE * len(self._points) / (self._points.maxlen or 1)
        return len(self._points) >= few and step - self.last < lasts


class Curve(NamedTuple):
    """The cost of passes over a number of texts.

    Attributes:
        rows: float64 [any], rows for each text, from 1.
        costs: float64 [any], of a pass, by that of one without drafts.
        known: maximum rows that are known.
        limit: maximum rows.
        made: pass when the curve was made.
    """

    rows: NDArray[np.float64]
    costs: NDArray[np.float64]
    known: float
    limit: float
    made: int


FREE = Curve(as_input(np.ones(1), np.float64), as_input(np.ones(1), np.float64), np.inf, np.inf, 0)


class PassCosts:
    """What passes cost by texts and drafted nodes.

    Attributes:
        plain: seconds of passes without drafts, by the band of texts.
        ratios: seconds by those without drafts, by the bands of texts, and of rows for each text.
        step: number of passes so far.
    """

    def __init__(self) -> None:
        self.plain: dict[int, Cost] = {}
        self.ratios: dict[tuple[int, int], Cost] = {}
        self.step = 0
        self._trials: dict[tuple[int, int], tuple[int, int]] = {}  # number, and pass of the first
        self._curves: dict[int, Curve] = {}
        self._seconds: dict[int, float] = {}

    def add(self, texts: int, nodes: int, seconds: float) -> None:
        """Add a pass."""
        band = band_of(texts)
        if nodes == 0:
            self.plain.setdefault(band, Cost(KEPT_PLAIN)).add(texts, seconds, self.step)
            self._seconds.clear()
        elif (plain := self.seconds(texts)) > 0:
            rows = 1 + nodes / texts
            cost = self.ratios.setdefault((band, band_of(rows)), Cost())
            before = cost.value, len(cost) >= FEW
            cost.add(rows, seconds / plain, self.step)
            self._trials.pop((band, band_of(rows)), None)
            if before != (cost.value, len(cost) >= FEW):
                self._curves.clear()

    def seconds(self, texts: int) -> float:
        """Return the seconds of a pass without drafts; 0 if none of about as many texts is known."""
        if texts not in self._seconds:
            band = band_of(texts)
            near = sorted(
                (cost.at, cost.value)
                for each, cost in self.plain.items()
                if abs(each - band) <= NEAR and cost.is_known(self.step)
            )
            at, seconds = np.array(near).reshape(-1, 2).T
            self._seconds[texts] = float(np.interp(texts, at, seconds)) if near else 0.0
        return self._seconds[texts]

    def curve(self, texts: int) -> Curve:
        """Return the costs of passes over so many texts."""
        band = band_of(texts)
        curve = self._curves.get(band)
        if curve is None or self.step - curve.made >= PLAIN_EVERY:
            near = sorted(
                (abs(each - band), rows, cost.at, cost.value)
                for (each, rows), cost in self.ratios.items()
                if abs(each - band) <= BORROWED and cost.is_known(self.step)
            )
            known = sorted({rows: (at, value) for _, rows, at, value in reversed(near)}.values())
            rows, costs = _line(known)
            closed = [
                0.999 * 2 ** (each / 2)
                for (own, each), (number, first) in self._trials.items()
                if own == band and number >= TRIALS and self.step - first < AGE
            ]
            curve = self._curves[band] = Curve(rows, costs, rows[-2], min([rows[-1], *closed]), self.step)
            self._seconds.clear()  # they age, too
        return curve

    def note_trial(self, texts: int, nodes: int) -> None:
        """Count a pass that begins over more rows than are known."""
        band, rows = band_of(texts), 1 + nodes / texts
        if rows > self.curve(texts).known:
            key = band, band_of(rows)
            number, first = self._trials.get(key, (0, self.step))
            self._trials[key] = (number + 1, first) if self.step - first < AGE else (1, self.step)
            if self._trials[key][0] >= TRIALS:
                self._curves.pop(band, None)

    def table(self) -> list[tuple[int, int, float]]:
        """Return texts, rows and seconds of all that is known; numbers are the lowest of their bands."""
        plain = {
            band: cost.value for band, cost in sorted(self.plain.items()) if cost.is_known(self.step, few=1)
        }
        return [(round(2 ** (band / 2)),) * 2 + (value,) for band, value in plain.items()] + [
            (round(2 ** (band / 2)), round(2 ** ((band + rows) / 2)), plain[band] * cost.value)
            for (band, rows), cost in sorted(self.ratios.items())
            if band in plain and cost.is_known(self.step)
        ]


def _line(known: list[tuple[float, float]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return rows, float64 [any], and costs: 1 without drafts, then a line through the known ones, and beyond.

    A line, since choices would stick to the bends that errors of single costs make.
    """
    rows, costs = np.array(known or [(1.0, 1.0)]).T
    if len(known) > 1:
        slope, start = np.polyfit(rows, costs, 1)
        costs = start + slope * rows
    most, cost = rows[-1], costs[-1]
    beyond = cost + (cost - 1) / (most - 1) * most / 2 if most > 1 else cost
    rows, costs = np.array([1.0, *rows, 2 * most]), np.array([1.0, *costs, beyond])
    return as_input(rows, np.float64), as_input(np.maximum(1.0, costs), np.float64)


class Pass(NamedTuple):
    """A pass that has begun: texts, nodes, tokens that these should add, seconds to draft them, and time of begin."""

    texts: frozenset[int]
    nodes: int
    hoped: float
    drafting: float
    begin: float


class Load:
    """Chooses how many nodes to verify; not thread-safe.

    Attributes:
        costs: what passes cost.
        clock: returns the time in seconds.
        passes: number of steps with texts, and of those without a node to verify.
        estimate: seconds that measured passes should have taken for their tokens without drafts, and with them.
    """

    def __init__(self, *, fixed_rows: bool = False, clock: Callable[[], float] = perf_counter) -> None:
        """Begin without knowledge; with `fixed_rows`, the engine verifies the same number of rows in any case."""
        self.costs, self.clock = PassCosts(), clock
        self.passes, self.estimate = [0, 0], [0.0, 0.0]
        self._fixed = fixed_rows
        self._last: Pass | None = None
        self._drafting: dict[int, float] = {}  # mean seconds, by the band of texts
        self._saved = 0.0  # mean time that drafts save, in passes without drafts
        self._hoped = self._accepted = SURE  # tokens that verified nodes should have added lately, and did
        self._chosen = 0.0  # the same for the last choice
        self._wait, self._band = 0, 0  # passes until drafts are tested again, and the load when they stopped
        self._since_plain, self._plain_run, self._retry, self._pace = 0, 0, SHARE, 1.0
        _select(np.zeros((1, 1)), FREE.rows, FREE.costs, 1.0, 0.0)  # compiles it

    def measure(self, texts: frozenset[int], tokens: int, now: float, *, undisturbed: bool) -> None:
        """Learn from the pass between the last step and this one, if there was one.

        Args:
            texts: the texts of this step.
            tokens: number of their new ids.
            now: time of the clock when this step began.
            undisturbed: whether the engine has done nothing else.
        """
        last, self._last = self._last, None
        if last is None or not undisturbed or not texts or not texts <= last.texts or not now > last.begin:
            return
        count, nodes, seconds = len(last.texts), 0 if self._fixed else last.nodes, now - last.begin
        expected = self._expected(count, nodes)
        if nodes > 0 and expected > 0:
            self._pace += (seconds / expected - self._pace) * WEIGHT
        self._plain_run = 0 if nodes else self._plain_run + 1
        if nodes > 0 or self._plain_run >= PLAIN_RUN or self._fixed:
            self.costs.add(count, nodes, seconds)
        if texts == last.texts and last.nodes > 0:
            self._hoped = self._hoped * REMEMBERED + last.hoped
            self._accepted = self._accepted * REMEMBERED + tokens - count
        if texts == last.texts and expected > 0:
            self.estimate[0] += tokens / count * self.costs.seconds(count)
            self.estimate[1] += expected + last.drafting

    def _expected(self, texts: int, nodes: int) -> float:
        plain = self.costs.seconds(texts)
        if nodes == 0 or plain == 0:
            return plain
        curve = self.costs.curve(texts)
        return plain * float(np.interp(1 + nodes / texts, curve.rows, curve.costs))

    def next_step(self, texts: int) -> bool:
        """Begin a step over so many texts; return whether to draft in it."""
        self.costs.step += 1
        if not texts:
            return False
        band = band_of(texts)
        if band <= self._band - 2:  # half the load
            self._wait, self._saved, self._band = 0, 0.0, band
        self._band = max(self._band, band)
        if self._wait > 0:
            self._wait -= 1
            return False
        if self._fixed:
            return True
        self._since_plain += 1
        age = min(max(PLAIN_EVERY, SHARE * self._saved), PLAIN_AT_MOST)
        age = PLAIN_AT_LEAST if self._pace > SLOWER else age
        if self._since_plain > age + PLAIN_RUN:
            self._since_plain, self._pace = 0, 1.0
        return self.costs.seconds(texts) > 0 and self._since_plain <= age

    def choose(self, chances: NDArray[np.float64], drafting: float) -> NDArray[np.int32]:
        """Return the number of nodes of each draft to verify, int32 [batch].

        Args:
            chances: float64 [batch, nodes], see `Texts.chances`.
            drafting: seconds that these drafts took.
        """
        texts, band = len(chances), band_of(len(chances))
        trusted = chances * min(1.0, self._accepted / self._hoped)
        mean = self._drafting.setdefault(band, drafting)
        mean = self._drafting[band] = mean + (drafting - mean) * WEIGHT
        plain = self.costs.seconds(texts)
        share = mean / plain if plain > 0 else 0.0
        curve = FREE if self._fixed else self.costs.curve(texts)
        sizes, saved, _ = _select(trusted, curve.rows, curve.costs, curve.limit, share)
        self._saved = max(LEAST_SAVED, self._saved + (saved - self._saved) * WEIGHT)
        self._retry -= 1
        if self._saved < 0:
            self._wait, self._band = min(LONGEST, int(SHARE * share)), band
        if not sizes.any() and self._retry <= 0:
            hoped = as_input(np.sqrt(curve.costs), np.float64)
            sizes, _, cost = _select(trusted, curve.rows, hoped, curve.limit, share)
            self._retry = min(LONGEST, max(PLAIN_EVERY, int(SHARE * (cost * cost - 1))))
        if not sizes.any():
            self._hoped += (SURE - self._hoped) * FORGIVEN
            self._accepted += (SURE - self._accepted) * FORGIVEN
        if not self._fixed:
            self.costs.note_trial(texts, int(sizes.sum()))
        self._chosen = float(chances[np.arange(chances.shape[1]) < sizes[:, None]].sum())
        found: NDArray[np.int32] = sizes
        return found

    def begin(self, texts: frozenset[int], nodes: int, drafting: float) -> None:
        """Note that a pass begins over some texts and nodes, whose drafts took some seconds."""
        if texts:
            self.passes[0] += 1
            self.passes[1] += nodes == 0
        self._last = Pass(texts, nodes, self._chosen, drafting, self.clock())


@kernel
def _select(chances, rows, costs, limit, drafting):
    """Return the number of nodes of each draft that yield the most per time, what they save, and the cost of the pass.

    Args:
        chances: float64 [texts, nodes], not increasing along a draft; 0 behind it.
        rows: float64 [any] with costs, limit: see `Curve`.
        drafting: time to draft, in passes without drafts.
    """
    texts = len(chances)
    ranked = chances.T.copy().reshape(-1)  # so that of equal nodes, earlier ones of a draft come first
    order = np.argsort(-ranked, kind="mergesort")
    sizes, total, best, most, saved, cost = (
        np.zeros(texts, np.int32),
        0.0,
        0,
        1.0 / (1.0 + drafting),
        -drafting,
        1.0,
    )
    for k in range(1, len(order) + 1):
        chance = ranked[order[k - 1]]
        if chance <= 0.0 or 1.0 + k / texts > limit:
            break
        total += chance
        spent = np.interp(1.0 + k / texts, rows, costs)
        if (1.0 + total / texts) / (spent + drafting) > most:
            most, best = (1.0 + total / texts) / (spent + drafting), k
            saved, cost = 1.0 + total / texts - spent - drafting, spent
    for node in order[:best]:
        sizes[node % texts] += 1
    return sizes, saved, cost
