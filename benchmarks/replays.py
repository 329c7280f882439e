"""The recorded outputs that systems are compared on, by name, with the texts that go with them."""

from typing import NamedTuple

from benchmarks.common import CHAT, CODE, RecordingSet, Source, Workspace, evenly
from draftstore.decoding.replay import Recording

SPEC_BENCH = RecordingSet("spec_bench.jsonl.zst", "vicuna-7b-v1.3")
TASK_ROWS = 40
"""Of each task of Spec-Bench; of these, every other one tunes constants and is not reported."""


class Replay(NamedTuple):
    """Recorded outputs.

    Attributes:
        source: texts of their kind, all of them.
        recorded: the file and model.
        rows: those that are reported.
    """

    source: Source
    recorded: RecordingSet
    rows: slice = slice(None)

    def read(self, workspace: Workspace, limit: int | None = None) -> list[Recording]:
        """Return the recordings, at most `limit` of them, at even distances."""
        recordings = workspace.recordings(self.recorded)[self.rows]
        return recordings if limit is None else evenly(recordings, limit)


def _alpaca(model: str) -> Replay:
    return Replay(CHAT, RecordingSet("alpaca_eval.jsonl.zst", model))


def _task(place: int) -> Replay:
    return Replay(CHAT, SPEC_BENCH, slice(place * TASK_ROWS + 1, (place + 1) * TASK_ROWS, 2))


REPLAYS = {
    "AlpacaEval: Vicuna-7B-v1.5": _alpaca("vicuna-7b-v1.5"),
    "AlpacaEval: Llama-2-7B-chat": _alpaca("llama-2-7b-chat-hf"),
    "AlpacaEval: Mistral-7B-Instruct-v0.2": _alpaca("Mistral-7B-Instruct-v0.2"),
    "AlpacaEval: Llama-3-8B-Instruct": _alpaca("Meta-Llama-3-8B-Instruct"),
    "AlpacaEval: GPT-3.5-turbo": _alpaca("gpt-3.5-turbo-0613"),
    "Spec-Bench: translation": _task(0),
    "Spec-Bench: summarization": _task(1),
    "Spec-Bench: question answering": _task(2),
    "Spec-Bench: mathematics": _task(3),
    "Spec-Bench: retrieved passages": _task(4),
    "HumanEval: CodeLlama-7b-Instruct": Replay(
        CODE, RecordingSet("humaneval.jsonl.zst", "CodeLlama-7b-Instruct-hf")
    ),
    "MBPP: CodeLlama-34b-Instruct": Replay(CODE, RecordingSet("mbpp.jsonl.zst", "CodeLlama-34b-Instruct-hf")),
    "ShareGPT: ChatGPT": Replay(CHAT, RecordingSet("sharegpt.jsonl.zst")),
}
"""The models wrote in their own words; all are read with the stores' tokenizer."""
