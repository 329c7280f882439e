"""What recall costs in a step of a large batch: the processor time of drafting for 256 texts of 16 prompts."""

from collections.abc import Sequence
from itertools import product
from statistics import median
from time import thread_time_ns
from typing import Any

import numpy as np

from draftstore.decoding.replay import Recording
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.drafting.slots import Slots, start
from draftstore.live.directory import ANSWERS
from draftstore.live.recall import RecallDrafter
from draftstore.live.shared import Vocabulary
from draftstore.live.store import LiveStore

PROMPTS, TEXTS, NODES, STEPS, TOKENS = 16, 16, 16, 30, 2
"""Prompts, texts of each, nodes of a draft, steps, and new tokens of each text in a step."""
SHORTEST = STEPS * TOKENS + 2


def measure_steps(
    earlier: Sequence[Recording], last: Sequence[Recording], vocab_size: int, rounds: int
) -> list[dict[str, Any]]:
    """Return milliseconds of a step, and to join all texts, by source, as medians of rounds in turn.

    The texts are outputs of the last epoch; drafts come from those of the earlier ones.
    """
    store = LiveStore()
    store.agree(Vocabulary(vocab_size, "0" * 64))
    chosen = [each for each in last if len(each.output) >= SHORTEST][:PROMPTS]
    for each in earlier:
        store.append_many(each.prompt, [each.output])
    sources: dict[str, list[Drafter]] = {
        "request": [],
        "recall": [RecallDrafter(store, vocab_size, ANSWERS)],
        "live": [store.drafter("sole")],
        "live and recall": [store.drafter("sole"), RecallDrafter(store, vocab_size, ANSWERS)],
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sources}
    for _, name in product(range(rounds + 1), sources):  # the first compiles
        mixture = Mixture([RequestDrafter(vocab_size), *sources[name]])
        times[name].append(_decode(mixture, [each for each in chosen for _ in range(TEXTS)]))
    return [
        {
            "drafts from": name,
            "texts": TEXTS * len(chosen),
            "step_ms": round(median(step for step, _ in each[1:]), 2),
            "join_ms": round(median(joined for _, joined in each[1:]), 2),
        }
        for name, each in times.items()
    ]


def _decode(mixture: Mixture, texts: Sequence[Recording]) -> tuple[float, float]:
    """Return milliseconds of this thread for a step, and to join all texts."""
    slots, steps, begin = Slots(), list[int](), thread_time_ns()
    own = [start(mixture, np.concatenate([each.prompt, each.output[:1]]), slots=slots).slot for each in texts]
    joined = thread_time_ns() - begin
    stops = np.arange(TOKENS, TOKENS * len(texts) + 1, TOKENS)
    for step in range(STEPS):
        begin = thread_time_ns()
        slots.propose(own, [NODES] * len(own), [0.0] * len(own))
        place = 1 + step * TOKENS
        slots.observe(own, np.concatenate([each.output[place : place + TOKENS] for each in texts]), stops)
        steps.append(thread_time_ns() - begin)
    return median(steps) / 1e6, joined / 1e6
