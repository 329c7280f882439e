"""Attention without copies of keys and values, or a mask; what it leaves to others. `test_matrix` compares texts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftstore.hf import attention
from draftstore.hf.attention import CausalMask, shared_keys
from tests.fakes.hf_models import needs_gpu


def arguments(keys: int = 2, rows: int = 3, columns: int = 21, size: int = 4) -> dict[str, Any]:
    """Return what a layer of four heads hands over for the rows of a text."""
    draw = torch.Generator().manual_seed(1)
    module = nn.Module()
    module.num_key_value_groups = 4 // keys  # type: ignore[assignment]
    sizes = {"query": (4, rows, 8), "key": (keys, columns, 8), "value": (keys, columns, size)}
    states = {
        name: torch.randn((1, *size), generator=draw, dtype=torch.float64) for name, size in sizes.items()
    }
    mask = torch.zeros(1, 1, rows, columns, dtype=torch.float64)
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


# --- causal masks ---


def causal(rows: int, columns: int) -> CausalMask:
    return CausalMask(rows, columns, torch.float64, torch.device("cpu"))


def content(rows: int, columns: int) -> torch.Tensor:
    """Return what a causal mask says: a row sees the columns up to its own, which is among the last."""
    seen = [[column <= columns - rows + row for column in range(columns)] for row in range(rows)]
    return torch.zeros(1, 1, rows, columns, dtype=torch.float64).masked_fill(~torch.tensor(seen), -torch.inf)


@given(
    st.sampled_from([1, 2, 4]),
    st.integers(1, 20),
    st.sampled_from([0, 1, 7, 20]),
    st.sampled_from([4, 8]),
    st.integers(1, 50),
)
def test_causal_attention_equals_that_with_a_mask(
    keys: int, rows: int, past: int, size: int, block: int
) -> None:
    given = arguments(keys, rows, past + rows, size) | {"attention_mask": causal(rows, past + rows)}
    with pytest.MonkeyPatch.context() as patch, shared_keys():
        patch.setattr(attention, "BLOCK", block)
        output = attend(**given)
    usual = sdpa_attention_forward(**given | {"attention_mask": content(rows, past + rows)})[0]
    torch.testing.assert_close(output, usual, rtol=1e-12, atol=1e-12)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("past", [0, 70])
@pytest.mark.parametrize("keys", [2, 4])
def test_causal_attention_on_a_gpu(keys: int, past: int, dtype: torch.dtype) -> None:
    given = arguments(keys, 90, past + 90, size=8) | {"attention_mask": content(90, past + 90)}
    for name in ("query", "key", "value", "attention_mask"):
        given[name] = given[name].to("cuda", dtype)
    usual = sdpa_attention_forward(**given)[0]
    with shared_keys():
        output = attend(**given | {"attention_mask": CausalMask(90, past + 90, dtype, given["key"].device)})
    torch.testing.assert_close(output, usual)


def attend_with(mask: torch.Tensor) -> torch.Tensor:
    known = {name: each for name, each in arguments(4).items() if name in ("query", "key", "value")}
    return scaled_dot_product_attention(**known, attn_mask=mask)


@pytest.mark.parametrize(
    "use",
    [
        lambda mask: mask + 1.0,
        lambda mask: torch.zeros(2, 4, 3, 21, dtype=torch.float64) + mask,
        lambda mask: mask[..., :20],
        lambda mask: mask == 0,
        lambda mask: mask.to(torch.float32),
        lambda mask: torch.where(mask < 0, mask, 1.0),
        attend_with,
    ],
)
def test_whoever_computes_with_a_causal_mask_finds_its_content(use: Callable[[torch.Tensor], Any]) -> None:
    mask = causal(3, 21)
    assert (mask.shape, mask.dtype) == ((1, 1, 3, 21), torch.float64)
    assert torch.equal(use(mask), use(content(3, 21)))


@pytest.mark.parametrize(
    "changes", [{"dropout": 0.1}, {"position_bias": torch.rand(1, 4, 3, 21, dtype=torch.float64)}]
)
@pytest.mark.parametrize("keys", [2, 4])
def test_transformers_gets_causal_masks_with_content(keys: int, changes: dict[str, Any]) -> None:
    given = arguments(keys) | changes
    with shared_keys():
        torch.manual_seed(0)
        output = attend(**given | {"attention_mask": causal(3, 21)})
    torch.manual_seed(0)
    usual = sdpa_attention_forward(**given | {"attention_mask": content(3, 21)})[0]
    torch.testing.assert_close(output, usual)
