"""The arguments of `generate` that commands and the worker share."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from draftstore.hf.answering import generation_arguments
from draftstore.hf.loading import LoadedModel
from draftstore.hf.penalties import Penalties
from draftstore.hf.requests import GenerationRequest, Sampling


def arguments(*, own: dict[str, Any] | None = None, **sampling: Any) -> dict[str, Any]:
    """Return the arguments for a model that is nothing but its settings."""
    settings: Any = transformers.GenerationConfig(eos_token_id=[7, 9], **(own or {}))  # type: ignore[no-untyped-call]
    model: Any = SimpleNamespace(generation_config=settings)
    loaded = LoadedModel(model, tokenizer=SimpleNamespace(), text=SimpleNamespace())  # type: ignore[arg-type]
    return generation_arguments(loaded, GenerationRequest(np.zeros(3, np.int32), 20, Sampling(**sampling)))


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
    found = arguments(temperature=0.9)  # transformers would keep 50 tokens
    assert (found["top_k"], found["repetition_penalty"]) == (0, 1.0)
    assert "logits_processor" not in found


def test_penalties_are_of_the_answer_alone() -> None:
    [penalties] = arguments(presence=0.5)["logits_processor"]
    assert isinstance(penalties, Penalties)
    scores = penalties(torch.tensor([[0, 1, 2, 3]]), torch.zeros(1, 5))
    assert scores.tolist() == [[0, 0, 0, -0.5, 0]]
