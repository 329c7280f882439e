"""A vLLM engine in a process of its own, which answers what comes on stdin: a program for vLLM's interpreter."""

import json
import os
import sys
from time import perf_counter
from typing import Any


class Watched:
    """The drafter of this process.

    Attributes:
        proposer: the drafter's; None without drafts.
        steps: time, texts and nodes of each step.
    """

    def __init__(self) -> None:
        """Note the steps of any drafter from now on."""
        self.proposer: Any = None
        self.steps: list[tuple[float, int, int]] = []
        from draftstore.engines.proposer import Proposer

        propose = Proposer.propose

        def noted(proposer: Any, slots: Any, *args: Any, **options: Any) -> Any:
            batch = propose(proposer, slots, *args, **options)
            self.proposer = proposer
            self.steps.append((perf_counter(), len(slots), int(batch.sizes.sum())))
            return batch

        Proposer.propose = noted  # type: ignore[assignment,method-assign]

    @property
    def estimate(self) -> tuple[float, float]:
        """The estimated seconds without and with drafts; zeros with fixed budgets."""
        load = self.proposer and self.proposer.load
        return tuple(load.estimate) if load else (0.0, 0.0)


def serve(model: str, drafts: bool) -> None:
    """Answer what comes on stdin, with an engine in this process."""
    from vllm import LLM

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    speculative = {
        "method": "custom_class",
        "model": "draftstore.engines.vllm.Drafter",
        "num_speculative_tokens": 8,
    }
    engine: Any = LLM(
        model, dtype="float32", enforce_eager=True, seed=0, max_num_seqs=16, max_model_len=512,
        kv_cache_memory_bytes=1 << 29, enable_prefix_caching=False,
        **({"speculative_config": speculative} if drafts else {}),
    ).llm_engine  # fmt: skip
    watched = Watched()  # now: vLLM does not start where numba has been imported
    for line in sys.stdin:
        watched.steps.clear()
        before = watched.estimate
        found = answer_all(engine, **json.loads(line))
        estimate = [new - old for new, old in zip(watched.estimate, before, strict=True)]
        print(json.dumps(found | {"steps": watched.steps, "estimate": estimate}), file=answers, flush=True)


def answer_all(engine: Any, prompts: list[list[int]], at_once: Any, tokens: int) -> dict[str, Any]:
    """Answer prompts, `at_once` of them; a list: so many during each third of the prompts.

    Beside the answers and all seconds, it returns the tokens and seconds of passes that read no prompt and end no text.
    """
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    answers: dict[int, list[int]] = {}
    sizes, decoded, spent = [0] * len(prompts), 0, 0.0
    asked, begin = 0, perf_counter()
    while len(answers) < len(prompts):
        part, reads = len(answers) * 3 // len(prompts), False
        most = at_once if isinstance(at_once, int) else at_once[part]
        while asked < len(prompts) and asked - len(answers) < most:
            engine.add_request(str(asked), {"prompt_token_ids": prompts[asked]}, greedy)
            asked, reads = asked + 1, True
        start, before, ended = perf_counter(), sum(sizes), len(answers)
        for output in engine.step():
            number, ids = int(output.request_id), list(output.outputs[0].token_ids)
            sizes[number] = len(ids)
            if output.finished:
                answers[number] = ids
        if not reads and len(answers) == ended:
            decoded, spent = decoded + sum(sizes) - before, spent + perf_counter() - start
    return {
        "seconds": perf_counter() - begin,
        "answers": [answers[number] for number in range(len(prompts))],
        "decoded": decoded,
        "decoding": spent,
    }


if __name__ == "__main__":
    serve(sys.argv[1], "drafts" in sys.argv[2:])
