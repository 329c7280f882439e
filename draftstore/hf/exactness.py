"""The check that drafts do not change a model's output: passes over several tokens against plain `generate`.

Decoding with drafts relies on properties that most models of transformers have, but not all: row i of a pass over a
draft tree has the logits of a pass over token i alone, regardless of other texts in the pass, and the masks and
positions given to the pass are respected. The first use of a model with drafts checks this on short random texts, with
the same passes as in decoding, and remembers the result for the model. Faults that short texts cannot show are
recognised by the configuration: see `draftstore.hf.checks.unsupported_reason`.
"""

import copy
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from draftstore.errors import DecodingError
from draftstore.hf.checks import PLAIN, takes_single_texts, unsupported_reason
from draftstore.hf.members import prepare_text
from draftstore.hf.passes import Wants
from draftstore.hf.runner import LEAST_WIDTH, Drafted, new_runner
from draftstore.trees.tree import DraftTree

PROMPT = 12
"""Tokens of the prompt."""
ROWS = 4
"""Tokens that are read together in one pass, and one by one for comparison."""
MASKED = 5e3
"""A logit that lies this far below the largest of its row is a mask, and has no probability."""
SEED = 5


class Exactness(NamedTuple):
    """The result of a check.

    Attributes:
        deviation: largest difference between the two results for a logit, divided by the spread of the unmasked
            logits of its row; None if they were not compared.
        tolerance: largest deviation that rounding explains.
        fault: why drafts would change the output; empty if they do not.
    """

    deviation: float | None
    tolerance: float
    fault: str = ""


def require_exact(model: Any) -> None:
    """Raise a DecodingError for a model that does not support drafts, or whose output they would change.

    The first call for a model checks it, except in training mode, where dropout makes every pass different.
    """
    attention = str(model.config.get_text_config(decoder=True)._attn_implementation)
    known = _KNOWN.setdefault(model, {})
    if attention not in known:
        if model.training and unsupported_reason(model) is None:
            return
        known[attention] = examine(model).fault
    if fault := known[attention]:
        raise DecodingError(f"{type(model).__name__} {fault}, so it takes no drafts: {PLAIN}")


_KNOWN: "weakref.WeakKeyDictionary[Any, dict[str, str]]" = weakref.WeakKeyDictionary()
"""Faults by model and attention implementation."""


@torch.no_grad()
def examine(model: Any) -> Exactness:
    """Check a model; torch's random state is not changed."""
    tolerance = max(torch.finfo(kind).eps for kind in _dtypes(model)) ** 0.5
    if fault := unsupported_reason(model):
        return Exactness(None, tolerance, fault)
    tokens = random_tokens(model)
    try:
        alone = _read_one_by_one(model, tokens)[[0, *range(ROWS + 2)]]  # see `_read_together`
    except Exception as error:  # noqa: BLE001 (a model's code may raise anything)
        return Exactness(None, tolerance, f"cannot be decoded at all: plain generate fails ({_short(error)})")
    try:
        drafted = _read_together(model, tokens)
    except Exception as error:  # noqa: BLE001 (on our masks and positions, too)
        return Exactness(None, tolerance, f"fails in a pass over a draft ({_short(error)})")
    deviations = _deviations(alone, drafted)
    # In half precision, rounding may send a token to another expert of a mixture: a single row proves little.
    allowed = ROWS // 2 if tolerance > 1e-3 else 0
    worst = float(deviations.max())
    if int((~(deviations <= tolerance)).sum()) <= allowed:
        return Exactness(worst, tolerance)
    return Exactness(
        worst,
        tolerance,
        f"computes other logits for tokens read together than one by one (they differ by {worst:.2g} of their spread, "
        f"rounding explains {tolerance:.1g})",
    )


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _deviations(alone: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """Return the largest difference in each row, divided by the spread of its logits; neither sees masked columns."""
    masked = (alone < alone.amax(-1, keepdim=True) - MASKED) & (
        drafted < drafted.amax(-1, keepdim=True) - MASKED
    )
    high, low = (alone.masked_fill(masked, limit) for limit in (-torch.inf, torch.inf))
    spread = (high.amax(-1) - low.amin(-1)).clamp_min(torch.finfo(alone.dtype).tiny)
    return (drafted - alone).abs().masked_fill(masked, 0.0).amax(-1) / spread


def _dtypes(model: Any) -> Iterator[torch.dtype]:
    yield model.dtype
    yield torch.float32  # norms and rotations, even if the weights are wider
    if torch.is_autocast_enabled(model.device.type):
        yield torch.get_autocast_dtype(model.device.type)


def random_tokens(model: Any) -> NDArray[np.int64]:
    """Return int64 [PROMPT + ROWS + 1], ids of ordinary text: no special ids that the configuration names."""
    config = model.config.get_text_config(decoder=True)
    named = {
        value
        for each in (model.config, config)
        for key, value in each.to_dict().items()
        if key.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    draw = np.random.default_rng(SEED)
    ids = [token for token in draw.permutation(min(int(config.vocab_size), 1 << 16)) if token not in named]
    return np.resize(np.array(ids, np.int64), PROMPT + ROWS + 1)


def _read_one_by_one(model: Any, tokens: NDArray[np.int64]) -> torch.Tensor:
    """Return plain generate's logits after the prompt and each further token, float [ROWS + 2, vocabulary]."""
    prompt = torch.from_numpy(tokens[None, :PROMPT]).to(model.device)
    settings: dict[str, Any] = {
        "use_cache": True, "output_logits": True, "return_dict_in_generate": True, "max_new_tokens": ROWS + 2,
        "logits_processor": LogitsProcessorList([Forced([*tokens.tolist(), 0])]),
    }  # fmt: skip
    found = _neutral(model).generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    return torch.cat(found.logits).cpu()


def _neutral(model: Any) -> Any:
    """Return the model without its own settings: ends, stop strings, a time limit."""
    neutral = copy.copy(model)
    neutral.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    return neutral


class Forced(LogitsProcessor):
    """Forces given tokens: prompt and output."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __call__(self, input_ids: Any, scores: Any) -> Any:  # noqa: D102 (as LogitsProcessor)
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, self._tokens[input_ids.shape[1]]] = 0.0
        return chosen


def _read_together(model: Any, tokens: NDArray[np.int64]) -> torch.Tensor:
    """Return the same logits; here all but the last token are the accepted path of a draft.

    Every node of the path has a rejected sibling. If the model takes two texts, another one of a different length is
    in the passes. The prompt is read beside it, then anew in two parts: the logits after it come from both.
    """
    prepare_text(_neutral(model), torch.from_numpy(tokens[None, :PROMPT]).to(model.device), max_new_tokens=1)
    step = PROMPT if takes_single_texts(model) else PROMPT // 2
    prompts = [tokens[:length] for length in range(step, PROMPT + 1, step)]
    runner = new_runner(model, len(prompts))
    runner.pool.resize(LEAST_WIDTH, 0, 0)
    wants = Wants(best=False)
    reads = [(0, prompts, 0)]
    reads += [(len(prompts) - 1, [tokens[past : past + step]], past) for past in range(0, PROMPT, step)]
    read = [runner.read(*each, wants)[-1].logits(0).cpu() for each in reads]
    logits = [read[0], read[-1]]
    others = [(int(tokens[0]), DraftTree.empty(), len(ids)) for ids in prompts[:-1]]
    tree, rows = _draft(tokens[PROMPT + 1 : -1].tolist(), wrong=int(tokens[0]))
    found = runner.run(Drafted.of([*others, (int(tokens[PROMPT]), tree, PROMPT)]), wants)[len(others)]
    logits += [found.logits(row).cpu() for row in rows]
    runner.pool.move([len(ids) for ids in prompts], [*([] for _ in others), rows])
    last = int(tokens[-1]), DraftTree.empty(), PROMPT + len(rows)
    logits.append(runner.run(Drafted.of([*others, last]), wants)[len(others)].logits(0).cpu())
    return torch.cat(logits).to(torch.float32)


def _draft(path: list[int], wrong: int) -> tuple[DraftTree, list[int]]:
    """Return a tree of a path in which each node has a sibling before it, and the rows of the root and the path."""
    tokens = np.array([[wrong, token] for token in path], np.int32).ravel()
    rows = np.arange(len(path) + 1) * 2
    parents = np.repeat(rows[:-1] - 1, 2).astype(np.int16)
    return DraftTree(tokens, parents, np.zeros(len(tokens), np.uint8)), rows.tolist()
