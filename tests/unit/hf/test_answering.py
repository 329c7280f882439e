"""The arguments of `generate` that commands and the worker share."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from draftstore.hf.answering import generation_arguments
from draftstore.hf.loading import LoadedModel
from draftstore.hf.requests import GenerationRequest, Sampling


def arguments(
    *, own: dict[str, Any] | None = None, more: dict[str, Any] | None = None, **sampling: Any
) -> dict[str, Any]:
    """Return the arguments for a model that is nothing but its settings."""
    settings: Any = transformers.GenerationConfig(eos_token_id=[7, 9], **(own or {}))  # type: ignore[no-untyped-call]
    model: Any = SimpleNamespace(generation_config=settings)
    loaded = LoadedModel(model, tokenizer=SimpleNamespace(), text=SimpleNamespace())  # type: ignore[arg-type]
    request = GenerationRequest(np.zeros(3, np.int32), 20, Sampling(**sampling), **(more or {}))
    return generation_arguments(loaded, request)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1e-6}, {"top_p": 0.0}])
def test_greedy(sampling: dict[str, Any]) -> None:
    found = arguments(**sampling, own={"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.3})
    assert found["do_sample"] is False
    assert found["repetition_penalty"] == 1.3
    assert (found["temperature"], found["top_p"], found["top_k"]) == (None, None, None)
    assert (found["max_new_tokens"], found["eos_token_id"], found["pad_token_id"]) == (20, [7, 9], 7)


def test_the_request_goes_before_the_models_own_settings() -> None:
    own = {"do_sample": True, "temperature": 0.6, "top_k": 20, "min_p": 0.1}
    found = arguments(own=own, temperature=0.9, top_k=5)
    assert (found["do_sample"], found["temperature"]) == (True, 0.9)
    assert (found["top_k"], found["top_p"], found["min_p"]) == (5, 1.0, 0.1)
    found = arguments(own=own, top_p=0.7, top_k=0)
    assert (found["temperature"], found["top_k"], found["top_p"]) == (0.6, 0, 0.7)
    found = arguments(temperature=0.9)  # transformers would keep 50 tokens
    assert (found["top_k"], found["repetition_penalty"]) == (0, 1.0)
    assert "logits_processor" not in found


def test_where_an_answer_may_end() -> None:
    found = arguments(more={"stop_ids": (3,), "min_tokens": 5})
    assert (found["eos_token_id"], found["min_new_tokens"]) == ([7, 9, 3], 5)
    assert arguments(more={"stop_ids": (3,), "ignore_eos": True})["eos_token_id"] == [3]
    assert arguments(more={"ignore_eos": True})["eos_token_id"] is None


def test_penalties_are_those_of_openai_and_of_the_answer_alone() -> None:
    scores = np.random.default_rng(0).normal(size=(1, 10))
    ids, expected = [1, 2, 3, 3, 5, 3, 7, 7], scores.copy()  # of which three are the prompt
    for token in range(10):
        count = ids[3:].count(token)
        expected[0, token] -= count * 0.5 + (count > 0) * 0.25
    expected[0, 4] += 2.0
    [penalties] = arguments(presence=0.25, frequency=0.5, bias={4: 2.0})["logits_processor"]
    given = torch.from_numpy(scores)
    np.testing.assert_allclose(penalties(torch.tensor([ids]), given).numpy(), expected)
    np.testing.assert_array_equal(given.numpy(), scores)
    [penalties] = arguments(presence=0.5)["logits_processor"]
    assert penalties(torch.tensor([[0, 1, 2, 3]]), torch.zeros(1, 5)).tolist() == [[0, 0, 0, -0.5, 0]]
