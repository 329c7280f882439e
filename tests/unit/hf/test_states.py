import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoModel

from draftstore.errors import ModelError
from draftstore.hf.loading import LoadedModel, positions_of
from draftstore.hf.passes import last_hidden
from draftstore.hf.states import ModelStates, StateReader, weights_digest
from draftstore.stores.dresd.kernels.passages import cut_windows
from draftstore.stores.dresd.projection import Projection
from tests.fakes.hf_models import build, tiny

ARCHITECTURES = ("llama", "qwen3", "gpt2", "opt", "cohere")


def texts_of(*lengths: int, seed: int = 0) -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 64, length) for length in lengths]


def caught(model: Any, ids: NDArray[Any]) -> NDArray[np.float32]:
    """Return what decoding would catch: the states of one text, by a pass of the whole model."""
    with torch.no_grad(), last_hidden(model) as hidden:
        model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
    states: NDArray[np.float32] = hidden[0][0].float().numpy()
    return states


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_states_are_the_inputs_of_the_head(architecture: str) -> None:
    model = tiny(architecture)
    texts = texts_of(1, 17, 5, 30, 2, 9)
    found = dict(StateReader(model).read(texts, batch_tokens=40))
    assert sorted(found) == list(range(len(texts)))
    for index, ids in enumerate(texts):
        assert found[index].dtype == np.float32
        np.testing.assert_allclose(found[index], caught(model, ids), rtol=1e-6, atol=1e-6)


@given(
    lengths=st.lists(st.integers(0, 40), max_size=8),
    max_length=st.integers(1, 50),
    batch_tokens=st.integers(1, 100),
)
def test_windows_and_batches(lengths: list[int], max_length: int, batch_tokens: int) -> None:
    """Batches change nothing, and a text that is too long is read in windows."""
    model, texts = tiny("llama"), texts_of(*lengths)
    found = dict(StateReader(model).read(texts, max_length=max_length, batch_tokens=batch_tokens))
    assert sorted(found) == [index for index, ids in enumerate(texts) if len(ids)]
    for index, states in found.items():
        ids = texts[index]
        expected = [
            caught(model, ids[w.start : w.stop])[w.first - w.start :]
            for w in cut_windows(len(ids), max_length)
        ]
        np.testing.assert_allclose(states, np.concatenate(expected), rtol=1e-5, atol=1e-6)


def test_projected_states() -> None:
    model, texts = tiny("llama"), texts_of(9, 4)
    rng = np.random.default_rng(0)
    projection = Projection(
        rng.standard_normal((5, 32)).astype(np.float32), rng.standard_normal(5).astype(np.float32)
    )
    plain = dict(StateReader(model).read(texts))
    projected = dict(StateReader(model).read(texts, projection=projection))
    for index, states in plain.items():
        np.testing.assert_allclose(projected[index], projection.apply(states), rtol=1e-4, atol=1e-4)


def test_a_model_that_scales_before_its_head() -> None:
    """Then the decoder alone does not yield what the head is given, and the whole model is run."""
    model: Any = copy.deepcopy(tiny("llama"))
    head = model.get_output_embeddings()

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(states * 3)
            return logits

    model.lm_head = Scaled()
    model.get_output_embeddings = lambda: model.lm_head.head
    [ids] = texts_of(12)
    [(_, states)] = StateReader(model).read([ids])
    np.testing.assert_allclose(states, caught(model, ids), rtol=1e-6)
    np.testing.assert_allclose(states, 3 * caught(tiny("llama"), ids), rtol=1e-5)


def test_models_without_states(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("llama").config
    headless: Any = AutoModel
    with pytest.raises(ModelError, match="LlamaModel has no output layer of its own"):
        StateReader(headless.from_config(config))
    other = copy.deepcopy(tiny("llama"))
    other.config.is_encoder_decoder = True
    with pytest.raises(ModelError, match="has an encoder, expected a decoder-only model"):
        StateReader(other)
    reader = StateReader(tiny("llama"))

    def full(_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(reader, "_decode", full)
    with pytest.raises(
        ModelError, match=r"a batch of 8 tokens needs more memory .* \(batch_tokens, max_length\)"
    ):
        list(reader.read(texts_of(8), 10, 10))


def test_positions() -> None:
    model = tiny("gpt2", max_position_embeddings=16)
    assert (positions_of(model), positions_of(tiny("llama"))) == (16, 512)
    [(_, states)] = StateReader(model).read(texts_of(40))
    assert states.shape == (40, 32)


def test_a_loaded_model_is_a_source_of_states() -> None:
    model: Any = tiny("llama", dtype=torch.float32)
    source = ModelStates(LoadedModel(model, None, SimpleNamespace(name="small")), batch_tokens=20)  # type: ignore[arg-type]
    assert (source.name, source.vocab_size, source.hidden_size, source.positions) == ("small", 64, 32, 512)
    assert source.identity() == {"dtype": "float32", "weights": weights_digest(model)}
    texts = texts_of(9, 30)
    expected = dict(StateReader(model).read(texts))
    for index, states in source.states(texts):
        np.testing.assert_allclose(states, expected[index], rtol=1e-4, atol=1e-5)


def test_digests_distinguish_models() -> None:
    model = build("llama")
    digest = weights_digest(model)
    assert digest == weights_digest(build("llama"))
    assert digest != weights_digest(build("llama", seed=1))
    assert digest != weights_digest(build("llama", dtype=torch.bfloat16))
    assert digest != weights_digest(
        build("llama", rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    )
    renamed: Any = model
    renamed.config._name_or_path = "elsewhere"
    assert weights_digest(model) == digest
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-9
    assert weights_digest(model) != digest
