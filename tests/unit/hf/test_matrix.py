"""No draft changes a text: one matrix of models with their attention, drafters, texts together, and shapes of passes.

The reference is plain `generate`, for each prompt alone. Models are random and in float64: a corrupted cache cannot
give their texts by chance, and a pass over many rows computes what passes over single rows do.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftstore.decoding.budget import CostPlanner, Fixed, Planner
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.hf import generate
from draftstore.hf.batches import Batch
from draftstore.hf.members import prepare_text
from draftstore.hf.planning import TYPICAL
from draftstore.recycling.drafter import RecyclingDrafter
from tests.fakes.adversaries import (
    Adversary,
    AlwaysWrong,
    EosInside,
    OverBudget,
    Prophet,
    RandomTrees,
    Silent,
)
from tests.fakes.hf_models import shapes_of_graphs, tiny

VOCAB, NEW, EOS, TEXTS = 48, 14, 7, 24
SETTINGS: dict[bool, dict[str, Any]] = {
    False: {"do_sample": False},
    True: {"do_sample": True, "temperature": 1.3, "top_k": 30, "top_p": 0.95, "repetition_penalty": 1.1},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen2": {"attention": "eager"},
    "mistral": {"sliding_window": 9},
    "llama4_text": {"attention_chunk_size": 9, "num_local_experts": 2, "num_experts_per_tok": 1},
    "gpt2": {},
}


class Known(NamedTuple):
    """A text of plain generate.

    Attributes:
        prompt: its ids.
        sampled: whether it is sampled, else greedy.
        seed: seed of its random numbers.
        text: prompt and output.
        state: what the random numbers are left in.
    """

    prompt: tuple[int, ...]
    sampled: bool
    seed: int
    text: tuple[int, ...]
    state: torch.Tensor

    @property
    def options(self) -> dict[str, Any]:
        options = {"max_new_tokens": NEW, "eos_token_id": EOS, "pad_token_id": 0} | SETTINGS[self.sampled]
        # With the penalty, tokens are drawn node by node.
        return options | {"repetition_penalty": 1.0} if len(self.prompt) % 2 else options


def model_of(name: str) -> Any:
    return tiny(name, vocab_size=VOCAB, **MODELS[name])


@functools.cache
def known(name: str) -> list[Known]:
    """Return texts of a model, long and short, every other one sampled; some end early."""
    draw, found = np.random.default_rng(3), []
    for place in range(TEXTS):
        prompt = tuple(draw.integers(8, VOCAB, int(draw.integers(1, 24))).tolist())
        text = Known(prompt, place % 2 == 0, place, (), torch.empty(0))
        torch.manual_seed(place)
        output = model_of(name).generate(torch.tensor([prompt]), **text.options)
        found.append(text._replace(text=tuple(output[0].tolist()), state=torch.get_rng_state()))
    return found


RECYCLING = RecyclingDrafter(VOCAB)
MIXTURE = Mixture([RequestDrafter(VOCAB), RECYCLING])
"""Both are shared by all texts."""
GO_ON = tuple(range(8, 16))
"""What drafters believe to follow a text."""
DRAFTERS: dict[str, Callable[[Known], Drafter | None]] = {
    "none": lambda text: None,
    "silent": lambda text: Silent(VOCAB),
    "random": lambda text: RandomTrees(VOCAB, len(text.prompt)),
    "over budget": lambda text: OverBudget(VOCAB),
    "always wrong": lambda text: AlwaysWrong(VOCAB, [text.text + GO_ON]),
    "eos inside": lambda text: EosInside(VOCAB, [text.text + GO_ON], EOS),
    "half a prophet": lambda text: Prophet(VOCAB, [text.text + GO_ON], error_rate=0.5),
    "prophet": lambda text: Prophet(VOCAB, [text.text + GO_ON]),
    "far prophet": lambda text: Prophet(VOCAB, [text.text + GO_ON], depth=12),
    "request": lambda text: RequestDrafter(VOCAB),
    "recycling": lambda text: RECYCLING,
    "mixture": lambda text: MIXTURE,
}


class Guest(NamedTuple):
    """A text in a batch.

    Attributes:
        text: number of the text.
        drafter: name of its drafter.
        planned: whether a cost curve decides what is verified.
        comes: step before which it joins.
        goes: step before which it leaves, wherever it is.
    """

    text: int
    drafter: str
    planned: bool
    comes: int = 0
    goes: int = 1_000_000

    @property
    def planner(self) -> Planner:
        return CostPlanner(TYPICAL["cpu"], 16) if self.planned else Fixed(12)


def decode_together(name: str, guests: Sequence[Guest], most: int, chunk: int, ahead: bool) -> int:
    """Decode texts that join and leave, and check each; return how many passes moved rows in the cache."""
    batch = Batch(model_of(name), most=most, chunk=chunk, ahead=ahead)
    texts = [known(name)[guest.text] for guest in guests]
    drafters = [DRAFTERS[guest.drafter](text) for guest, text in zip(guests, texts, strict=True)]
    members = []
    for guest, text, drafter in zip(guests, texts, drafters, strict=True):
        random = torch.Generator().manual_seed(text.seed)
        member = prepare_text(model_of(name), torch.tensor([text.prompt]), random=random, **text.options)
        members.append(member.draft(drafter, guest.planner))
    for step in itertools.count():
        for guest, member in zip(guests, members, strict=True):
            if guest.comes == step:
                batch.join(member)
            if guest.goes == step:
                batch.leave(member)
        if step > max(guest.comes for guest in guests) and not len(batch):
            break
        assert not any(isinstance(result, Exception) for _, result in batch.step())
    batch.close()
    for guest, text, member in zip(guests, texts, members, strict=True):
        found = tuple(member.text.ids.tolist())
        assert found == (text.text if guest.goes > 1_000 else text.text[: len(found)])
    return sum(drafter.moved for drafter in drafters if isinstance(drafter, Adversary))


def decode_alone(name: str, guests: Sequence[Guest]) -> int:
    """Do the same for one text after the other, by `generate`: it draws as many random numbers as plain sampling."""
    moved = 0
    for guest in guests:
        text = known(name)[guest.text]
        drafter = DRAFTERS[guest.drafter](text)
        torch.manual_seed(text.seed)
        prompt = torch.tensor([text.prompt])
        output: Any = generate(model_of(name), prompt, drafter=drafter, planner=guest.planner, **text.options)
        assert tuple(output[0].tolist()) == text.text
        assert torch.equal(torch.get_rng_state(), text.state)
        moved += drafter.moved if isinstance(drafter, Adversary) else 0
    return moved


CELLS = [
    (name, most, (place + turn) % 2 == 0)
    for place, name in enumerate(MODELS)
    for turn, most in enumerate((1, 3, 8))
]
"""Every model meets every number of texts, and both meet passes in their own shapes and in those of graphs."""


@pytest.mark.parametrize(("name", "most", "graphs"), CELLS)
def test_no_draft_changes_a_text(name: str, most: int, graphs: bool) -> None:
    """Every drafter has a greedy text and a sampled one in every cell."""
    draw = np.random.default_rng([len(name), most])
    drafters = [*DRAFTERS, *list(DRAFTERS)[1:], "none"]
    guests = [Guest(place, drafters[place], bool(draw.random() < 0.3)) for place in range(TEXTS)]
    with shapes_of_graphs() if graphs else nullcontext():
        if most == 1:
            assert decode_alone(name, guests) > 10
        else:
            comes = draw.integers(0, 12, TEXTS).tolist()
            guests = [guest._replace(comes=come) for guest, come in zip(guests, comes, strict=True)]
            assert decode_together(name, guests, most, 5 if most == 3 else 512, ahead=not graphs) > 10


def test_texts_of_the_matrix_are_of_different_lengths() -> None:
    lengths = [len(text.text) - len(text.prompt) for name in MODELS for text in known(name)]
    assert min(lengths) < NEW / 2
    assert sorted(lengths)[len(lengths) // 2] == max(lengths) == NEW


guests_of_batches = st.builds(
    Guest,
    st.integers(0, TEXTS - 1),
    st.sampled_from(sorted(DRAFTERS)),
    st.booleans(),
    st.sampled_from([0, 0, 0, 1, 3, 6]),
    st.sampled_from([2, 4, 8, *[1_000_000] * 9]),
)


@given(
    st.sampled_from(["llama", "mistral"]),
    st.integers(1, 8).flatmap(lambda size: st.lists(guests_of_batches, min_size=size, max_size=size)),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([5, 512]),
    st.booleans(),
)
def test_texts_may_join_and_leave_at_any_step(
    name: str, guests: list[Guest], most: int, chunk: int, ahead: bool
) -> None:
    decode_together(name, guests, most, chunk, ahead)
