"""Attention without copies of keys and values: what it leaves to others. `test_matrix` shows that texts agree."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftstore.hf.attention import shared_keys


def arguments(keys: int = 2) -> dict[str, Any]:
    """Return what a layer of four heads hands over for three rows of a text."""
    draw = torch.Generator().manual_seed(1)
    module = nn.Module()
    module.num_key_value_groups = 4 // keys  # type: ignore[assignment]
    sizes = {"query": (4, 3, 8), "key": (keys, 21, 8), "value": (keys, 21, 4)}
    states = {
        name: torch.randn((1, *size), generator=draw, dtype=torch.float64) for name, size in sizes.items()
    }
    mask = torch.zeros(1, 1, 3, 21, dtype=torch.float64)
    mask[..., 9:] = -torch.inf
    return {"module": module, "attention_mask": mask, "scaling": 0.3, **states}


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
def test_other_attention_arguments_are_left_to_transformers(changes: dict[str, Any]) -> None:
    given = arguments() | changes
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
        attend(**arguments(keys=4))
        with shared_keys():
            attend(**arguments())
    assert calls == ["own"]
    attend(**arguments())
    assert calls == ["own"] * 2
