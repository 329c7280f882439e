"""One real run of rollouts: a small model answers the same prompts in every epoch, with and without drafts.

SmolLM2-135M-Instruct samples several answers to each AlpacaEval question, all in one batch of our own decoding, of at
most 64 texts at a time. The policy does not change from epoch to epoch, so answers differ only by chance; in training,
it changes a little. Ways of decoding, in turn within an epoch, with equal seeds, so that they give equal answers:

none        no drafts
16 nodes    from the request, live memory and recall, at most 16 nodes whatever they cost; a pass has room for 512 rows
by cost     the same, with as many nodes as pay by the measured cost of passes

A way learns its own answers, each when it ends. The first epoch has no earlier answers. `seconds` are those until the
last text of the batch has ended.
"""

from collections.abc import Sequence
from contextlib import closing
from os import getloadavg
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import SEED, Workspace, alpaca_questions, evenly
from benchmarks.decoding.texts import chat_prompt
from benchmarks.measure import progress
from benchmarks.smollm import smollm
from draftstore.decoding.budget import CostPlanner, Fixed, Planner
from draftstore.decoding.curve import CostCurve
from draftstore.decoding.loop import Tally
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.hf.answering import batch_member
from draftstore.hf.generation import batch_for
from draftstore.hf.loading import LoadedModel, load_model
from draftstore.hf.members import Member
from draftstore.hf.requests import GenerationRequest, Sampling
from draftstore.hf.tuning import measure
from draftstore.live.recall import RecallDrafter
from draftstore.live.shared import Vocabulary
from draftstore.live.store import LiveStore

PROMPTS, ANSWERS, TOKENS, EPOCHS, NODES = 24, 4, 64, 3, 16
QUICK_PROMPTS, QUICK_TOKENS = 2, 8
HEATS = (1.0, 0.6)
"""Temperatures: that of most training, and a usual one of evaluation."""
NONE, FIXED, COSTED = WAYS = ("none", f"{NODES} nodes", "by cost")
CURVE: dict[str, Any] = {"context": 128, "repeats": 3, "spread": 1.0, "texts": (1, 8, 32, 64)}

Prompts = Sequence[NDArray[np.int32]]


class Trainer:
    """One way of decoding, and the answers that it has learned."""

    def __init__(self, loaded: LoadedModel, way: str, curve: CostCurve) -> None:
        self._loaded, size = loaded, loaded.vocab_size
        self._store = LiveStore()
        self._store.agree(Vocabulary(size, loaded.text.fingerprint))
        sources = [RequestDrafter(size), self._store.drafter("sole"), RecallDrafter(self._store, size)]
        self._drafter = None if way == NONE else Mixture(sources)
        self._planner: Planner = CostPlanner(curve, NODES) if way == COSTED else Fixed(NODES)

    def roll_out(
        self, prompts: Prompts, tokens: int, heat: float, epoch: int
    ) -> tuple[dict[str, Any], list[Any]]:
        """Answer prompts at a temperature; return the figures of the batch, and the ids of the answers."""
        asked, tally, steps = dict[Member, NDArray[np.int32]](), Tally(), 0
        seeds = np.random.default_rng((SEED, epoch)).integers(2**31, size=len(prompts)).tolist()
        for prompt, seed in zip(prompts, seeds, strict=True):
            request = GenerationRequest(prompt, tokens, Sampling(heat, top_p=1.0, top_k=0, seed=seed))
            member = batch_member(self._loaded, request, drafter=self._drafter, planner=self._planner)
            asked[member] = prompt
        with closing(batch_for(self._loaded.model, [*asked])) as batch:
            begin, spent, waiting = perf_counter(), process_time(), {*asked}
            for member in asked:
                batch.join(member)
            while len(batch):
                steps += 1
                for member, result in batch.step():
                    if isinstance(result, Exception):
                        raise result
                    if member not in waiting:  # not its first token
                        tally.add(result)
                    waiting.discard(member)
                    if member.over:
                        self._store.append_many(asked[member], [_answer(member, asked[member])], epoch + 1)
            seconds, spent = perf_counter() - begin, process_time() - spent
        answers = [_answer(member, prompt).tolist() for member, prompt in asked.items()]
        figures = {
            "seconds": round(seconds, 2),
            "processor_seconds": round(spent, 2),
            "steps": steps,
            "tokens": sum(map(len, answers)),
            "tokens_a_pass": round(tally.accepted_length, 3),
            "nodes_a_pass": round(tally.drafted / max(1, tally.passes), 2),
            "drafting_seconds": round(tally.draft_ns / 1e9, 2),
            "load": round(getloadavg()[0], 2),
        }
        return figures, answers


def _answer(member: Member, prompt: NDArray[np.int32]) -> NDArray[np.int32]:
    return member.text.ids[len(prompt) :]


def measure_real(workspace: Workspace, model: Path | None, quick: bool) -> list[dict[str, Any]]:
    """Return the figures of each temperature, epoch and way."""
    loaded = load_model(smollm(workspace, model), dtype="float32")
    path = workspace.work / f"curve-rollouts-{loaded.name}.json"
    if not path.exists():
        progress("cost curve")
        measure(loaded.model, name=loaded.name, **CURVE).save(path)
    curve, rows = CostCurve.load(path), list[dict[str, Any]]()
    count, tokens = (QUICK_PROMPTS, QUICK_TOKENS) if quick else (PROMPTS, TOKENS)
    questions = evenly(alpaca_questions(workspace), count)
    prompts = [prompt for each in questions for prompt in ANSWERS * [chat_prompt(loaded, each)]]
    for way in WAYS:  # compiles
        Trainer(loaded, way, curve).roll_out(prompts[: 2 * ANSWERS], QUICK_TOKENS, 1.0, 0)
    for heat in HEATS:
        trainers = {way: Trainer(loaded, way, curve) for way in WAYS}
        for epoch in range(EPOCHS):
            done = {}
            for way in (*WAYS[epoch % len(WAYS) :], *WAYS[: epoch % len(WAYS)]):
                progress(f"temperature {heat}, epoch {epoch}, drafts: {way}")
                done[way] = trainers[way].roll_out(prompts, tokens, heat, epoch)
            plain, expected = done[NONE]
            for way in WAYS:
                figures, answers = done[way]
                place = {"temperature": heat, "epoch": epoch, "drafts": way}
                faster = round(plain["seconds"] / figures["seconds"], 3)
                differ = sum(one != other for one, other in zip(expected, answers, strict=True))
                rows.append({**place, **figures, "times_as_fast": faster, "differ": differ})
    return rows
