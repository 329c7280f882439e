"""The host's part of a decoding step, with passes that take no time: `python -m benchmarks.decoding.host`.

Real texts, drafts, trees, buffers and acceptance, on one core; only the forward pass is replaced by the recorded
output of Vicuna-7B. So the figures are what a GPU would wait for:

series    from the tokens of a pass on the host to the next pass in the queue: the GPU waits
drafts    the part of it in which sources draft
beside    from there to the next wait for tokens: the GPU is busy

Milliseconds of this thread's processor time in a step, medians over the steps in which all texts run. A table first;
the last line of stdout is one JSON document, also written to OUT/host.json.

Examples:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.decoding.host --work ~/bench
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.decoding.host --quick
"""

import argparse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from statistics import median
from time import thread_time_ns
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import CHAT, TINY, VICUNA, Workspace, add_arguments, open_workspace
from benchmarks.decoding.ways import LOOP, Way
from benchmarks.measure import progress, undisturbed
from benchmarks.report import describe_machine, finish, show_rows
from draftstore.decoding.budget import CostPlanner, Fixed
from draftstore.decoding.replay import Recording
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.drafting.slots import Slots
from draftstore.hf.batches import Batch, tokens_for
from draftstore.hf.members import prepare_text
from draftstore.hf.passes import CANDIDATES, Pass
from draftstore.hf.planning import TYPICAL
from draftstore.hf.runner import PassShape, Runner
from draftstore.stores.rest.store import RestStore
from draftstore.trees.frontier import BUDGET

TEXTS, NODES, TOKENS, LONGEST_PROMPT = (1, 8, 32), 16, 128, 256
ROUNDS, QUICK_ROUNDS = 5, 1


class RecordedPass:
    """The outputs of a pass that took no time: at each row, the recorded token after it."""

    def __init__(self, choices: NDArray[np.int64], offset: int, clock: "Clock") -> None:
        self.choices, self.offset, self.hidden, self._clock = choices, offset, None, clock

    def fetch(self) -> NDArray[np.int64]:
        """Return the choices; from now on, the GPU waits."""
        self._clock.waits()
        return self.choices


class Clock:
    """The times of steps in nanoseconds: in series with passes, of that in drafting, and beside passes."""

    def __init__(self) -> None:
        self.series, self.drafts, self.beside = list[int](), list[int](), list[int]()
        self._fetched = self._queued = self._drafting = 0

    def queues(self) -> None:
        """Note that a pass is in the queue."""
        if self._fetched:
            self.series.append(thread_time_ns() - self._fetched)
            self.drafts.append(self._drafting)
        self._drafting = 0

    def queued(self) -> None:
        """Note that the replaced pass has been prepared, which does not count."""
        self._queued, self._fetched = thread_time_ns(), 0

    def waits(self) -> None:
        """Note that the host waits for the tokens of a pass, and has them."""
        if not self._fetched:
            self._fetched = thread_time_ns()
            self.beside.append(self._fetched - self._queued)

    def drafted(self, spent: int) -> None:
        """Add the time of drafting."""
        self._drafting += spent


def small_model(vocab_size: int) -> Any:
    """Return a random model of two small layers."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    return model.eval()


@contextmanager
def recorded(recordings: list[Recording]) -> Iterator[Clock]:
    """Replace the passes of texts that joined in the order of their recordings."""
    clock, propose = Clock(), Slots.propose
    outputs = np.stack([each.output for each in recordings])
    prompts = np.array([len(each.prompt) for each in recordings])

    def compute(self: Runner, shape: PassShape, _start: int | None = None) -> Any:
        clock.queues()
        texts, rows = shape.texts, shape.rows
        integers = self._host_integers.numpy()[: texts * (1 + 2 * rows)]
        places = (
            integers[:texts, None] - prompts[:texts, None] + 1 + integers[texts:].reshape(2, texts, rows)[1]
        )
        best = np.take_along_axis(outputs[:texts], np.minimum(places, outputs.shape[1] - 1), 1).reshape(-1, 1)
        best = np.repeat(best, int(shape.wants.best) + CANDIDATES * shape.wants.candidates, 1)
        clock.queued()
        return RecordedPass(best.astype(np.int64), int(shape.wants.best), clock)

    def timed(self: Slots, *arguments: Any) -> Any:
        begin = thread_time_ns()
        try:
            return propose(self, *arguments)
        finally:
            clock.drafted(thread_time_ns() - begin)

    with patch.object(Runner, "_compute", compute), patch.object(Slots, "propose", timed):
        yield clock


def measure(model: Any, way: Way, recordings: list[Recording]) -> Clock:
    """Decode recorded outputs together for as long as all texts run; return the times."""
    texts, longest = len(recordings), max(len(each.prompt) for each in recordings)
    drafter = way.drafter() if way.drafter else None
    with closing(Batch(model, most=texts, tokens=tokens_for(texts, longest + TOKENS), ahead=True)) as batch:
        for each in recordings:
            prompt = torch.from_numpy(each.prompt.astype(np.int64))[None]
            options: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False}
            options["attention_mask"] = torch.ones_like(prompt)
            batch.join(prepare_text(model, prompt, **options).draft(drafter, way.planner or Fixed(0)))
        first = np.array([each.output[0] for each in recordings])
        _begin(batch, first)
        with recorded(recordings) as clock, undisturbed():
            while len(batch) == texts:
                batch.step()
    return clock


def _begin(batch: Batch, first: NDArray[np.int32]) -> None:
    """Read prompts; the texts begin with their recorded tokens."""
    begun = iter(first.tolist())

    def fetch(self: Pass) -> NDArray[np.int64]:
        return np.array([[next(begun)] * (1 + CANDIDATES) for _ in range(len(self.logits))])

    with patch.object(Pass, "fetch", fetch):
        while batch._reading:
            batch._read()


def ways(store: RestStore, vocab_size: int) -> list[Way]:
    """Return the ways of decoding: none, drafts from the request, and those of a store too, planned and not."""
    planned, fixed = CostPlanner(TYPICAL["cuda"], BUDGET), Fixed(NODES)

    def both() -> Mixture:
        return Mixture([RequestDrafter(vocab_size), store.drafter()])

    return [
        LOOP,
        Way(f"request, {NODES} nodes", lambda: RequestDrafter(vocab_size), fixed),
        Way("request and REST, planned", both, planned),
        Way(f"request and REST, {NODES} nodes", both, fixed),
    ]


def run(space: Workspace, *, quick: bool) -> list[dict[str, Any]]:
    """Return the figures of all ways and numbers of texts, measured in turn."""
    some = dict[tuple[int, ...], Recording]()
    for each in space.recordings(VICUNA):
        if len(each.output) >= TOKENS and len(each.prompt) <= LONGEST_PROMPT:
            some[tuple(each.prompt.tolist())] = Recording(each.id, each.prompt, each.output[:TOKENS])
    recordings, model = list(some.values()), small_model(space.tokenizer.vocab_size)
    known = ways(space.store(TINY if quick else CHAT), space.tokenizer.vocab_size)
    clocks: dict[tuple[int, str], list[Clock]] = {}
    for turn in range(1 + (QUICK_ROUNDS if quick else ROUNDS)):
        progress(f"round {turn}")
        for texts in TEXTS:
            for way in known:
                found = measure(model, way, recordings[:texts])
                if turn:  # the first round compiles
                    clocks.setdefault((texts, way.name), []).append(found)
    return [
        {"texts": texts, "way": name} | {
            part: round(median(time for each in found for time in getattr(each, part)) / 1e6, 3)
            for part in ("series", "drafts", "beside")
        } | {"steps": sum(len(each.series) for each in found)}
        for (texts, name), found in clocks.items()
    ]  # fmt: skip


def main() -> None:
    """Measure and show the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    with open_workspace(args) as space:
        rows = run(space, quick=args.quick)
        show_rows("The host's part of a step, in milliseconds", rows)
        finish(args.out, "host", {"machine": describe_machine(), "milliseconds": rows})


if __name__ == "__main__":
    main()
