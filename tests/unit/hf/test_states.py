import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from draftstore.errors import ModelError
from draftstore.hf import load_model
from draftstore.hf.loading import positions_of
from draftstore.hf.passes import last_hidden
from draftstore.hf.states import ModelStates, StateReader, weights_digest
from draftstore.stores.dresd.build import DresdOptions, build_dresd
from draftstore.stores.dresd.kernels.nearest import ALL, search
from draftstore.stores.dresd.kernels.windows import cut_windows
from draftstore.stores.dresd.projection import Projection
from draftstore.stores.dresd.store import DresdStore
from tests.conftest import write_texts
from tests.examples import examples
from tests.fakes import killed
from tests.fakes.hf_models import build, stories, tiny
from tests.unit.stores.rest.test_build import contents

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox", "opt", "cohere", "granite")


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
def test_states_are_what_the_head_is_given(architecture: str) -> None:
    model = tiny(architecture)
    texts = texts_of(1, 17, 5, 30, 2, 9)
    found = dict(StateReader(model).read(texts, batch_tokens=40))
    assert sorted(found) == list(range(len(texts)))
    for index, ids in enumerate(texts):
        assert found[index].dtype == np.float32
        np.testing.assert_allclose(found[index], caught(model, ids), rtol=1e-6, atol=1e-6)


@examples(20)
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


def test_batches_are_of_similar_length_and_no_larger_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = StateReader(tiny("llama"))
    shapes: list[tuple[int, int]] = []
    decode = reader._decode

    def noted(ids: torch.Tensor) -> torch.Tensor:
        shapes.append((len(ids), ids.shape[1]))
        return decode(ids)

    monkeypatch.setattr(reader, "_decode", noted)
    order = [index for index, _ in reader.read(texts_of(3, 20, 4, 19, 5, 50, 3), 100, 40)]
    assert shapes == [(1, 50), (2, 20), (4, 5)]
    assert order == [5, 1, 3, 4, 2, 0, 6]


def test_two_calls_give_the_same_bits() -> None:
    model, texts = tiny("llama", dtype=torch.float32), texts_of(*range(1, 30))
    first, second = (list(StateReader(model).read(texts, batch_tokens=64)) for _ in range(2))
    assert [index for index, _ in first] == [index for index, _ in second]
    assert all(np.array_equal(left[1], right[1]) for left, right in zip(first, second, strict=True))


def test_projected_states() -> None:
    model, texts = tiny("llama"), texts_of(9, 4)
    rng = np.random.default_rng(0)
    projection = Projection(
        rng.standard_normal((5, 32)).astype(np.float32), rng.standard_normal(5).astype(np.float32)
    )
    plain, projected = (
        dict(StateReader(model).read(texts)),
        dict(StateReader(model).read(texts, projection=projection)),
    )
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
        ModelError, match=r"a batch of 8 tokens needs more memory .* \(--batch-tokens\) or shorter"
    ):
        list(reader.read(texts_of(8), 10, 10))


def test_positions() -> None:
    model = tiny("gpt2", max_position_embeddings=16)
    assert (positions_of(model), positions_of(tiny("llama"))) == (16, 512)
    [(_, states)] = StateReader(model).read(texts_of(40))
    assert states.shape == (40, 32)


def test_models_are_told_apart() -> None:
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


def test_the_file_of_a_model_does_not_matter(tmp_path: Path) -> None:
    model = build("qwen2", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    factory: Any = AutoModelForCausalLM
    digests = {weights_digest(factory.from_pretrained(tmp_path / name, dtype=torch.float64)) for name in "ab"}
    assert len(digests) == 1
    assert AutoConfig.from_pretrained(tmp_path / "a").tie_word_embeddings


def test_a_store_of_a_trained_model(data: Path, tmp_path: Path) -> None:
    """A state that decoding catches in a text of the corpus finds its own place, and what came next there."""
    loaded = load_model(data / "models" / "stories260K")
    texts = [
        "Once upon a time there was a little dog. ",
        "Lily and Tom went to the park to play. ",
        "Mom said no. ",
    ]
    texts = [text * 2 + other for text in texts for other in texts]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    options = DresdOptions(corpus=(tmp_path,), name="stories", dims=32, glob=("*.txt",))
    source = ModelStates(loaded, batch_tokens=256)
    result = build_dresd(options, loaded.text, source, tmp_path / "store")
    assert result.manifest.target_model == "stories260K"
    assert result.manifest.parameters["plan"]["model"]["dtype"] == "float32"
    assert result.manifest.parameters["quality"]["mean_reciprocal_rank"] > 0.95
    store = DresdStore.open(
        tmp_path / "store", tokenizer=loaded.text.identity, hidden_size=source.hidden_size
    )
    ids = loaded.text.encode(texts[4], bos=True)
    states = caught(stories(data, torch.float32), ids)
    for place in range(1, len(ids) - 2):
        query, token = store.projection.apply(states[place]), ids[place + 1]
        found = search(store.index, query[None], token[None].astype(np.int32), 9, ALL)
        nearest = found.entries[found.similarities > 0.999]
        rest = ids[place + 2 : place + 6].tolist()
        starts = store.index.positions[nearest].tolist()
        assert all(store.tokens[start - 1] == token for start in starts)
        assert rest in [store.tokens[start : start + len(rest)].tolist() for start in starts]


@pytest.mark.slow
def test_a_killed_build_gives_the_same_bytes(data: Path, tmp_path: Path) -> None:
    """Batches of a real model depend on the block alone."""
    corpus = write_texts(tmp_path / "c.jsonl", 200)
    model = data / "models" / "stories260K"
    killed.run(killed.dense_store, (model, corpus, tmp_path / "whole"))
    for marker in ("states.bin", "vectors.f16"):
        out = tmp_path / marker
        reached = killed.kill_when(
            killed.dense_store, (model, corpus, out), (tmp_path / f".{marker}.partial" / marker).exists
        )
        assert reached
        killed.run(killed.dense_store, (model, corpus, out))
        assert contents(out) == contents(tmp_path / "whole")
