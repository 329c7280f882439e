"""What a draft costs the host: all systems in turn, on one core, at the same places of the same texts."""

from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import percentiles, undisturbed
from benchmarks.systems import System
from draftstore.decoding.replay import Recording

STRIDE = 2
"""Tokens by which the texts grow from draft to draft."""
WARM_UP = 10
"""First drafts, which are not counted."""


def time_in_turn(
    systems: Mapping[str, System], recordings: Sequence[Recording], nodes: int, drafts: int
) -> dict[str, dict[str, Any]]:
    """Time drafts of so many nodes, and what systems do when they hear how the text went on; microseconds.

    Whoever begins changes from place to place: each finds in the caches what others have left of it.
    """
    names, place = list(systems), -WARM_UP
    times: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    with undisturbed():
        for recording in recordings:
            output = recording.output
            begun = np.concatenate([recording.prompt, output[:1]])
            sessions: dict[str, Any] = {
                name: system.drafter.session(begun) for name, system in systems.items()
            }
            for start in range(1, len(output) - STRIDE, STRIDE):
                if place == drafts:
                    break
                turn = place % len(names)
                for name in (*names[turn:], *names[:turn]):
                    taken = _time_draft(sessions[name], nodes, output[start : start + STRIDE])
                    if place >= 0:
                        times[name].append(taken)
                place += 1
    return {name: _summary(np.array(taken)) for name, taken in times.items() if taken}


def _summary(taken: NDArray[np.int64]) -> dict[str, Any]:
    """Return the percentiles of drafts and of learning, in microseconds."""
    return {what: percentiles(taken[:, column] / 1000) for column, what in enumerate(("draft", "learn"))}


def _time_draft(session: Any, nodes: int, tokens: Any) -> tuple[int, int]:
    """Return the nanoseconds of a draft, and of telling the session how the text went on."""
    ask = getattr(session, "ask", session.propose)  # other systems' answers are not packed into trees here
    begin = perf_counter_ns()
    ask(nodes)
    drafted = perf_counter_ns()
    session.observe(tokens)
    return drafted - begin, perf_counter_ns() - drafted
