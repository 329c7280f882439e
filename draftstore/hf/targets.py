"""A causal language model of transformers as a `Target` of `draftstore.decoding.loop`.

    ModelTarget     the text and the choice of tokens; the same for every model
      Forward       runs the pass and updates its cache
        TreeForward   any rows of a tree: full attention, `DynamicCache` or `StaticCache`
        ChainForward  one chain: sliding windows and other caches that can only be truncated

**Extension point for other ways to run a pass** (CUDA graphs, static buffers): implement `Forward`, and pass
`speculative_generate` a function from `Prefilled` to it as `forward=`. A pass gets the token of every row (row 0 is the
text's last token, row i + 1 is node i), and the tree, from which `draftstore.hf.masks.shape_of` derives mask and
positions. It appends one row each to the cache after its `length` tokens, and returns its `Rows`. Then `keep` is called
once, with the rows to keep, ascending, row 0 first, or with none, which undoes the pass. Before each pass `room` limits
its number of nodes. They are not used after the next pass runs, so its tensors may lie in reused buffers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask

from draftstore.decoding.acceptance import Acceptance
from draftstore.drafting.projection import Projection
from draftstore.errors import DecodingError
from draftstore.hf.attention import shared_keys
from draftstore.hf.caches import RollbackCache
from draftstore.hf.choosing import Chooser, Text
from draftstore.hf.masks import attention_bias, block_mask, padding_bias, shape_of
from draftstore.hf.passes import Pass, Rows, Wants, last_hidden, pass_of
from draftstore.trees.tree import DraftTree


class Forward(Protocol):
    """Runs forward passes of one text and updates its cache; see the module's description.

    Attributes:
        trees: whether passes may have any tree; otherwise only chains.
    """

    trees: bool

    def room(self) -> int | None:
        """Return the maximum nodes of the next pass; None: unlimited."""

    def run(self, tokens: NDArray[np.int64], tree: DraftTree, wants: Wants) -> Rows:
        """Run a pass.

        Args:
            tokens: int64 [n + 1], token of every row.
            tree: tree of n nodes, at most `room`.
            wants: outputs needed.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Keep some rows of the last pass in the cache: ascending, row 0 first; none undoes the pass."""

    def close(self) -> None:
        """Restore the cache's normal state."""


@dataclasses.dataclass
class Prefilled:
    """The state after the prefill: the cache holds the prompt, and the first token has been emitted.

    Attributes:
        model: model of transformers.
        memory: its cache.
        model_kwargs: arguments for the next pass, including `past_key_values`, `attention_mask` (None without padding)
            and `position_ids` (int [1, any], the last is that of the next row).
        text: prompt and first token.
    """

    model: Any
    memory: RollbackCache
    model_kwargs: dict[str, Any]
    text: Text


class _CacheForward:
    """The part of a `Forward` that updates a cache of transformers."""

    def __init__(self, prefilled: Prefilled) -> None:
        """Continue after a prefill."""
        self._model = prefilled.model
        self._memory = prefilled.memory
        self._rows = 0

    def room(self) -> int | None:
        """Return the maximum nodes for the cache; see `Forward`."""
        room = self._memory.room()
        if not self._memory.drafts:
            return 0
        return None if room is None else room - 1

    def keep(self, rows: Sequence[int]) -> None:
        """Keep rows; see `Forward`."""
        self._memory.keep(self._rows, rows)

    def close(self) -> None:
        """Restore the cache's normal state; see `Forward`."""
        self._memory.close()


class TreeForward(_CacheForward):
    """Passes over trees, for models in which every layer attends to the whole text."""

    trees = True

    def __init__(self, prefilled: Prefilled) -> None:
        """Continue after a prefill."""
        super().__init__(prefilled)
        kwargs = prefilled.model_kwargs
        self._device = prefilled.model.device
        self._like = torch.empty(0, dtype=prefilled.model.dtype, device=self._device)
        self._shift = int(kwargs["position_ids"][0, -1]) - self._memory.length
        self._padding = padding_bias(kwargs.get("attention_mask"), self._memory.length, self._like)
        attention = prefilled.model.config.get_text_config(decoder=True)._attn_implementation
        self._flex = attention == "flex_attention"
        self._masked = self._flex or self._padding is not None or self._memory.room() is not None
        self._kwargs = {
            key: value
            for key, value in kwargs.items()
            if key not in ("attention_mask", "position_ids", "logits_to_keep", "inputs_embeds")
        }

    def run(self, tokens: NDArray[np.int64], tree: DraftTree, wants: Wants) -> Pass:
        """Run a pass; see `Forward`."""
        self._rows = len(tokens)
        past = self._memory.length
        ids = torch.from_numpy(tokens).to(self._device)[None]
        shape = shape_of(tree)
        positions = torch.from_numpy(shape.offsets + (past + self._shift)).to(self._device)[None]
        mask: torch.Tensor | BlockMask | None = None
        if len(tree) or self._masked:
            width = self._memory.width(self._rows)
            if self._flex:
                mask = block_mask(shape, past, width, self._padding, self._device)
            else:
                mask = attention_bias(shape, past, width, self._padding, self._like)
        with shared_keys(), last_hidden(self._model, wants.hidden) as hidden:
            outputs = self._model(
                input_ids=ids, attention_mask=mask, position_ids=positions, return_dict=True, **self._kwargs
            )
        return pass_of(outputs, self._rows, wants, hidden)


class ChainForward(_CacheForward):
    """Passes over chains, for caches that can be truncated; the model is called as plain generate calls it."""

    trees = False

    def __init__(self, prefilled: Prefilled) -> None:
        """Continue after a prefill."""
        super().__init__(prefilled)
        self._text = prefilled.text
        self._kwargs = prefilled.model_kwargs

    def run(self, tokens: NDArray[np.int64], tree: DraftTree, wants: Wants) -> Pass:
        """Run a pass; see `Forward`."""
        self._rows = len(tokens)
        kwargs = self._kwargs
        if len(tree):
            kwargs = self._model._update_model_kwargs_for_generation(
                {}, dict(kwargs), num_new_tokens=len(tree)
            )
        ids = self._text.tensor()
        ids = torch.cat([ids, torch.from_numpy(tokens[None, 1:]).to(ids.device)], dim=-1)
        inputs = self._model.prepare_inputs_for_generation(ids, next_sequence_length=self._rows, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = self._rows
        with last_hidden(self._model, wants.hidden) as hidden:
            outputs = self._model(**inputs, return_dict=True)
        return pass_of(outputs, self._rows, wants, hidden)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the first rows; see `Forward`."""
        super().keep(rows)
        if rows:
            self._kwargs = self._model._update_model_kwargs_for_generation(
                {}, self._kwargs, num_new_tokens=len(rows)
            )


ForwardFactory = Callable[[Prefilled], Forward]


class ModelVerdict:
    """The model's outputs for a tree: a `Verdict`."""

    def __init__(
        self, rows: Rows, chooser: Chooser, wants: Wants, projection: Projection | None = None
    ) -> None:
        """Wrap a pass; with a projection, hidden states are projected on the device."""
        self._rows = rows
        self._chooser = chooser
        self._wants = wants
        self._projection = projection

    def choose(self, row: int, emitted: Sequence[int]) -> int:
        """Return the token that the model emits at a row."""
        return self._chooser.choose(self._rows, row, emitted)

    def candidates(self) -> NDArray[np.int32] | None:
        """Return int32 [n + 1, 8], the most likely tokens at each row."""
        return self._rows.candidates() if self._wants.candidates else None

    def hidden(self, row: int) -> NDArray[np.float32] | None:
        """Return float32 [d], the last hidden state at a row, projected if there is a projection."""
        return self._rows.hidden(row, self._projection) if self._wants.hidden else None


class ModelTarget:
    """A model with a text: a `Target`."""

    def __init__(self, forward: Forward, chooser: Chooser, text: Text, vocab_size: int) -> None:
        """Decode a text.

        Args:
            forward: runs the passes.
            chooser: chooses tokens.
            text: all but its last token are in the cache.
            vocab_size: size of the model's vocabulary.
        """
        self._forward = forward
        self._chooser = chooser
        self._text = text
        self._vocab_size = vocab_size
        self._wants = Wants(best=chooser.greedy, layers=chooser.layers is not None)
        self._projection: Projection | None = None
        self._pending = False

    def ask(self, *, candidates: bool, hidden: bool, projection: Projection | None = None) -> None:
        """Set the outputs that a drafter's session needs from every pass, hidden states projected if requested."""
        self._wants = self._wants._replace(candidates=candidates, hidden=hidden)
        self._projection = projection

    def verify(self, tree: DraftTree) -> ModelVerdict:
        """Run one forward pass over the text's last token and a tree.

        Raises:
            DecodingError: a drafted token is not in the model's vocabulary.
        """
        tokens = row_tokens(self._text.ids[-1], tree, self._vocab_size)
        self._pending = True
        rows = self._forward.run(tokens, tree, self._wants)
        return ModelVerdict(rows, self._chooser, self._wants, self._projection)

    def keep(self, accepted: Acceptance) -> None:
        """Append accepted tokens to the text, and keep their rows in the cache."""
        self._forward.keep([0, *(node + 1 for node in accepted.path)])
        self._text.extend(accepted.tokens.tolist())
        self._pending = False

    def close(self) -> None:
        """Restore the cache's normal state; a pass without kept rows is undone."""
        if self._pending:
            self._forward.keep(())
        self._forward.close()


def row_tokens(last: int, tree: DraftTree, vocab_size: int) -> NDArray[np.int64]:
    """Return int64 [n + 1], the tokens that a pass over a text's last token and a tree reads."""
    tokens = np.empty(len(tree) + 1, np.int64)
    tokens[0] = last
    tokens[1:] = tree.tokens
    if len(tree) and not 0 <= int(tree.tokens.min()) <= int(tree.tokens.max()) < vocab_size:
        wrong = next(token for token in tree.tokens.tolist() if not 0 <= token < vocab_size)
        raise DecodingError(
            f"the drafter proposes token {wrong}, expected an id that the model knows, below {vocab_size:,}: "
            "use a store that was built with the model's own tokenizer"
        )
    return tokens


def vocab_size(model: Any) -> int:
    """Return the size of a model's vocabulary."""
    return int(model.config.get_text_config(decoder=True).vocab_size)
