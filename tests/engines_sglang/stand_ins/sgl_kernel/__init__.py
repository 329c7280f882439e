"""The compiled kernels that SGLang's CPU backend calls, in torch; no package has them for CPUs.

Written from the calls of SGLang 0.5.23, for tests: slow, and for plain attention only. Any other name raises.
"""

import ctypes
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def _plain_only(**others: Any) -> None:
    """Refuse what these tests do not need."""
    for name, value in others.items():
        if value is not None and value != 0:
            raise NotImplementedError(f"the stand-in of SGLang's kernels has no {name}")


def extend_attention_cpu(
    q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor, key_buffer: Tensor, value_buffer: Tensor,
    key_scale: float, value_scale: float, req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor,
    extend_seq_lens: Tensor, extend_start_loc: Tensor, max_extend_len: int, scaling: float, logit_cap: float,
    is_cross_attention: bool, sliding_window: int, encoder_lens: Tensor | None, sinks: Tensor | None,
    tree_mask: Tensor | None, is_causal: bool,
) -> None:  # fmt: skip
    """Attend from the last rows of each text, whose keys and values are in the buffers already.

    `tree_mask` is bool [texts x rows x rows], where every text has as many rows: what each sees of the others.
    """
    _plain_only(cap=logit_cap, cross_attention=is_cross_attention, window=sliding_window, sinks=sinks)
    _plain_only(encoder=not is_causal, scales=(key_scale, value_scale) != (1.0, 1.0))
    lengths = zip(seq_lens.tolist(), extend_seq_lens.tolist(), extend_start_loc.tolist(), strict=True)
    for text, (length, rows, start) in enumerate(lengths):
        slots = req_to_token[req_pool_indices[text], :length].long()
        sees = torch.ones(rows, length, dtype=torch.bool)
        own = sees[:, length - rows :]
        own.copy_(own.tril() if tree_mask is None else tree_mask.view(-1, rows, rows)[text])
        place = slice(start, start + rows)
        query, key, value = (
            each.transpose(0, 1) for each in (q[place], key_buffer[slots], value_buffer[slots])
        )
        attended = scaled_dot_product_attention(
            query, key, value, attn_mask=sees, scale=scaling, enable_gqa=True
        )
        out[place] = attended.transpose(0, 1)


def decode_attention_cpu(
    q: Tensor, key_buffer: Tensor, value_buffer: Tensor, key_scale: float, value_scale: float, out: Tensor,
    k: Tensor, v: Tensor, cache_loc: Tensor, attn_logits: Tensor, req_to_token: Tensor, req_pool_indices: Tensor,
    seq_lens: Tensor, scaling: float, logit_cap: float, is_cross_attention: bool, sliding_window: int,
    encoder_lens: Tensor | None, sinks: Tensor | None,
) -> None:  # fmt: skip
    """Store the key and value of each text's last token, and attend from it."""
    key_buffer[cache_loc] = k.view(-1, *key_buffer.shape[1:])
    value_buffer[cache_loc] = v.view(-1, *value_buffer.shape[1:])
    extend_attention_cpu(
        q, None, None, out, key_buffer, value_buffer, key_scale, value_scale, req_to_token, req_pool_indices, seq_lens,
        torch.ones_like(seq_lens), torch.arange(len(seq_lens)), 1, scaling, logit_cap, is_cross_attention,
        sliding_window, encoder_lens, sinks, None, True,
    )  # fmt: skip


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:  # fmt: skip (SGLang spells it so)
    """Write for each text the rows along which its tree agrees with the model, their number, and what follows each."""
    for text, target in enumerate(target_predict.tolist()):
        tokens, rows = candidates[text].tolist(), retrive_index[text].tolist()
        children, siblings = retrive_next_token[text].tolist(), retrive_next_sibling[text].tolist()
        path, node = [0], children[0]
        while node >= 0 and len(path) < accept_index.shape[1]:
            if tokens[node] == target[path[-1]]:
                path.append(node)
                node = children[node]
            else:
                node = siblings[node]
        for depth, node in enumerate(path):
            accept_index[text, depth] = rows[node]
            predicts[rows[node]] = target[node]
        accept_token_num[text] = len(path) - 1


def _ranges(
    req_pool_indices: Tensor, start: Tensor, end: Tensor
) -> Iterator[tuple[tuple[int, slice], slice]]:
    """Yield where the pool has a range of each text, and where that is among all of them, one after the other."""
    done = 0
    for text, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        yield (text, slice(first, last)), slice(done, done + last - first)
        done += last - first


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, out_cache_loc: Tensor,
    pool_len: int,
) -> None:  # fmt: skip
    """Write new slots, one text's after the other's, where the texts have them."""
    for there, here in _ranges(req_pool_indices, start_offset, end_offset):
        req_to_token[there] = out_cache_loc[here]


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, out_cache_loc: Tensor,
    pool_len: int,
) -> None:  # fmt: skip
    """Read the slots of a range of each text, one text's after the other's."""
    for there, here in _ranges(req_pool_indices, start_offset, end_offset):
        out_cache_loc[here] = req_to_token[there]


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Write the slots of the accepted rows, without gaps; -1 is no row."""
    rows = accept_index[accept_index >= 0].long()
    accept_out_cache_loc[: len(rows)] = out_cache_loc[rows]


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """Write the last accepted token of each text."""
    texts = torch.arange(len(accept_lens))
    bonus_tokens.copy_(accept_tokens.flatten()[texts * accept_stride + accept_lens.long() - 1])


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copy slots of all buffers, given by their addresses and the bytes of a slot."""
    if not len(tgt_loc):
        return
    slots = int(max(tgt_loc.max(), src_loc.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (slots * stride)).from_address(address)
        rows = np.frombuffer(memory, np.uint8).reshape(slots, stride)
        rows[tgt_loc.numpy()] = rows[src_loc.numpy()]


def _absent(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError("this kernel of SGLang has no stand-in: no n-gram worker calls it")


build_tree_kernel_efficient_cpu = assign_draft_cache_locs_contiguous_cpu = rotate_input_ids_cpu = _absent


class _Operators:
    """What stands at `torch.ops.sgl_kernel`: these two, and no others."""

    decode_attention_cpu = staticmethod(decode_attention_cpu)
    extend_attention_cpu = staticmethod(extend_attention_cpu)


torch.ops.sgl_kernel = _Operators()  # type: ignore[attr-defined]
