"""What the points of benchmarks.crest_curve show, said outright."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import exp, log
from typing import Any

from benchmarks.common import STRATEGY_NAMES
from benchmarks.curves import in_units
from draftstore.stores.crest.selection import GAIN
from draftstore.stores.crest.store import DEFAULT_STRATEGY

GOAL_FRACTION = "1/13.5"
REACH_GOAL = 100.0


def state_claims(result: Mapping[str, Any], fractions: Mapping[str, float], goal: float) -> dict[str, Any]:
    """Return where CREST reaches REST, and what it gains at parts of REST's bytes.

    Args:
        result: of one set: `rest`, `crest` and `rest_bytes`.
        fractions: the parts, by name.
        goal: the gain over REST `longest` that is expected at 1/13.5 of its bytes, in percent.
    """
    base = result["rest"][-1]["longest"]["accepted_length"]
    widest = max(point["max_n"] for point in result["crest"])
    ranked = [p for p in result["crest"] if p["selection"] != "single" and p["max_n"] == widest]
    reached = _reached(ranked, base, result["rest_bytes"])
    gains = {name: _gains(ranked, base, int(result["rest_bytes"] / part)) for name, part in fractions.items()}
    own = next(each for each in reached if _is_default(each))
    at_goal = next(each for each in gains[GOAL_FRACTION] if _is_default(each))
    return {
        "rest_longest_accepted_length": base,
        "reached": reached,
        "gains": gains,
        "goals": {
            "reached_at_most": 1 / REACH_GOAL,
            "reached_met": own["rest_bytes_divided_by"] is not None
            and own["rest_bytes_divided_by"] >= REACH_GOAL,
            "gain_percent": goal,
            "gain_met": at_goal["gain_percent"] >= goal,
        },
    }


def _is_default(claim: Mapping[str, Any]) -> bool:
    return bool(claim["selection"] == GAIN and claim["strategy"] == DEFAULT_STRATEGY)


def _lines(points: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, list[tuple[int, float]]]]:
    """Return selection, strategy, and bytes with M, ascending, of every line."""
    selections = dict.fromkeys(point["selection"] for point in points)
    return [
        (
            selection,
            strategy,
            sorted(
                (point["bytes"], point[strategy]["accepted_length"])
                for point in points
                if point["selection"] == selection
            ),
        )
        for selection in selections
        for strategy in STRATEGY_NAMES
    ]


def _reached(points: Sequence[Mapping[str, Any]], base: float, rest_bytes: int) -> list[dict[str, Any]]:
    """Return, for every line, the smallest store measured that accepts as much as REST; none: nulls."""
    found = []
    for selection, strategy, line in _lines(points):
        size, accepted = next(((size, m) for size, m in line if m >= base), (None, None))
        estimate = _crossing(line, base)
        found.append({
            "selection": selection,
            "strategy": strategy,
            "bytes": size,
            "accepted_length": accepted,
            "rest_bytes_divided_by": round(rest_bytes / size, 1) if size else None,
            "interpolated_bytes": estimate,
            "interpolated_rest_bytes_divided_by": round(rest_bytes / estimate, 1) if estimate else None,
        })  # fmt: skip
    return found


def _crossing(line: Sequence[tuple[int, float]], base: float) -> int | None:
    """Return the bytes where a line reaches `base`, straight between points over the logarithm of bytes."""
    for (size, m), (next_size, next_m) in pairwise(line):
        if m < base <= next_m:
            part = (base - m) / (next_m - m)
            return round(exp(log(size) + part * log(next_size / size)))
    return None


def _gains(points: Sequence[Mapping[str, Any]], base: float, most_bytes: int) -> list[dict[str, Any]]:
    """Return what every line gains where its stores were given so many bytes."""
    return [
        {
            "selection": point["selection"],
            "strategy": strategy,
            "bytes": point["bytes"],
            "entries": point["entries"],
            "accepted_length": point[strategy]["accepted_length"],
            "gain_percent": round(100 * (point[strategy]["accepted_length"] / base - 1), 2),
        }
        for point in points
        if point["max_bytes"] == most_bytes
        for strategy in STRATEGY_NAMES
    ]


def show_claims(result: Mapping[str, Any]) -> None:
    """Print the claims of one set as sentences."""
    claims = result["claims"]
    base = claims["rest_longest_accepted_length"]
    print(f"{result['set']}: REST longest has M {base:.4f} with {in_units(result['rest_bytes'])}.")
    for each in claims["reached"]:
        who = f"CREST {each['selection']}, {each['strategy']}"
        if each["bytes"] is None:
            print(f"  {who} does not reach it.")
            continue
        print(
            f"  {who} reaches it (M {each['accepted_length']:.4f}) with {in_units(each['bytes'])}, 1/"
            f"{each['rest_bytes_divided_by']:g} of REST's bytes"
            + (
                f"; between points about 1/{each['interpolated_rest_bytes_divided_by']:g}."
                if each["interpolated_bytes"]
                else "."
            )
        )
    for name, gains in claims["gains"].items():
        for each in sorted(gains, key=lambda gain: -gain["gain_percent"]):
            print(
                f"  at {name} of REST's bytes, CREST {each['selection']}, {each['strategy']}: "
                f"M {each['accepted_length']:.4f}, {each['gain_percent']:+.1f} %"
            )
    goals = claims["goals"]
    default = f"the defaults ({GAIN}, {DEFAULT_STRATEGY})"
    for what, met in (
        (f"REST's M in at most 1/{REACH_GOAL:g} of its bytes", goals["reached_met"]),
        (f"{goals['gain_percent']:g} % more at {GOAL_FRACTION}", goals["gain_met"]),
    ):
        print(f"  {what}, with {default}: {'yes' if met else 'NO'}")
