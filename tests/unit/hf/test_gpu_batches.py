"""Several texts in one pass on a GPU, as graphs: each as alone. On a CPU the same runs at toy size, without graphs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike

from benchmarks.batch_runs import Request, forced_requests, run_plain, run_together
from benchmarks.decode_runs import LOOP, Way
from draftstore.decoding.loop import Fixed
from draftstore.decoding.replay import Recording
from draftstore.drafting.drafter import Session
from draftstore.hf.batches import Batch
from tests.fakes.adversaries import Prophet
from tests.fakes.gpus import CUDA
from tests.fakes.hf_models import build

VOCAB = 64
NEW = 24


class Prophets:
    """A prophet for each text."""

    vocab_size, needs_hidden, needs_candidates = VOCAB, False, False

    def __init__(self, texts: Sequence[Sequence[int]], error_rate: float = 0.0) -> None:
        self.texts, self.error_rate = texts, error_rate

    def session(self, prompt_ids: ArrayLike, **prefill: Any) -> Session:
        return Prophet(VOCAB, self.texts, error_rate=self.error_rate).session(prompt_ids, **prefill)


def moved(dtype: torch.dtype, device: str) -> Any:
    model: Any = build(vocab_size=VOCAB, dtype=dtype)
    return torch.nn.Module.to(model, device)


def requests(count: int, tokens: int = NEW) -> list[Request]:
    rng = np.random.default_rng(1)
    return [
        Request(rng.integers(0, VOCAB, 3 + 5 * place).astype(np.int32), tokens - place)
        for place in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_each_text_of_a_batch_is_that_of_plain_generate(device: str, dtype: torch.dtype) -> None:
    model, asked = moved(dtype, device), requests(5)
    truth = run_plain(model, asked, 1, "dynamic").outputs
    texts = [
        [*request.prompt.tolist(), *output, *[0] * 4] for request, output in zip(asked, truth, strict=True)
    ]
    batch = Batch(model, most=3)
    for drafter in (None, lambda: Prophets(texts, 0.3)):
        found = run_together(model, batch, Way("way", drafter, Fixed(16)), asked)
        assert found.outputs == truth
        assert found.tally.accepted_length == 1.0 or drafter
    assert found.tally.accepted_length > 1.5
    assert found.figures()["tokens"] == sum(map(len, truth))
    assert bool(batch._runner._captured) == (device == "cuda"), "graphs, where there is a GPU"


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_forced_texts_of_a_batch_are_those_recorded(device: str) -> None:
    model = moved(torch.float32, device)
    rng = np.random.default_rng(2)
    recordings = [
        Recording(str(place), rng.integers(0, VOCAB, 9, np.int32), rng.integers(0, VOCAB, NEW, np.int32))
        for place in range(3)
    ]
    asked = forced_requests(recordings, 4, NEW - 4, 6)
    assert [len(request.prompt) for request in asked] == [6, 6, 6, 6], "none is short, so all are cut"
    texts = [[*each.prompt.tolist(), *each.output.tolist(), 0] for each in asked if each.output is not None]
    batch = Batch(model, most=2)
    for way in (Way(LOOP), Way("prophet", lambda: Prophets(texts), Fixed(8))):
        found = run_together(model, batch, way, asked)
        assert [len(output) for output in found.outputs] == [NEW - 4] * 4
    assert found.passes < 2 * (NEW - 4), "two at a time, and several tokens a pass"
