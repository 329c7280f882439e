"""The check that drafts do not change what a model says: passes over several tokens against passes over one.

Decoding with drafts relies on two properties that most models have, but not all of transformers': row i of a pass over
several tokens has the logits of a pass over token i alone, and the cache holds what was read, less what is taken back.
The first use of a model with drafts checks both on a short random text, with the passes that decoding would run, and
keeps the result with the model: two prefills of 12 tokens and 7 passes.

What such a short text cannot show is told by the configuration: see `_by_design`.
"""

import logging
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.configuration_utils import GenerationConfig

from draftstore.errors import DecodingError
from draftstore.hf.caches import rollback_cache
from draftstore.hf.checks import NO_LIMIT, PLAIN, check_request, takes_trees
from draftstore.hf.choosing import Text
from draftstore.hf.passes import Wants
from draftstore.hf.targets import ChainForward, Forward, Prefilled, TreeForward
from draftstore.trees.tree import DraftTree

PROMPT = 12
"""Tokens that are read before."""
ROWS = 4
"""Tokens that are read together in one pass, and one by one in others."""
SEED = 5
SELECTED = ("index_topk", "index_topk_blocks", "keep_window_size")
"""Settings of sparse attention: how many keys a token sees."""
LOG = logging.getLogger(__name__)


class Exactness(NamedTuple):
    """The result of a check.

    Attributes:
        trees: whether drafts may be trees; else chains.
        deviation: largest difference of a logit between the two ways, divided by the spread of the logits of its row;
            None if they were not compared.
        tolerance: largest deviation that rounding explains.
        fault: why drafts would change the output; empty if they do not.
    """

    trees: bool
    deviation: float | None
    tolerance: float
    fault: str = ""


class _CacheError(Exception):
    """The model has read a text, and its cache does not hold it."""


def require_exact(model: Any) -> None:
    """Refuse a model whose output drafts would change; its first use checks it.

    Not in training mode, where dropout makes every pass another; and not with `flex_attention`, which would compile for
    minutes to run the same model.
    """
    attention = str(model.config.get_text_config(decoder=True)._attn_implementation)
    if model.training or attention == "flex_attention":
        return
    known = _KNOWN.setdefault(model, {})
    if attention not in known:
        known[attention] = _fault_of(model)
    if known[attention]:
        raise DecodingError(f"{type(model).__name__} {known[attention]}: {PLAIN}")


_KNOWN: "weakref.WeakKeyDictionary[Any, dict[str, str]]" = weakref.WeakKeyDictionary()
"""By model and attention implementation: why it is refused, or nothing."""


def _fault_of(model: Any) -> str:
    """Return why a model is refused; empty also if it cannot be checked, with a warning."""
    try:
        return examine(model).fault
    except DecodingError:
        raise
    except Exception as error:  # noqa: BLE001 (anything that a model's code raises on text alone)
        LOG.warning(
            "%s could not be checked for passes over several tokens (%s: %s)",
            type(model).__name__,
            type(error).__name__,
            str(error)[:200],
        )
        return ""


@torch.no_grad()
def examine(model: Any) -> Exactness:
    """Check a model; random numbers of torch are left alone.

    Args:
        model: a causal language model of transformers.

    Raises:
        DecodingError: it is of a kind that is never decoded with drafts.
        Exception: whatever the model raises on a text.
    """
    tokens = _random_tokens(model)
    # Models compute norms and rotations in float32 even where they are wider.
    tolerance = max(torch.finfo(kind).eps for kind in (model.dtype, torch.float32)) ** 0.5
    if fault := _by_design(model.config.get_text_config(decoder=True)):
        return Exactness(False, None, tolerance, fault)
    try:
        alone, _ = _logits(model, tokens, together=False)
        drafted, trees = _logits(model, tokens, together=True)
    except _CacheError as error:
        return Exactness(False, None, tolerance, str(error))
    spread = (alone.amax(-1) - alone.amin(-1)).clamp_min(torch.finfo(alone.dtype).tiny)
    deviations = (drafted - alone).abs().amax(-1) / spread
    beyond = int((~(deviations <= tolerance)).sum())
    # In half precision, rounding may send a token to another expert of a mixture: one row says little.
    allowed = ROWS // 2 if tolerance > 1e-3 else 0
    worst = float(deviations.max())
    if beyond > allowed:
        fault = (
            f"computes other logits for tokens read together than one by one (by {worst:.2g} of their spread, rounding "
            f"explains {tolerance:.1g}), so drafts would change its output"
        )
        return Exactness(trees, worst, tolerance, fault)
    return Exactness(trees, worst, tolerance)


def _by_design(config: Any) -> str:
    """Return why a model with a configuration is refused, if longer texts are needed to see it."""
    positions = getattr(config, "max_position_embeddings", None) or NO_LIMIT
    for name in SELECTED:
        if (getattr(config, name, None) or positions) < positions:
            return (
                f"attends to the keys with the highest scores alone ({name}), and equal scores fall otherwise where "
                "tokens are read together"
            )
    if config.model_type == "moshi" and (config.sliding_window or positions) < positions:
        return "masks tokens that are read together without regard to its sliding window"
    return ""


def _random_tokens(model: Any) -> NDArray[np.int64]:
    """Return int64 [PROMPT + ROWS + 1], ids of text: none that the configuration names, as it does ends and images."""
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


def _logits(model: Any, tokens: NDArray[np.int64], *, together: bool) -> tuple[torch.Tensor, bool]:
    """Return the logits behind the prompt, float [ROWS + 1, vocabulary], and whether trees are taken."""
    found: list[tuple[torch.Tensor, bool]] = []
    prompt = torch.from_numpy(tokens[None, :PROMPT]).to(model.device)
    settings: Any = GenerationConfig(
        max_new_tokens=len(tokens) - PROMPT,
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        use_cache=True,
        cache_implementation="dynamic",
        pad_token_id=0,
    )  # type: ignore[no-untyped-call]

    def decode(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,  # noqa: ARG001 (given by `generate`, as the next one)
        stopping_criteria: Any,  # noqa: ARG001
        generation_config: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        prefilled = _prefill(model, input_ids, generation_config, kwargs)
        found.append((_read_together if together else _read_one_by_one)(prefilled, tokens))
        return input_ids

    model.generate(
        prompt, generation_config=settings, attention_mask=torch.ones_like(prompt), custom_generate=decode
    )
    return found[0]


def _read_one_by_one(prefilled: Prefilled, tokens: NDArray[np.int64]) -> tuple[torch.Tensor, bool]:
    """Read the text behind the prompt token by token, as plain generate does."""
    forward = ChainForward(prefilled)
    rows = []
    for token in tokens[PROMPT:]:
        prefilled.text.extend([int(token)])
        rows.append(_run(forward, [int(token)], DraftTree.empty()))
        forward.keep([0])
    return torch.cat(rows), False


def _read_together(prefilled: Prefilled, tokens: NDArray[np.int64]) -> tuple[torch.Tensor, bool]:
    """Read all but the last token of the text as an accepted draft with rejected nodes, then the last."""
    trees = takes_trees(prefilled.model, prefilled.memory, prefilled.model_kwargs)
    forward = TreeForward(prefilled) if trees else ChainForward(prefilled)
    first, *path, last = tokens[PROMPT:].tolist()
    wrong = int(tokens[0])
    drafted: list[int] = []
    parents: list[int] = []
    rows = [0]
    for token in path:
        if trees:
            drafted.append(wrong)
            parents.append(rows[-1] - 1)
        drafted.append(token)
        parents.append(rows[-1] - 1)
        rows.append(len(drafted))
    drafted.append(wrong)
    parents.append(rows[-1] - 1)
    tree = DraftTree(
        np.array(drafted, np.int32), np.array(parents, np.int16), np.zeros(len(drafted), np.uint8)
    )
    prefilled.text.extend([first])
    logits = _run(forward, [first, *drafted], tree)[rows]
    forward.keep(rows)
    prefilled.text.extend([*path, last])
    logits = torch.cat([logits, _run(forward, [last], DraftTree.empty())])
    forward.keep([0])
    forward.close()
    return logits, trees


def _prefill(model: Any, input_ids: torch.Tensor, config: Any, kwargs: dict[str, Any]) -> Prefilled:
    """Read the prompt as plain generate does."""
    check_request(model, config, kwargs, drafting=True)
    outputs = model._prefill(input_ids, config, kwargs, is_first_iteration=True)
    kwargs = model._update_model_kwargs_for_generation(outputs, kwargs)
    cache: Any = kwargs.get("past_key_values")
    held = 0 if cache is None else int(cache.get_seq_length())
    if held != PROMPT:
        raise _CacheError(
            f"holds {held} tokens in its cache after it has read {PROMPT}"
            if held
            else "keeps no cache of a text"
        )
    return Prefilled(model, rollback_cache(cache), kwargs, Text(input_ids))


def _run(forward: Forward, tokens: list[int], tree: DraftTree) -> torch.Tensor:
    """Return the logits of a pass, on the host."""
    rows = forward.run(np.array(tokens, np.int64), tree, Wants(best=False))
    return torch.cat([rows.logits(row) for row in range(len(tokens))]).cpu().clone()
