"""Attention without copies of keys and values: what it leaves to others. `test_matrix` shows that texts agree."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftstore.hf.attention import shared_keys


def arguments(texts: int, heads: int, keys: int, rows: int, columns: int = 21) -> dict[str, Any]:
    """Return what a layer hands over."""
    draw = torch.Generator().manual_seed(heads * rows)
    module = nn.Module()
    module.num_key_value_groups = heads // keys  # type: ignore[assignment]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    mask = torch.zeros(texts, 1, rows, columns, dtype=torch.float64)
    mask.masked_fill_(torch.rand(mask.shape, generator=draw) < 0.3, -torch.inf)
    mask[..., 0] = 0.0
    return {
        "module": module,
        "query": random(texts, heads, rows, 8),
        "key": random(texts, keys, columns + 5, 8)[:, :, :columns],
        "value": random(texts, keys, columns, 4),
        "attention_mask": mask,
        "scaling": 0.3,
    }


def attend(**given: Any) -> torch.Tensor:
    """Return what the model's layer gets."""
    output: torch.Tensor = ALL_ATTENTION_FUNCTIONS["sdpa"](**given)[0]
    return output


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_mask": None},
        {"dropout": 0.1},
        {"attention_mask": torch.zeros(1, 4, 3, 21, dtype=torch.float64)},
        {"position_bias": torch.zeros(1, 4, 3, 21, dtype=torch.float64)},
    ],
)
def test_what_else_a_layer_may_ask_for_is_left_to_transformers(changes: dict[str, Any]) -> None:
    given = arguments(1, 4, 2, 3) | changes
    with shared_keys():
        torch.manual_seed(0)
        output = attend(**given)
    torch.manual_seed(0)
    torch.testing.assert_close(output, sdpa_attention_forward(**given)[0])


def test_a_function_of_the_users_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def own(*given: Any, **more: Any) -> Any:
        calls.append("own")
        return sdpa_attention_forward(*given, **more)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", own)
    with shared_keys():
        attend(**arguments(1, 4, 4, 3))
        with shared_keys():
            attend(**arguments(1, 4, 2, 3))
    assert calls == ["own"]
    attend(**arguments(1, 4, 2, 3))
    assert calls == ["own"] * 2
