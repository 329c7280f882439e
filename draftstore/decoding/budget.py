"""How much of a draft to verify: the cost curve of a forward pass, and the planner that uses it.

A pass over k nodes yields 1 + (accepted nodes) tokens and takes `curve.cost(k + 1)` seconds. Long-run throughput is
maximal if every pass maximises

    (1 + S_k) - rate * cost(k + 1)          S_k = sum of the acceptance probabilities of the first k nodes

where `rate` is that maximal throughput in tokens per second (Dinkelbach, "On nonlinear fractional programming", 1967).
The rate is estimated from accepted tokens and the curve, never from a clock: the same text and the same drafts give the
same plan. Curves have steps (a CPU takes half a pass more for 2 rows than for 1), so all k are tried.

                        k      0     1     2     3            a draft of three nodes, probabilities .5 .4 .1
    1 + S_k                    1   1.5   1.9   2.0
    cost, in plain passes      1   1.5   1.5   1.6
    difference at rate 1       0     0    .4    .4            two nodes are worth it, the third is not

The probabilities are the drafter's, calibrated by how its drafts fared in this text. That is learned from every draft,
verified or not: after a pass the next tokens are known, and with them which children along their path were right. So a
text that decodes plainly because of bad drafts notices when they become good. The sum of many small probabilities is
calibrated a second time, by the outcomes of such sums.

Calibration takes a few tokens, which could be expensive. So there is an account: speculation may lose half a plain pass
plus 2 % of the text so far; its gains are paid in. No text can take longer than that, however wrong its drafts are:
from 50 tokens on it decodes at 0.97 of plain speed at least, provided that the curve is right.
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
"""Fraction of the text so far that speculation may lose in addition."""
ASKING_SHARE = 0.01
"""Fraction of the time that drafting may take while drafts are not worth verifying."""
RATE_TRUST = 10.0
"""Weight of the plain decoding rate at the start of a text, in tokens."""
FORGETTING = 0.5 ** (1 / 300)
"""Decay of everything learned per token of text: one half after 300."""


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The conditions under which a cost curve was measured.

    Attributes:
        model: name of the model.
        shape: hash of the model's type, and of the shapes and types of its parameters: they determine the cost.
        device: name of the processor.
        dtype: type of the model's parameters.
        attention: attention implementation: `sdpa`, `eager`, ...
        cache: kind of key-value cache: `dynamic` or `static`.
        threads: number of CPU threads; 0 where it does not matter.
    """

    model: str
    shape: str
    device: str
    dtype: str
    attention: str
    cache: str
    threads: int

    def differences(self, other: "Conditions") -> list[str]:
        """Describe the differences to other conditions, except for the model's name."""
        mine, others = dataclasses.asdict(self), dataclasses.asdict(other)
        return [
            f"{name} {mine[name]!r}, found {others[name]!r}"
            for name in mine
            if name != "model" and mine[name] != others[name]
        ]


@dataclasses.dataclass(frozen=True)
class CostCurve:
    """Seconds of a forward pass by number of rows: 1 for plain decoding, k + 1 for a draft of k nodes.

    Attributes:
        rows: numbers of rows, ascending, from 1.
        seconds: seconds for each; where more rows were measured as faster, both get the mean.
        padded: whether a pass is padded to the next number in `rows`, as with CUDA graphs. Otherwise costs are
            interpolated linearly.
        conditions: conditions of the measurement; None for a synthetic curve.
        context: tokens in the cache.
        created: time of the measurement, ISO 8601.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    padded: bool = False
    conditions: Conditions | None = None
    context: int = 0
    created: str = ""

    def __post_init__(self) -> None:
        """Check the values and make them monotone.

        Raises:
            CurveError: the values are not a curve.
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
        """Return the seconds of a pass over `n_rows` rows; extrapolated with the last slope."""
        rows, seconds = self.rows, self.seconds
        if n_rows > rows[-1]:
            slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]) if len(rows) > 1 else 0.0
            return seconds[-1] + slope * (n_rows - rows[-1])
        if self.padded:
            return seconds[int(np.searchsorted(rows, n_rows))]
        return float(np.interp(n_rows, rows, seconds))

    def save(self, path: Path) -> None:
        """Write the curve as JSON, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"format": FORMAT, "kind": KIND, **dataclasses.asdict(self)})

    @classmethod
    def load(cls, path: Path) -> "CostCurve":
        """Read a curve.

        Raises:
            CurveError: no such file, not a curve, or an unsupported version.
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
        """Check that the curve was measured under the given conditions.

        Raises:
            CurveError: it was not.
        """
        differences = self.conditions.differences(conditions) if self.conditions else []
        if differences:
            raise CurveError(
                f"the cost curve was measured with {' and '.join(differences)}: "
                f"run `draftstore tune --model {conditions.model}` for this one"
            )


def now() -> str:
    """Return the current time, for `created`."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _ascending(values: Sequence[float]) -> list[float]:
    """Return the ascending sequence nearest to the values in least squares: descending neighbours are averaged.

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
    """The planner that maximises throughput; see the module's description.

    Attributes:
        rate: estimated tokens per second for this text so far.
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
        """Plan with a curve.

        Args:
            curve: curve of the model on this device.
            budget: maximum nodes of a draft.
            draft_seconds: time to get a draft; matters only if it is not small compared to a pass.
            allowance: plain passes that speculation may lose in a text.
            share: fraction of the text so far that it may lose in addition.
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
        self.trim(DraftTree.empty())  # compiles the kernel now, not during decoding

    def begin(self) -> None:
        """Start a new text; nothing is carried over, so that no text pays for another."""
        self._seen[:] = 0.0
        self._lengths[:] = 0.0
        self._tokens, self._seconds = RATE_TRUST, RATE_TRUST * self._plain
        self.rate = 1 / self._plain
        self.account = self._allowance * self._plain
        self._silence = 0
        self._asked = False

    def budget(self) -> int:
        """Return the maximum nodes of a draft; 0 for a few passes after a draft that was not worth verifying.

        It is 0 only if drafting takes more than a hundredth of a plain pass.
        """
        self._asked = self._silence == 0
        return self._budget if self._asked else 0

    def trim(self, tree: DraftTree) -> DraftTree:
        """Return the prefix that is worth its cost.

        Raises:
            DraftTreeError: a parent does not precede its child.
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
        """Learn from a pass's outcome, for the whole draft."""
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
