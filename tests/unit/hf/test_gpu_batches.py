"""Several texts in one pass on a GPU, as graphs: each as alone. On a CPU the same runs without graphs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike

from draftstore.decoding.loop import Fixed, Tally
from draftstore.drafting.drafter import Drafter, Session
from draftstore.hf.batches import Batch
from draftstore.hf.members import Member
from draftstore.hf.texts import prepare_text
from tests.fakes.adversaries import Prophet
from tests.fakes.gpus import CUDA
from tests.fakes.hf_models import build

VOCAB = 64
NEW = 24


class Prophets:
    """A prophet for each text."""

    vocab_size, needs_hidden, needs_candidates = VOCAB, False, False

    def __init__(self, texts: Sequence[Sequence[int]], error_rate: float) -> None:
        self.texts, self.error_rate = texts, error_rate

    def session(self, prompt_ids: ArrayLike, **prefill: Any) -> Session:
        return Prophet(VOCAB, self.texts, error_rate=self.error_rate).session(prompt_ids, **prefill)


def options(prompt: torch.Tensor, tokens: int) -> dict[str, Any]:
    return {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": tokens,
        "do_sample": False,
        "pad_token_id": 0,
    }


def decode(
    model: Any, batch: Batch, drafter: Drafter | None, prompts: Sequence[torch.Tensor]
) -> tuple[list[list[int]], Tally]:
    """Decode all texts, as many at a time as the batch takes; return them and the totals of their passes."""
    planner, tally, begun = Fixed(16 if drafter else 0), Tally(), set[Member]()
    texts = [
        prepare_text(model, prompt, **options(prompt, NEW - place)) for place, prompt in enumerate(prompts)
    ]
    for text in texts:
        batch.join(Member(text, drafter, planner))
    while len(batch):
        for member, step, error in batch.step():
            assert step is not None, error
            if member in begun:
                tally.add(step)
            begun.add(member)
    return [text.text.ids for text in texts], tally


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_each_text_of_a_batch_is_that_of_plain_generate(device: str, dtype: torch.dtype) -> None:
    model = torch.nn.Module.to(build(vocab_size=VOCAB, dtype=dtype), device)
    plain: Any = model
    rng = np.random.default_rng(1)
    prompts = [torch.from_numpy(rng.integers(0, VOCAB, (1, 3 + 5 * place))).to(device) for place in range(5)]
    truth = [
        plain.generate(prompt, **options(prompt, NEW - place))[0].tolist()
        for place, prompt in enumerate(prompts)
    ]
    batch = Batch(model, most=3)
    found, tally = decode(model, batch, None, prompts)
    assert (found, tally.accepted_length) == (truth, 1.0)
    found, tally = decode(model, batch, Prophets([[*text, 0, 0, 0, 0] for text in truth], 0.3), prompts)
    assert found == truth
    assert tally.accepted_length > 1.5
    assert bool(batch._runner._captured) == (device == "cuda"), "graphs, where there is a GPU"
