"""Individual parts of generation with drafts: the depth of drafts, texts, the most likely tokens."""

import numpy as np
import pytest
import torch

from draftstore.hf import attention
from draftstore.hf.attention import FULL, SLIDING, views_of
from draftstore.hf.checks import depth_limit
from draftstore.hf.members import Ids
from draftstore.hf.passes import CHUNK, Wants, choices
from tests.fakes.hf_models import build, tiny


def test_the_depth_of_drafts() -> None:
    limit = depth_limit(tiny(max_position_embeddings=100))
    assert [limit(position) for position in (0, 90, 98, 99, 100, 500)] == [99, 9, 1, 0, 0, 0]
    rope = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 20,
        "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    }  # fmt: skip
    limit = depth_limit(build(max_position_embeddings=100, rope_parameters=rope))
    assert [limit(position) for position in (0, 18, 19, 20, 99)] == [19, 1, 0, 79, 0]


def test_ranges_of_layers_before_transformers_5_19(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [FULL, SLIDING, FULL], {"sliding_window": 8}
    monkeypatch.setattr(attention, "get_layer_types_and_kwargs", lambda _config: known)
    assert views_of(None) == {FULL: None, SLIDING: 8}


def test_a_text_gives_tensors_that_keep_their_content() -> None:
    prompt = torch.tensor([[1, 2]])
    text = Ids(prompt)
    views = [text.tensor(), *(text.tensor([7, 8][:count]) for count in (1, 2))]
    text.extend(np.array([7, 8]))
    for token in range(600):
        views.append(text.tensor([token]))
        text.extend(np.array([token]))
    everything = [1, 2, 7, 8, *range(600)]
    assert all(view[0].tolist() == everything[: view.shape[1]] for view in views)
    assert prompt.tolist() == [[1, 2]]
    assert text.tensor()[0].tolist() == text.ids.tolist() == everything


@pytest.mark.parametrize("size", [3, 100, CHUNK * 8, CHUNK * 8 + 1, CHUNK * 40])
@pytest.mark.parametrize("rows", [1, 9])
def test_the_most_likely_tokens(size: int, rows: int) -> None:
    """As argmax and topk of torch find them; among equals the lowest id is the most likely."""
    random = torch.Generator().manual_seed(size + rows)
    for coarse in (False, True):
        logits = torch.randn(rows, size, generator=random)
        logits = logits.round() if coarse else logits
        found = choices(logits, Wants(candidates=True))
        assert found is not None
        known = min(8, size)
        assert torch.equal(found[:, 0], logits.argmax(-1))
        candidates = found[:, 1 : known + 1]
        assert torch.equal(logits.gather(1, candidates), logits.topk(known, -1).values)
        assert all(len(set(row)) == known for row in candidates.tolist())
        assert (found[:, known + 1 :] == -1).all()
        best = choices(logits, Wants())
        assert best is not None
        assert torch.equal(best, found[:, :1])
    assert choices(logits, Wants(best=False)) is None


def test_logits_equal_in_float32_are_ties() -> None:
    """Plain generate compares float32 copies, so that the first of two logits wins that differ in float64 only."""
    found = choices(torch.tensor([[0.0, 1.0, 1.0 + 1e-12]], dtype=torch.float64), Wants())
    assert found is not None
    assert found.tolist() == [[1]]
