"""What recall costs: time and memory of 256 texts of 16 prompts, and the wait of the first text of a prompt."""

from collections.abc import Sequence
from itertools import product
from statistics import median
from time import thread_time_ns
from typing import Any

import numpy as np

from benchmarks.measure import call_fresh, resident
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


ANSWER = 500
"""Tokens of each of 16 answers that are recalled for the first text of a prompt."""
FIRST_ROUNDS = 20


def measure_steps(
    earlier: Sequence[Recording], last: Sequence[Recording], vocab_size: int, rounds: int
) -> list[dict[str, Any]]:
    """Return milliseconds of a step, and to join all texts, by source, as medians of rounds in turn; and their MiB.

    The texts are outputs of the last epoch; drafts come from those of the earlier ones.
    """
    texts = [each for each in last if len(each.output) >= SHORTEST][:PROMPTS] * TEXTS
    sources = _sources(earlier, vocab_size)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sources}
    for _, name in product(range(rounds + 1), sources):  # the first compiles
        times[name].append(_decode(sources[name], texts))
    return [
        {
            "drafts from": name,
            "texts": len(texts),
            "step_ms": round(median(step for step, _ in each[1:]), 2),
            "join_ms": round(median(joined for _, joined in each[1:]), 2),
            "mib": round(call_fresh(memory_of, name, earlier, texts, vocab_size) / 2**20, 1),
        }
        for name, each in times.items()
    ]


def _sources(earlier: Sequence[Recording], vocab_size: int) -> dict[str, Mixture]:
    """Return drafters by their sources, after some answers."""
    store = LiveStore()
    store.agree(Vocabulary(vocab_size, "0" * 64))
    for each in earlier:
        store.append_many(each.prompt, [each.output])
    live, recall = store.drafter("sole"), RecallDrafter(store, vocab_size, ANSWERS)
    more: dict[str, list[Drafter]] = {
        "request": [],
        "recall": [recall],
        "live": [live],
        "live and recall": [live, recall],
    }
    return {name: Mixture([RequestDrafter(vocab_size), *each]) for name, each in more.items()}


def memory_of(name: str, earlier: Sequence[Recording], texts: Sequence[Recording], vocab_size: int) -> int:
    """Return the bytes that texts of a batch take in this process, besides the live store."""
    mixture = _sources(earlier, vocab_size)[name]
    _join(mixture, texts[:1], Slots())  # loads kernels
    before, slots = resident(trim=True)["anonymous"], Slots()
    _join(mixture, texts, slots)
    return resident(trim=True)["anonymous"] - before


def measure_first(outputs: Sequence[Recording], vocab_size: int) -> dict[str, Any]:
    """Return milliseconds until the first draft of a prompt with 8,000 recalled tokens, with recall and without it."""
    stream, each = np.concatenate([output.output for output in outputs]), ANSWER * ANSWERS
    answers = stream[: len(stream) // each * each].reshape(-1, ANSWERS, ANSWER)[:PROMPTS]
    made = [Recording("", output.prompt, one) for output, some in zip(outputs, answers) for one in some]  # noqa: B905
    sources, times = _sources(made, vocab_size), dict[str, list[float]]()
    batches = {name: Slots() for name in ("live", "live and recall")}
    for name, slots in batches.items():
        _join(sources[name], outputs[len(answers) :][:1], slots)
    for _, output, name in product(range(FIRST_ROUNDS), outputs[: len(answers)], batches):
        begin = thread_time_ns()
        (own,) = _join(sources[name], [output], batches[name])
        times.setdefault(name, []).append((thread_time_ns() - begin) / 1e6)
        batches[name].leave(own)
    without, recalled = (np.array(each[len(answers) :]) for each in times.values())
    return {
        "tokens": each,
        "samples": len(without),
        "without_ms": round(float(np.median(without)), 3),
        "recall_ms": round(float(np.median(recalled)), 3),
        "more_ms": round(float(np.median(recalled - without)), 3),
    }


def _join(mixture: Mixture, texts: Sequence[Recording], slots: Slots) -> list[int]:
    """Start texts, and draft for them once; return their slots."""
    own = [start(mixture, np.concatenate([each.prompt, each.output[:1]]), slots=slots).slot for each in texts]
    slots.propose(own, [NODES] * len(own), [0.0] * len(own))
    return own


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
