"""How much of a draft is worth verifying: what a forward pass costs, and the planner that weighs it.

A pass over k nodes yields 1 + (nodes accepted) tokens and takes `curve.cost(k + 1)` seconds. Tokens per second in the
long run are greatest if every pass maximises

    (1 + S_k) - rate * cost(k + 1)          S_k = the sum of the chances that the first k nodes are accepted

where `rate` is that greatest number of tokens per second (Dinkelbach, "On nonlinear fractional programming", 1967).
The rate is estimated from what the passes yielded and from the curve, never from a clock: the same text and the same
drafts give the same plan. Curves have steps (a CPU takes half a pass more for 2 rows than for 1), so all k are tried.

                        k      0     1     2     3            a draft of three nodes, of chances .5 .4 .1
    1 + S_k                    1   1.5   1.9   2.0
    cost, in plain passes      1   1.5   1.5   1.6
    difference at rate 1       0     0    .4    .4            two nodes are worth it, the third is not

The chances are those that the drafter names, corrected by how its drafts fared in this text. That is learned from every
draft, verified or not: after a pass the tokens that came are known, and with them which children of the nodes on their
way were right. So a text that decodes plainly because its drafts are bad notices when they become good. The sum of
many small chances is corrected once more, by what came of such sums.

Correction takes a few tokens, and those could be dear. So there is an account: speculation may lose half a plain pass,
and 2 % of the text so far; whatever it wins is paid in. No text can take longer than that, however wrong its drafts
are: from 50 tokens on it decodes at 0.97 of plain speed at least, as far as the curve is right.
"""

import dataclasses
import datetime
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftstore.decoding.acceptance import Acceptance
from draftstore.decoding.calibration import (
    BANDS,
    LENGTH_BANDS,
    band_factors,
    best_prefix,
    count_lengths,
    count_outcomes,
    length_factors,
)
from draftstore.errors import CurveError, DraftTreeError
from draftstore.jit import as_input
from draftstore.storage.files import write_json
from draftstore.trees.tree import DraftTree

FORMAT = 1
KIND = "cost curve"
ALLOWANCE = 0.5
"""Plain passes that speculation may lose in a text."""
SHARE = 0.02
"""Part of the text so far that speculation may lose besides."""
ASKING_SHARE = 0.01
"""Part of the time that questions to a drafter may take while its drafts are not worth verifying."""
RATE_TRUST = 10.0
"""Tokens that the rate of plain decoding counts for at the start of a text."""
FORGETTING = 0.5 ** (1 / 300)
"""What is left of everything learned after another token of text: half of it after 300."""


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What a cost curve holds for.

    Attributes:
        model: what to call the model.
        shape: hash of the model's type, and of the shapes and types of its parameters: cost depends on nothing else.
        device: name of the processor.
        dtype: type of the model's parameters.
        attention: how attention is computed: `sdpa`, `eager`, ...
        cache: of keys and values: `dynamic` or `static`.
        threads: of the processor; 0 where that does not matter.
    """

    model: str
    shape: str
    device: str
    dtype: str
    attention: str
    cache: str
    threads: int

    def differences(self, other: "Conditions") -> list[str]:
        """Return in words where another model is not run as this one; what it is called does not matter."""
        mine, others = dataclasses.asdict(self), dataclasses.asdict(other)
        return [
            f"{name} {mine[name]!r}, found {others[name]!r}"
            for name in mine
            if name != "model" and mine[name] != others[name]
        ]


@dataclasses.dataclass(frozen=True)
class CostCurve:
    """Seconds that a forward pass takes, by its rows: 1 for plain decoding, k + 1 for a draft of k nodes.

    Attributes:
        rows: ascending, from 1.
        seconds: one for each; where more rows were measured to take less time, both get the mean.
        padded: whether a pass is filled up to the next number of `rows`, as with CUDA graphs. Otherwise costs between
            two measured numbers lie on the line between them.
        conditions: what was measured; None for a curve that was made up.
        context: tokens that were in the cache.
        created: when, ISO 8601.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    padded: bool = False
    conditions: Conditions | None = None
    context: int = 0
    created: str = ""

    def __post_init__(self) -> None:
        """Check the numbers, and make them monotone.

        Raises:
            CurveError: they are no curve.
        """
        rows, seconds = [int(each) for each in self.rows], [float(each) for each in self.seconds]
        if len(rows) != len(seconds) or rows[:1] != [1] or rows != sorted(set(rows)):
            raise CurveError(
                f"a cost curve over the rows {rows} with {len(seconds)} times: expected ascending numbers of rows "
                "from 1 on, and a time for each"
            )
        wrong = [each for each in seconds if not (math.isfinite(each) and each > 0)]
        if wrong:
            raise CurveError(f"a forward pass of {wrong[0]} seconds: expected a positive number")
        object.__setattr__(self, "rows", tuple(rows))
        object.__setattr__(self, "seconds", tuple(_ascending(seconds)))

    def cost(self, n_rows: int) -> float:
        """Return the seconds of a pass over so many rows; beyond the last number, the last slope goes on."""
        rows, seconds = self.rows, self.seconds
        if n_rows > rows[-1]:
            slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]) if len(rows) > 1 else 0.0
            return seconds[-1] + slope * (n_rows - rows[-1])
        if self.padded:
            return seconds[int(np.searchsorted(rows, n_rows))]
        return float(np.interp(n_rows, rows, seconds))

    def save(self, path: Path) -> None:
        """Write the curve as JSON, so that a crash leaves a whole file or none."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"format": FORMAT, "kind": KIND, **dataclasses.asdict(self)})

    @classmethod
    def load(cls, path: Path) -> "CostCurve":
        """Read a curve.

        Raises:
            CurveError: no such file, not a curve, or one of a version that this draftstore does not read.
        """
        advice = "measure it again with `draftstore tune`"
        try:
            found = json.loads(path.read_bytes())
        except OSError as error:
            raise CurveError(f"no cost curve at {path} ({error.strerror}): {advice}") from None
        except ValueError:
            raise CurveError(f"{path} is damaged, expected a cost curve in JSON: {advice}") from None
        if not isinstance(found, dict) or found.get("kind") != KIND:
            raise CurveError(f"{path} is not a cost curve: {advice}")
        if found.get("format") != FORMAT:
            raise CurveError(
                f"{path} is a cost curve of version {found.get('format')}, this draftstore reads version {FORMAT}: "
                f"{advice}"
            )
        try:
            return cls._from_json(found)
        except CurveError as error:
            raise CurveError(f"{path}: {error}: {advice}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise CurveError(f"{path} is damaged ({type(error).__name__}: {error}): {advice}") from None

    @classmethod
    def _from_json(cls, found: dict[str, Any]) -> "CostCurve":
        """Return the curve of a JSON document of the right kind and version."""
        conditions = found["conditions"]
        return cls(
            tuple(found["rows"]),
            tuple(found["seconds"]),
            bool(found["padded"]),
            None if conditions is None else Conditions(**conditions),
            int(found["context"]),
            str(found["created"]),
        )

    def require(self, conditions: Conditions) -> None:
        """Check that the curve was measured for a model as it is run now.

        Raises:
            CurveError: for another one.
        """
        differences = self.conditions.differences(conditions) if self.conditions else []
        if differences:
            raise CurveError(
                f"the cost curve was measured with {' and '.join(differences)}: "
                f"run `draftstore tune --model {conditions.model}` for this one"
            )


def now() -> str:
    """Return the time of this moment, for `created`."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _ascending(values: Sequence[float]) -> list[float]:
    """Return the ascending numbers nearest to some in the sense of least squares: falling neighbours are averaged.

    This is the pool-adjacent-violators algorithm (Ayer et al., 1955).
    """
    pools: list[tuple[float, int]] = []
    for each in values:
        pool = (each, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, size = pools.pop()
            total = size + pool[1]
            pool = ((mean * size + pool[0] * pool[1]) / total, total)
        pools.append(pool)
    return [mean for mean, size in pools for _ in range(size)]


class CostPlanner:
    """The planner that verifies what is worth its time; see the module's description.

    Attributes:
        rate: tokens per second, as estimated for this text so far.
        account: seconds that speculation may still lose.
    """

    def __init__(
        self,
        curve: CostCurve,
        budget: int = 64,
        *,
        draft_seconds: float = 0.0,
        allowance: float = ALLOWANCE,
        share: float = SHARE,
    ) -> None:
        """Plan by a curve.

        Args:
            curve: of the model on this device.
            budget: most nodes of a draft.
            draft_seconds: what asking the drafter takes; it matters only if that is no small part of a pass.
            allowance: plain passes that speculation may lose in a text.
            share: part of the text so far that it may lose besides.
        """
        self._budget = budget
        self._costs = np.array([curve.cost(rows) for rows in range(1, budget + 2)])
        self._plain = float(self._costs[0])
        self._draft_seconds = draft_seconds
        self._rest = max(0, math.ceil(draft_seconds / (ASKING_SHARE * self._plain)) - 1)
        self._allowance, self._share = allowance, share
        self._seen = np.zeros((2, BANDS, 2))
        self._lengths, self._expected = np.zeros((LENGTH_BANDS, 2)), np.zeros(LENGTH_BANDS)
        self.begin()
        self.trim(DraftTree.empty())  # has the kernel compiled now, and not in a text

    def begin(self) -> None:
        """Start a new text: what was learned from the last one is forgotten, so that no text pays for another."""
        self._seen[:] = 0.0
        self._lengths[:] = 0.0
        self._tokens, self._seconds = RATE_TRUST, RATE_TRUST * self._plain
        self.rate = 1 / self._plain
        self.account = self._allowance * self._plain
        self._silence = 0
        self._asked = False

    def budget(self) -> int:
        """Return the most nodes of a draft; 0 for a few passes after a draft that was not worth verifying.

        That is only where asking takes more than a hundredth of a plain pass.
        """
        self._asked = self._silence == 0
        return self._budget if self._asked else 0

    def trim(self, tree: DraftTree) -> DraftTree:
        """Return the prefix that is worth its cost.

        Raises:
            DraftTreeError: a parent is no earlier node.
        """
        tree = tree if len(tree) <= self._budget else tree.prefix(self._budget)
        size = best_prefix(
            as_input(tree.parents, np.int16),
            as_input(tree.levels, np.uint8),
            band_factors(self._seen),
            length_factors(self._lengths),
            self._costs,
            self.rate,
            self.account,
            self._expected,
        )
        if size < 0:
            raise DraftTreeError(
                f"node {-size - 1} has parent {tree.parents[-size - 1]}, expected an earlier node"
            )
        return tree.prefix(size)

    def learn(self, proposed: DraftTree, verified: DraftTree, accepted: Acceptance) -> None:
        """Take in what a pass yielded, and how all of the draft fared."""
        came = len(accepted.tokens)
        count_outcomes(
            as_input(proposed.tokens, np.int32),
            as_input(proposed.parents, np.int16),
            as_input(proposed.levels, np.uint8),
            as_input(accepted.tokens, np.int32),
            self._seen,
        )
        if len(verified):
            count_lengths(self._expected, len(accepted.path), self._lengths)
        seconds = float(self._costs[min(len(verified), self._budget)]) + self._draft_seconds * self._asked
        kept = FORGETTING**came
        self._seen *= kept
        self._lengths *= kept
        self._tokens = self._tokens * kept + came
        self._seconds = self._seconds * kept + seconds
        self.rate = max(self._tokens / self._seconds, 1 / self._plain)
        self.account += came * self._plain * (1 + self._share) - seconds
        if self._asked:
            self._silence = self._rest if len(verified) == 0 else 0
        else:
            self._silence -= 1
