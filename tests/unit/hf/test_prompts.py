"""The model's candidates at prompt positions, however the prompts are read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from draftstore.decoding.budget import Fixed
from draftstore.drafting.drafter import Drafter
from draftstore.hf import generate
from draftstore.hf.batches import Batch
from draftstore.hf.members import prepare_text
from draftstore.hf.passes import gathering
from draftstore.recycling import prompts
from draftstore.recycling.prompts import PromptCandidates
from tests.fakes.adversaries import Adversary, Silent
from tests.fakes.hf_models import tiny

VOCAB = 24
OPTIONS: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
Row = list[int]


def model_of(architecture: str = "llama") -> Any:
    return tiny(architecture, vocab_size=VOCAB)


def expected(prompt: Sequence[int], architecture: str = "llama") -> list[Row]:
    """Ask a model for everything at once, and keep what nothing later overwrites."""
    with torch.no_grad():
        logits = model_of(architecture)(torch.tensor([prompt])).logits[0]
    rows = logits.topk(8, -1).indices.tolist()
    last = len(prompt) - 1
    return [
        row if place == last or token not in prompt[place + 1 :] else [-1] * 8
        for place, (token, row) in enumerate(zip(prompt, rows, strict=True))
    ]


class Listening(Silent):
    """Keeps the candidates that its sessions start with."""

    needs_candidates = True

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.given: list[tuple[NDArray[np.int32], NDArray[np.int32]]] = []

    def session(self, prompt_ids: ArrayLike, **prefill: Any) -> Adversary:
        self.given.append((np.asarray(prompt_ids), prefill["candidates"]))
        return super().session(prompt_ids)


def ask(
    prompts: Sequence[Sequence[int]], drafter: Drafter, architecture: str = "llama", **options: Any
) -> None:
    generate(model_of(architecture), torch.tensor(prompts), drafter=drafter, **(OPTIONS | options))


some_prompts = st.lists(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=14), min_size=1, max_size=4)


@given(
    some_prompts,
    st.sampled_from(["llama", "gpt2"]),
    st.sampled_from([1, 3, 512]),
    st.sampled_from([24, 72, 2**23]),
)
def test_each_row_has_the_logits_after_its_token(
    texts: list[Row], architecture: str, chunk: int, logits: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "SLICE", logits)
        for prompt in texts:
            drafter = Listening()
            ask([prompt], drafter, architecture)
            ((ids, rows),) = drafter.given
            assert ids[:-1].tolist() == prompt
            assert rows.tolist() == expected(prompt, architecture)
        batch = Batch(model_of(architecture), chunk=chunk)
        drafters = [Listening() for _ in texts]
        for prompt, drafter in zip(texts, drafters, strict=True):
            member = prepare_text(model_of(architecture), torch.tensor([prompt]), **OPTIONS)
            batch.join(member.draft(drafter, Fixed(4)))
        while len(batch):
            assert not any(isinstance(result, Exception) for _, result in batch.step())
        for prompt, drafter in zip(texts, drafters, strict=True):
            assert [rows.tolist() for _, rows in drafter.given] == [expected(prompt, architecture)]


def test_padding_is_removed_from_prompts() -> None:
    prompt, other = [3, 5, 3, 9], [1, 2, 3, 4, 5, 6]
    drafter = Listening()
    ask([[5, 0, *prompt]], drafter, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1]]))
    ask([[0, 0, *prompt], other], drafter, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]))
    assert [ids[:-1].tolist() for ids, _ in drafter.given] == [prompt, prompt, other]
    assert [rows.tolist() for _, rows in drafter.given] == [expected(ids) for ids in (prompt, prompt, other)]


def test_a_head_over_other_rows_gives_only_the_last_candidates() -> None:
    model, gathered = model_of(), PromptCandidates(np.arange(5), VOCAB)
    last = np.arange(8, dtype=np.int32)[None]
    with torch.no_grad(), gathering(gathered, model):
        model(torch.arange(5)[None], logits_to_keep=1)
    assert gathered.rows(last).tolist() == last.tolist()
