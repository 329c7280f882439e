"""Prompts: read in chunks, beside others, or at once, they leave the same; long ones take no mask of all rows."""

import functools
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftstore.hf import attention
from draftstore.hf.attention import FULL, SLIDING
from draftstore.hf.passes import Wants
from draftstore.hf.runner import new_runner
from tests.fakes.hf_models import build, tiny

VOCAB = 48
MODELS: dict[str, tuple[dict[str, Any], float]] = {
    "gpt2": ({}, 1e-12),
    "llama": ({}, 1e-5),  # its norms are computed in float32
    "qwen3": ({"attention": "eager"}, 1e-5),
    "mistral": ({"sliding_window": 9}, 1e-5),
    "gemma3_text": ({"sliding_window": 9, "layer_types": [SLIDING, FULL]}, 1e-5),
}
model_of = functools.cache(lambda name: build(name, vocab_size=VOCAB, **MODELS[name][0]))


@given(
    st.sampled_from(list(MODELS)),
    st.integers(1, 40),
    st.lists(st.integers(1, 39), max_size=3),
    st.integers(1, 40),
    st.sampled_from([1, 6, attention.BLOCK]),
)
def test_a_prompt_is_read_the_same_however_it_is_cut(
    name: str, length: int, cuts: list[int], beside: int, block: int
) -> None:
    model, tolerance = model_of(name), MODELS[name][1]
    ids, other = np.random.default_rng(length).integers(1, VOCAB, 80).reshape(2, 40)
    runner, wants = new_runner(model, 3), Wants(best=False)
    runner.pool.resize(64, 0, 0)
    bounds = [0, *sorted({cut for cut in cuts if cut < length}), length]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(attention, "BLOCK", block)
        for begin, end in pairwise(bounds):
            (chunks,) = runner.read(2, [ids[begin:end]], begin, wants)
        _, together = runner.read(0, [other[:beside], ids[:length]], 0, wants)
        plain = model(torch.from_numpy(ids[None, :length])).logits[0, -1:]
    for found in (chunks, together):
        torch.testing.assert_close(found.logits(0), plain, rtol=tolerance, atol=tolerance)
    for states in runner.pool._states:
        held = states[:, :, :, :length]
        torch.testing.assert_close(held[:, 2], held[:, 1], rtol=tolerance, atol=tolerance)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest number of elements of a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize(
    ("name", "changes", "masked"),
    [("llama", {}, False), ("gpt2", {}, False), ("mistral", {"sliding_window": 900}, True)],
)
def test_a_long_prompt_takes_no_mask_of_all_rows(
    name: str, changes: dict[str, Any], masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "BLOCK", 64)
    model = tiny(name, vocab_size=VOCAB, max_position_embeddings=1024, **changes)
    runner, ids = new_runner(model, 1), np.random.default_rng(0).integers(VOCAB, size=1024)
    runner.pool.resize(1024, 0, 0)
    for past, dense in ((0, False), (512, masked)):
        with Largest() as seen:
            runner.read(0, [ids[past : past + 512]], past, Wants())
        assert (seen.elements >= 512 * (past + 512)) == dense
