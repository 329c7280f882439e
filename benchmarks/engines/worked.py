"""The engine of the decoding worker in a process of its own, which answers what comes on stdin."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.engines.served import serve
from draftstore.assembly.drafter import assemble
from draftstore.assembly.sources import Sources
from draftstore.decoding.budget import Fixed, Planner
from draftstore.drafting.drafter import Drafter
from draftstore.hf.answering import batch_member
from draftstore.hf.batches import Batch
from draftstore.hf.checks import vocab_size
from draftstore.hf.loading import load_model
from draftstore.hf.members import Member
from draftstore.hf.planning import Effort, choose_plan
from draftstore.hf.requests import GenerationRequest, Sampling


class Worked:
    """The worker's batch, which plans by its measured curve or verifies a fixed number; see `served.Engine`."""

    def __init__(self, model: Path, curve: Path, settings: dict[str, Any]) -> None:
        self._loaded = load_model(model)
        self._batch = Batch(self._loaded.model, most=16)
        self._drafter: Drafter | None = None
        self._planner: Planner = Fixed(0)
        if settings:
            stores = (Path(settings["store"]),) if "store" in settings else ()
            sources = Sources(stores=stores, request=settings.get("request", not stores))
            tokenizer = self._loaded.text.identity
            self._drafter = assemble(
                sources, vocab_size=vocab_size(self._loaded.model), tokenizer=tokenizer
            ).drafter
            fixed, budget = not settings.get("adaptive", True), settings.get("budget")
            effort = Effort(curve=curve, fixed=fixed, budget=budget)
            self._planner = choose_plan(effort, self._loaded).planner
        self._numbers: dict[Member, int] = {}
        self._answers: dict[int, list[int]] = {}
        self.steps: list[tuple[float, int, int]] = []
        self.estimate = (0.0, 0.0)

    def add(self, number: int, prompt: list[int], tokens: int) -> None:
        """See `Engine`."""
        request = GenerationRequest(
            np.array(prompt, np.int32), tokens, Sampling(temperature=0), ignore_eos=True
        )
        member = batch_member(self._loaded, request, drafter=self._drafter, planner=self._planner)
        self._numbers[member], self._answers[number] = number, []
        self._batch.join(member)

    def step(self) -> Iterable[tuple[int, list[int], bool]]:
        """See `Engine`."""
        nodes, found = 0, []
        for member, result in self._batch.step():
            if isinstance(result, Exception):
                raise result
            number, nodes = self._numbers[member], nodes + len(result.tree)
            self._answers[number].extend(result.tokens.tolist())
            found.append((number, self._answers[number], member.over))
            if member.over:
                del self._numbers[member]
        self.steps.append((perf_counter(), len(found), nodes))
        return found


if __name__ == "__main__":
    serve(lambda: Worked(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])))
