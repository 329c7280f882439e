"""The interfaces between engines and their drafters, emulated for replayed texts."""

import os
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality.ngram import parents_of
from draftstore.decoding.replay import Recording
from draftstore.engines.config import EngineConfig
from draftstore.engines.proposer import Proposer
from draftstore.engines.sglang import BatchDrafts
from draftstore.engines.vllm import Drafter
from draftstore.text.tokenizer import TextTokenizer

BATCH, LONGEST = 32, 8192
DEADLINE = 0.1
"""Seconds that a step waits for the service: long enough to miss no answer."""
Drafts = list[tuple[Sequence[int], Sequence[int]]]
"""The drafted tokens of each text and their parents; -1 is the text's last token."""
Places = dict[str, dict[str, Any]]
"""Fields of `Sources` by the name of a way."""


class Running:
    """A recorded output during replay, with the attributes of an SGLang request."""

    def __init__(self, rid: str, recording: Recording) -> None:
        """Start with the token of the prefill."""
        self.rid = rid
        self.origin_input_ids_unpadded = array("q", recording.prompt.tolist())
        self.output_ids = array("q", recording.output[:1].tolist())
        self.sampling_params = SimpleNamespace(custom_params=None)
        self.new = 1
        self._output: list[int] = recording.output.tolist()

    @property
    def left(self) -> list[int]:
        """The remaining tokens."""
        return self._output[len(self.output_ids) :]

    def verify(self, tokens: Sequence[int], parents: Sequence[int]) -> int:
        """Append the accepted draft tokens and one more; return their number."""
        coming, above, count = self.left, -1, 0
        for token in coming:
            found = [at for at, parent in enumerate(parents) if parent == above and tokens[at] == token]
            if not found:
                break
            above, count = found[0], count + 1
        new = coming[: count + 1]
        self.output_ids.extend(new)
        self.new = len(new)
        return self.new


class Way(NamedTuple):
    """A way of drafting: `draft` returns the drafts of a step and the microseconds that they took."""

    draft: Callable[[Sequence[Running]], tuple[Drafts, float]]
    close: Callable[[], None]


def sglang_ways(places: Places, tokenizer: TextTokenizer, nodes: int) -> dict[str, Way]:
    """Return the ways of drafting at SGLang's interface."""
    ways = {}
    for name, fields in places.items():
        config = EngineConfig(**fields, budget=nodes)
        proposer = Proposer(
            config, engine="sglang", vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.identity
        )
        ways[name] = Way(_masked(BatchDrafts(proposer, nodes + 1), nodes + 1), proposer.close)
    return ways


def _masked(drafter: Any, rows: int) -> Callable[[Sequence[Running]], tuple[Drafts, float]]:
    """Return a function that calls a drafter as SGLang's worker does, and reads tokens and mask."""

    def draft(running: Sequence[Running]) -> tuple[Drafts, float]:
        begin = perf_counter_ns()
        tokens, mask = drafter.draft(running, [[]] * len(running))
        took = (perf_counter_ns() - begin) / 1000
        above = parents_of(mask.reshape(-1, rows, rows).astype(bool))
        pairs = zip(tokens.reshape(-1, rows), above, strict=True)
        return [(row[1:].tolist(), (parents[1:] - 1).tolist()) for row, parents in pairs], took

    return draft


def vllm_ways(places: Places, folder: Path, vocab_size: int, chain: int) -> dict[str, Way]:
    """Return the ways of drafting at vLLM's interface."""
    ways = {}
    for name, fields in places.items():
        values = {key: str(int(value) if value is True else value) for key, value in fields.items()}
        values |= {key: str(paths[0]) for key, paths in fields.items() if key == "stores"}
        with patch.dict(os.environ, {f"DRAFTSTORE_{key.upper()}": value for key, value in values.items()}):
            drafter = Drafter(_vllm_config(folder, vocab_size, chain))
        assert drafter.proposer is not None
        ways[name] = Way(_chained(drafter.propose), drafter.proposer.close)
    return ways


def _chained(propose: Callable[..., list[list[int]]]) -> Callable[[Sequence[Running]], tuple[Drafts, float]]:
    """Return a function that calls a drafter as vLLM's runner does, and reads its chains."""
    ids, sizes = np.zeros((BATCH, LONGEST), np.int32), np.zeros(BATCH, np.int32)

    def draft(running: Sequence[Running]) -> tuple[Drafts, float]:
        sampled = []
        for row, each in enumerate(running):
            text: NDArray[np.int64] = np.concatenate([each.origin_input_ids_unpadded, each.output_ids])
            ids[row, : len(text)], sizes[row] = text, len(text)
            sampled.append(each.output_ids[-each.new :].tolist())
        begin = perf_counter_ns()
        chains = propose(sampled, sizes, ids)
        took = (perf_counter_ns() - begin) / 1000
        return [(chain, range(-1, len(chain) - 1)) for chain in chains], took

    return draft


def _vllm_config(tokenizer: Path, vocab_size: int, chain: int) -> Any:
    """Return the parts of an engine's configuration that a drafter reads."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=chain, method="custom_class"),
        model_config=SimpleNamespace(
            max_model_len=LONGEST, tokenizer=str(tokenizer), get_vocab_size=lambda: vocab_size
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=BATCH),
        parallel_config=SimpleNamespace(
            rank=0, tensor_parallel_size=1, prefill_context_parallel_size=1, data_parallel_index=0
        ),
    )
