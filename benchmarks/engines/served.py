"""A vLLM engine in a process of its own, which answers what comes on stdin: a program for vLLM's interpreter.

`serve` and `answer_all` also serve `benchmarks.engines.worked`.
"""

import json
import os
import sys
from collections.abc import Iterable
from itertools import count
from time import perf_counter, process_time
from typing import Any, Protocol

import numpy as np


class Engine(Protocol):
    """An engine with greedy answers.

    Attributes:
        steps: time, texts and nodes of each step.
        estimate: seconds of all passes, as estimated without and with drafts.
    """

    steps: list[tuple[float, int, int]]

    @property
    def estimate(self) -> tuple[float, float]:
        """See above."""

    def add(self, number: int, prompt: list[int], tokens: int) -> None:
        """Start an answer of so many tokens."""

    def step(self) -> Iterable[tuple[int, list[int], bool]]:
        """Run one pass; return the numbers of its texts, their answers so far, and whether these are complete."""


class Vllm:
    """vLLM with a configuration of speculative decoding, or without; see `Engine`.

    With `whole`, answers end where the model ends them.
    """

    def __init__(self, model: str, speculative: dict[str, Any] | None = None, *, whole: bool = False) -> None:
        from vllm import LLM

        self._engine: Any = LLM(
            model, dtype="float32", enforce_eager=True, seed=0, max_num_seqs=16, max_model_len=512,
            kv_cache_memory_bytes=1 << 29, enable_prefix_caching=False,
            speculative_config=speculative,
        ).llm_engine  # fmt: skip
        self._whole, self._asked = whole, count()
        self._proposer: Any = None
        self.steps: list[tuple[float, int, int]] = []
        self._watch()  # now: vLLM does not start where numba has been imported

    def _watch(self) -> None:
        """Note all steps from now on."""
        from draftstore.engines.proposer import Proposer

        propose = Proposer.propose

        def noted(proposer: Any, slots: Any, *args: Any, **options: Any) -> Any:
            batch = propose(proposer, slots, *args, **options)
            self._proposer = proposer
            self.steps.append((perf_counter(), len(slots), int(batch.sizes.sum())))
            return batch

        Proposer.propose = noted  # type: ignore[assignment,method-assign]

    @property
    def estimate(self) -> tuple[float, float]:
        """See `Engine`; zeros with fixed budgets."""
        load = self._proposer and self._proposer.load
        return tuple(load.estimate) if load else (0.0, 0.0)

    def add(self, number: int, prompt: list[int], tokens: int) -> None:
        """See `Engine`."""
        from vllm import SamplingParams

        greedy = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=not self._whole, detokenize=False
        )
        # A new name each time: suffix decoding forgets what it knows of a name that comes again.
        self._engine.add_request(f"{number} {next(self._asked)}", {"prompt_token_ids": prompt}, greedy)

    def step(self) -> Iterable[tuple[int, list[int], bool]]:
        """See `Engine`."""
        outputs = self._engine.step()
        return [
            (int(each.request_id.split()[0]), list(each.outputs[0].token_ids), each.finished)
            for each in outputs
        ]


def serve(start: Any) -> None:
    """Start an engine, and answer what comes on stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = start()
    for line in sys.stdin:
        engine.steps.clear()
        found = answer_all(engine, **json.loads(line))
        print(json.dumps(found | {"steps": engine.steps}), file=answers, flush=True)


def answer_all(engine: Engine, prompts: list[list[int]], at_once: Any, tokens: int) -> dict[str, Any]:
    """Answer prompts, `at_once` of them; a list: so many during each third of the prompts.

    Beside the answers and all seconds, also of the processor, it returns the passes of all texts after those that gave
    their first tokens, the tokens and seconds of passes over so many texts that read no prompt and end no text, and the
    estimated seconds of the latter.
    """
    answers: dict[int, list[int]] = {}
    passes, sizes, full = 0, [0] * len(prompts), np.zeros(4)
    asked, begin, worked = 0, perf_counter(), process_time()
    while len(answers) < len(prompts):
        part, reads = len(answers) * 3 // len(prompts), False
        most = at_once if isinstance(at_once, int) else at_once[part]
        while asked < len(prompts) and asked - len(answers) < most:
            engine.add(asked, prompts[asked], tokens)
            asked, reads = asked + 1, True
        before, ended = np.array([sum(sizes), perf_counter(), *engine.estimate]), len(answers)
        for number, ids, complete in engine.step():
            passes += 0 < sizes[number] < len(ids)
            sizes[number] = len(ids)
            if complete:
                answers[number] = ids
        if not reads and len(answers) == ended == asked - most:
            full += [sum(sizes), perf_counter(), *engine.estimate] - before
    return {
        "seconds": perf_counter() - begin,
        "processor": process_time() - worked,
        "answers": [answers[number] for number in range(len(prompts))],
        "passes": passes,
        "decoded": full[0],
        "decoding": full[1],
        "estimate": full[2:].tolist(),
    }


if __name__ == "__main__":
    serve(lambda: Vllm(sys.argv[1], **json.loads(sys.argv[2])))
