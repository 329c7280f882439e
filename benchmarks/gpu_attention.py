"""Attention of a verification pass alone, in ways that differ in what they do with the shared keys and values.

repeated     SDPA as transformers calls it with a mask: keys and values are repeated for every query head
gqa          SDPA with `enable_gqa`, which may choose the unfused kernel for it
folded       SDPA over keys and values as they are: query heads that share them become further rows
flex         flex_attention with the mask as a bias of scores
flex blocks  flex_attention with a `BlockMask`
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.forced import Shape
from benchmarks.gpu_sheet import seconds_of
from tests.fakes.hf_models import uncompiled


def attention_ways(
    shape: Shape, texts: int, rows: int, width: int, dtype: torch.dtype, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Return the microseconds of one layer's attention by way, and how far each is from the first.

    Args:
        shape: of the model.
        texts: of the pass.
        rows: of each text.
        width: columns that they see.
        dtype: of the states.
        device: of the states.
        repeats: ten times as many calls are timed.
    """
    size, groups = shape.hidden // shape.heads, shape.heads // shape.key_value_heads
    torch.manual_seed(0)
    query = torch.randn(texts, shape.heads, rows, size, device=device).to(dtype)
    keys, values = (
        torch.randn(texts, shape.key_value_heads, width, size, device=device).to(dtype) for _ in range(2)
    )
    allowed = torch.arange(width, device=device) <= torch.arange(width - rows, width, device=device)[:, None]
    allowed = allowed.expand(texts, rows, width).contiguous()
    bias = torch.zeros(texts, 1, rows, width, dtype=dtype, device=device)
    bias.masked_fill_(~allowed[:, None], -torch.inf)
    compiled: Any = torch.compile(flex_attention) if device.type == "cuda" else flex_attention

    def repeated() -> Any:
        return sdpa(query, keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1), bias)

    def folded() -> Any:
        shared = query.reshape(texts, shape.key_value_heads, groups * rows, size)
        mask = bias.expand(texts, groups, rows, width).reshape(texts, 1, groups * rows, width)
        return sdpa(shared, keys, values, mask).reshape(query.shape)

    def biased(score: Any, text: Any, _head: Any, row: Any, column: Any) -> Any:
        return score + bias[text, 0, row, column]

    blocks = create_block_mask(
        lambda text, _head, row, column: allowed[text, row, column], texts, None, rows, width, device=device
    )
    ways: dict[str, Callable[[], Any]] = {
        "repeated": repeated,
        "gqa": lambda: sdpa(query, keys, values, bias, enable_gqa=True),
        "folded": folded,
        "flex": lambda: compiled(query, keys, values, score_mod=biased, enable_gqa=True),
        "flex blocks": lambda: compiled(query, keys, values, block_mask=blocks, enable_gqa=True),
    }
    expected = repeated().float()
    found: dict[str, Any] = {"texts": texts, "rows": rows, "width": width, "ways": {}}
    quiet = uncompiled() if device.type == "cpu" else nullcontext()
    with quiet, torch.no_grad():
        for name, way in ways.items():
            try:
                off = float((way().float() - expected).abs().max())
                microseconds = round(1e6 * seconds_of(way, 10 * repeats), 2)
                found["ways"][name] = {"microseconds": microseconds, "deviation": off}
            except Exception as error:  # noqa: BLE001 (a way that this torch does not compile)
                found["ways"][name] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    return found
