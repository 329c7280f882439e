"""The calls that an engine makes of a drafter, over replayed texts: a program of its own, for any checkout.

Reads cells from stdin, one JSON document per line, and writes their figures to stdout likewise. Texts run side by side
in the rows of a batch, as in vLLM and SGLang; one that ends is replaced by the next.
"""

import json
import os
import sys
from array import array
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from itertools import count, cycle
from statistics import median
from time import perf_counter_ns, process_time_ns
from types import SimpleNamespace
from typing import Any

import numpy as np

WARM_UP, ROOM = 20, 8192
"""Steps before the first that is timed; maximum tokens of a text."""


class Text:
    """A recorded output during replay, with the attributes of a request of SGLang."""

    def __init__(self, rid: int, prompt: Any, output: Any) -> None:
        """Start with the token of the prefill."""
        self.rid, self.new = str(rid), 1
        self.origin_input_ids_unpadded, self.output_ids = array("q", prompt.tolist()), array("q", [output[0]])
        self.sampling_params = SimpleNamespace(custom_params=None)
        self.coming: list[int] = output.tolist()[1:]

    def extend(self, accepted: int) -> int:
        """Append the accepted draft tokens and one more; return their number."""
        new, self.coming = self.coming[: accepted + 1], self.coming[accepted + 1 :]
        self.output_ids.extend(new)
        self.new = len(new)
        return self.new


class VllmSeam:
    """Calls a drafter as vLLM's runner does."""

    def __init__(self, propose: Any, close: Any, batch: int) -> None:
        """Call `propose`; `close` ends it."""
        self._propose, self.close = propose, close
        self._ids, self._sizes = np.zeros((batch, ROOM), np.int32), np.zeros(batch, np.int32)

    def prepare(self, texts: Sequence[Text]) -> Any:
        """Return the call of a step."""
        for row, text in enumerate(texts):
            size, new = len(text.origin_input_ids_unpadded) + len(text.output_ids), text.new
            first = 0 if len(text.output_ids) == 1 else size - new
            whole = (
                [*text.origin_input_ids_unpadded, *text.output_ids] if first == 0 else text.output_ids[-new:]
            )
            self._ids[row, first:size], self._sizes[row] = whole, size
        return partial(
            self._propose, [text.output_ids[-text.new :].tolist() for text in texts], self._sizes, self._ids
        )

    def accepted(self, chains: Any, row: int, coming: Sequence[int]) -> int:
        """Return the number of draft tokens of a row that are accepted."""
        same = [token == other for token, other in zip(chains[row], coming, strict=False)]
        return len(same) if all(same) else same.index(False)


class SglangSeam:
    """Calls a drafter as SGLang's worker does."""

    def __init__(self, drafts: Any, close: Any, rows: int) -> None:
        """Call `drafts` for trees of so many rows; `close` ends them."""
        self._drafts, self.close, self._rows = drafts, close, rows

    def prepare(self, texts: Sequence[Text]) -> Any:
        """Return the call of a step."""
        return partial(self._drafts.draft, texts, [[]] * len(texts))

    def accepted(self, arrays: Any, row: int, coming: Sequence[int]) -> int:
        """Return the number of draft tokens of a text that are accepted."""
        tokens = arrays[0].reshape(-1, self._rows)[row]
        mask = arrays[1].reshape(-1, self._rows, self._rows)[row]
        depths, place = mask.sum(axis=1), 0
        for token in coming:
            found = np.flatnonzero(mask[:, place] & (depths == depths[place] + 1) & (tokens == token))
            if not len(found):
                break
            place = int(found[0])
        return int(depths[place]) - 1


class Suffixes:
    """The suffix cache of arctic-inference with vLLM's defaults; its trees hold these texts, and those that ended."""

    def __init__(self, nodes: int) -> None:
        """Start without texts."""
        self._cache = import_module("arctic_inference.suffix_decoding").SuffixDecodingCache()
        self._nodes, self._numbers, self._there = nodes, count(), dict[int, tuple[int, int]]()

    def propose(self, sampled: Any, sizes: Any, ids: Any) -> list[list[int]]:
        """Return a chain for each row."""
        chains = []
        for row, (new, size) in enumerate(zip(sampled, sizes.tolist(), strict=True)):
            name, known = self._there.get(row, (-1, -1))
            if known != size - len(new):
                if name >= 0:
                    self._cache.stop_request(name)
                name = next(self._numbers)
                self._cache.start_request(name, ids[row, : size - len(new)])
            self._there[row] = name, size
            self._cache.add_active_response(name, np.array(new, np.int32))
            draft = self._cache.speculate(
                name, ids[row, max(0, size - 24) : size], max_spec_tokens=self._nodes, max_spec_factor=1.0,
                min_token_prob=0.1,
            )  # fmt: skip
            chains.append(list(draft.token_ids))
        return chains


def open_seam(cell: dict[str, Any]) -> Any:
    """Open the drafter of a cell."""
    batch, nodes, vocab_size = cell["batch"], cell["nodes"], cell["vocab_size"]
    engine = SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=8, method="custom_class", prompt_lookup_min=2, prompt_lookup_max=5
        ),
        model_config=SimpleNamespace(
            max_model_len=ROOM, tokenizer=cell["tokenizer"], get_vocab_size=lambda: vocab_size
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=max(batch, 1024)),
        parallel_config=SimpleNamespace(
            rank=0, tensor_parallel_size=1, prefill_context_parallel_size=1, data_parallel_index=0
        ),
    )
    if cell["drafter"] == "vLLM n-gram":
        ngram = import_module("vllm.v1.spec_decode.ngram_proposer").NgramProposer(engine)
        return VllmSeam(partial(ngram.propose, 8), lambda: None, batch)
    if cell["drafter"] == "arctic":
        return VllmSeam(Suffixes(8).propose, lambda: None, batch)
    os.environ |= cell["settings"]
    if cell["engine"] == "vllm":
        drafter = import_module("draftstore.engines.vllm").Drafter(engine)
        return VllmSeam(drafter.propose, drafter.proposer.close, batch)
    config = import_module("draftstore.engines.config")
    settings = config.EngineConfig.read()
    proposer = import_module("draftstore.engines.proposer").Proposer(
        settings,
        engine="sglang",
        vocab_size=vocab_size,
        tokenizer=config.tokenizer_identity(settings, cell["tokenizer"]),
    )
    drafts = import_module("draftstore.engines.sglang").BatchDrafts(proposer, nodes + 1)
    return SglangSeam(drafts, proposer.close, nodes + 1)


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Return the medians of a step's time in microseconds, and tokens per pass."""
    found = np.load(cell["texts"])
    parts = np.split(found["ids"], found["ends"][:-1])
    waiting = cycle([*zip(parts[::2], parts[1::2], strict=True)])
    seam, spent, took, tokens = open_seam(cell), list[float](), list[float](), 0
    texts = [Text(number, *next(waiting)) for number in range(cell["batch"])]
    for step in range(WARM_UP + cell["steps"]):
        call = seam.prepare(texts)
        begin, start = process_time_ns(), perf_counter_ns()
        drafts = call()
        took.append((perf_counter_ns() - start) / 1000)
        spent.append((process_time_ns() - begin) / 1000)
        for row, text in enumerate(texts):
            tokens += text.extend(seam.accepted(drafts, row, text.coming))
            if not text.coming:
                texts[row] = Text(cell["batch"] * (step + 1) + row, *next(waiting))
    seam.close()
    passes = cell["batch"] * (WARM_UP + cell["steps"])
    return {
        "processor_us": round(median(spent[WARM_UP:]), 1),
        "elapsed_us": round(median(took[WARM_UP:]), 1),
        "tokens_per_pass": round(tokens / passes, 4),
    }


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    environment = dict(os.environ)
    for line in sys.stdin:
        os.environ.clear()
        os.environ |= environment
        try:
            figures = measure(json.loads(line))
        except ImportError as error:
            figures = {"missing": str(error)}
        print(json.dumps(figures), file=answers, flush=True)
