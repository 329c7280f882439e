"""The recorded outputs for comparing systems, by name, with the texts that belong to them."""

from typing import NamedTuple

from benchmarks.common import CHAT, CODE, RecordingSet, Source, Workspace, evenly
from draftstore.decoding.replay import Recording

SPEC_BENCH = RecordingSet("spec_bench.jsonl.zst", "vicuna-7b-v1.3")
SOME = 100
TASK_ROWS = 40
"""Of each task of Spec-Bench."""


class Replay(NamedTuple):
    """Recorded outputs.

    Attributes:
        source: all texts of their kind.
        recorded: the file and model.
        rows: the reported rows.
        most: default maximum number of rows; None: all.
    """

    source: Source
    recorded: RecordingSet
    rows: slice = slice(None)
    most: int | None = None

    def read(self, workspace: Workspace, most: int | None = None) -> list[Recording]:
        """Return the recordings, evenly sampled if there are too many; `most` replaces the default limit."""
        recordings, most = workspace.recordings(self.recorded)[self.rows], most or self.most
        return recordings if most is None else evenly(recordings, most)


def _alpaca(model: str, rows: slice = slice(None), most: int | None = SOME) -> Replay:
    return Replay(CHAT, RecordingSet("alpaca_eval.jsonl.zst", model), rows, most)


def _task(place: int) -> Replay:
    return Replay(CHAT, SPEC_BENCH, slice(place * TASK_ROWS + 1, (place + 1) * TASK_ROWS, 2))


REPLAYS = {
    "AlpacaEval: Vicuna-7B-v1.5": _alpaca("vicuna-7b-v1.5", most=None),
    "AlpacaEval: Llama-2-7B-chat": _alpaca("llama-2-7b-chat-hf", slice(1, None, 2)),
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
    "MBPP: CodeLlama-34b-Instruct": Replay(
        CODE, RecordingSet("mbpp.jsonl.zst", "CodeLlama-34b-Instruct-hf"), slice(120, None), SOME
    ),
    "ShareGPT: ChatGPT": Replay(CHAT, RecordingSet("sharegpt.jsonl.zst"), slice(1, None, 5)),
}
"""None of the outputs was used to tune a constant. All are read with the stores' tokenizer."""
