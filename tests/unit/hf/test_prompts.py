"""The model's candidates at the positions of prompts, however these are read."""

from collections.abc import Sequence
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from draftstore.decoding.planners import Fixed
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.hf import generate
from draftstore.hf.batches import Batch
from draftstore.hf.generation import prepare_text
from draftstore.hf.passes import gathering
from draftstore.recycling import prompts
from draftstore.recycling.drafter import RecyclingDrafter
from draftstore.recycling.prompts import PromptCandidates
from tests.fakes.adversaries import Adversary, Silent
from tests.fakes.hf_models import tiny

VOCAB = 24
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


def ask(prompt: Sequence[int], drafter: Drafter, architecture: str = "llama", **options: Any) -> Any:
    ids = torch.tensor([prompt])
    return generate(
        model_of(architecture),
        ids,
        drafter=drafter,
        max_new_tokens=2,
        do_sample=False,
        pad_token_id=0,
        **options,
    )


some_prompts = st.lists(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=14), min_size=1, max_size=4)


@given(
    some_prompts,
    st.sampled_from(["llama", "gpt2"]),
    st.sampled_from([1, 3, 512]),
    st.sampled_from([24, 72, 2**23]),
)
def test_each_row_is_what_the_model_says_after_its_token(
    texts: list[Row], architecture: str, chunk: int, logits: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "SLICE", logits)
        for prompt in texts:
            drafter = Listening()
            ask(prompt, drafter, architecture)
            ((ids, rows),) = drafter.given
            assert ids[:-1].tolist() == prompt
            assert rows.tolist() == expected(prompt, architecture)
        batch = Batch(model_of(architecture), chunk=chunk)
        drafters = [Listening() for _ in texts]
        for prompt, drafter in zip(texts, drafters, strict=True):
            options: Any = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
            member = prepare_text(model_of(architecture), torch.tensor([prompt]), **options)
            batch.join(member.draft(drafter, Fixed(4)))
        while len(batch):
            assert all(outcome.error is None for outcome in batch.step())
        for prompt, drafter in zip(texts, drafters, strict=True):
            assert [rows.tolist() for _, rows in drafter.given] == [expected(prompt, architecture)]


def test_few_logits_are_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "SLICE", 2 * VOCAB + 1)
    model, sizes = model_of(), []
    prompt = [*range(1, 12), 3, 5]
    hook = model.lm_head.register_forward_hook(lambda _head, _inputs, logits: sizes.append(logits.shape[1]))
    gathered = PromptCandidates(np.array(prompt), VOCAB)
    with torch.no_grad(), gathering(gathered, model):
        model(torch.tensor([prompt]))
    hook.remove()
    assert sizes == [2, 2, 2, 2, 2, 1], "ten of eleven tokens in slices of two, then the last position"
    assert gathered.rows(np.array([expected(prompt)[-1]], np.int32)).tolist() == expected(prompt)


def test_padding_is_no_part_of_a_prompt() -> None:
    prompt = [3, 5, 3, 9]
    drafter = Listening()
    ids = torch.tensor([[5, 0, *prompt]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    generate(
        model_of(),
        ids,
        attention_mask=mask,
        drafter=drafter,
        max_new_tokens=2,
        do_sample=False,
        pad_token_id=0,
    )
    texts = torch.tensor([[0, 0, *prompt], [1, 2, 3, 4, 5, 6]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    generate(
        model_of(),
        texts,
        attention_mask=mask,
        drafter=drafter,
        max_new_tokens=2,
        do_sample=False,
        pad_token_id=0,
    )
    assert [ids[:-1].tolist() for ids, _ in drafter.given] == [prompt, prompt, [1, 2, 3, 4, 5, 6]]
    assert drafter.given[0][1].tolist() == drafter.given[1][1].tolist() == expected(prompt)
    assert drafter.given[2][1].tolist() == expected([1, 2, 3, 4, 5, 6])


def test_who_needs_no_candidates_costs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the head was asked")

    monkeypatch.setattr(PromptCandidates, "_take", refuse)
    ask([3, 5, 3, 9], RequestDrafter(VOCAB))
    ask([3, 5, 3, 9], Mixture([RequestDrafter(VOCAB), Silent(VOCAB)]))
    with pytest.raises(AssertionError, match="the head was asked"):
        ask([3, 5, 3, 9], Mixture([RequestDrafter(VOCAB), RecyclingDrafter(VOCAB)]))


def test_the_first_token_comes_from_the_same_logits() -> None:
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
    for architecture in ("llama", "qwen3"):
        plain, gathered = (
            ask([3, 5, 3, 9], drafter, architecture, **options) for drafter in (Silent(VOCAB), Listening())
        )
        assert torch.equal(plain.logits[0], gathered.logits[0])
        assert plain.sequences.tolist() == gathered.sequences.tolist()


def test_a_head_that_meets_other_rows_tells_of_the_last_token() -> None:
    model, gathered = model_of(), PromptCandidates(np.arange(5), VOCAB)
    last = np.arange(8, dtype=np.int32)[None]
    with torch.no_grad(), gathering(gathered, model):
        model(torch.arange(5)[None], logits_to_keep=1)
    assert gathered.rows(last).tolist() == last.tolist()


def test_other_threads_may_use_the_model_meanwhile() -> None:
    model, gathered = model_of(), PromptCandidates(np.arange(4), VOCAB)
    ids, found = torch.arange(4)[None], []

    def use() -> None:
        with torch.no_grad():
            found.append(model(ids).logits)

    with torch.no_grad(), gathering(gathered, model):
        thread = Thread(target=use)
        thread.start()
        thread.join()
        logits = model(ids).logits
    assert found[0].shape == (1, 4, VOCAB)
    assert logits.shape == (1, 1, VOCAB)
    last = np.array([expected([0, 1, 2, 3])[-1]], np.int32)
    assert gathered.rows(last).tolist() == expected([0, 1, 2, 3])


def test_an_exception_leaves_the_model_as_it_was() -> None:
    model, gathered = model_of(), PromptCandidates(np.arange(4), VOCAB)
    with pytest.raises(ZeroDivisionError), gathering(gathered, model):
        raise ZeroDivisionError
    with torch.no_grad():
        assert model(torch.arange(4)[None]).logits.shape == (1, 4, VOCAB)


def test_token_recycling_knows_every_token_of_a_prompt() -> None:
    found: list[NDArray[np.int32]] = []

    class Drafting(RecyclingDrafter):
        def session(self, prompt_ids: ArrayLike, **prefill: Any) -> Any:
            session = super().session(prompt_ids, **prefill)
            found.append(self.matrix.copy())
            return session

    prompt = [3, 5, 3, 9, 11]
    ask(prompt, Mixture([Drafting(VOCAB), RequestDrafter(VOCAB)]))
    wanted = np.full((VOCAB, 8), -1, np.int32)
    wanted[prompt] = expected(prompt)
    assert np.array_equal(found[0], wanted)
