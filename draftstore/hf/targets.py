"""A causal language model of transformers as a `Target` of `draftstore.decoding`.

    ModelTarget     knows the text and how tokens are chosen; the same for every model
      Forward       runs the pass and keeps its cache
        TreeForward   any rows of a tree: full attention, `DynamicCache` or `StaticCache`
        ChainForward  one chain: sliding windows and whatever else can only be made shorter

**The seam for other ways to run the pass** (CUDA graphs, static buffers): implement `Forward`, and give
`speculative_generate` a function from `Prefilled` to it as `forward=`. A pass gets the token of every row (row 0 the
text's last token, row i + 1 node i), and the tree, of which `draftstore.hf.masks.shape_of` derives mask and
positions. It appends a row each to the cache behind the `length` tokens that are there, and returns a `Pass`. Then
`keep` is called once, with the rows that stay, ascending, row 0 first, or with none, which undoes the pass. `room`
says before each pass how many nodes it may have: smaller trees than were drafted are asked for then. A `Pass` is
not used once the next one runs, so its tensors may lie in buffers that are used again.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask

from draftstore.acceptance import Acceptance
from draftstore.errors import DecodingError
from draftstore.hf.caches import Memory
from draftstore.hf.choosing import Chooser, Text
from draftstore.hf.masks import attention_bias, block_mask, padding_bias, shape_of
from draftstore.tree import DraftTree

CANDIDATES = 8
"""Most likely tokens that a row tells drafters."""


class Wants(NamedTuple):
    """What a pass is asked for beside its logits.

    Attributes:
        best: the most likely token of every row.
        candidates: the 8 most likely tokens of every row.
        hidden: the last hidden state of every row.
        layers: the hidden states of every layer.
    """

    best: bool = True
    candidates: bool = False
    hidden: bool = False
    layers: bool = False


class Pass(Protocol):
    """What a forward pass over n + 1 rows yields. It is on the device until it is asked for."""

    def best(self) -> Sequence[int]:
        """Return [n + 1], the most likely token at each row, the lowest id among equals as float32."""

    def candidates(self) -> NDArray[np.int32]:
        """Return int32 [n + 1, 8], the most likely tokens at each row, best first, -1 where there are fewer."""

    def logits(self, row: int) -> torch.Tensor:
        """Return [1, vocabulary], the raw logits at a row, on the device."""

    def hidden(self, row: int) -> NDArray[np.float32] | None:
        """Return float32 [d], the hidden state after the final norm at a row; None if it is not known."""

    def layers(self, row: int) -> tuple[torch.Tensor, ...]:
        """Return [1, 1, d] of each layer: the hidden states at a row, as `output_hidden_states` gives them."""


class Forward(Protocol):
    """Runs forward passes of one text and keeps its cache; see the module's description.

    Attributes:
        trees: whether passes may have any tree; else only a chain.
    """

    trees: bool

    def room(self) -> int | None:
        """Return how many nodes the next pass may have; None for any number."""

    def run(self, tokens: NDArray[np.int64], tree: DraftTree, wants: Wants) -> Pass:
        """Run a pass.

        Args:
            tokens: int64 [n + 1], of every row.
            tree: of n nodes, no more than `room`.
            wants: what will be asked for.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Keep some rows of the last pass in the cache: ascending, row 0 first; none undoes the pass."""

    def close(self) -> None:
        """Leave the cache as plain decoding leaves it."""


@dataclasses.dataclass
class Prefilled:
    """Where the prefill has left a model: its cache holds the prompt, and the first token has been emitted.

    Attributes:
        model: of transformers.
        memory: its cache.
        model_kwargs: what plain generate would go on with, `past_key_values`, `attention_mask` (None without padding)
            and `position_ids` (int [1, any], the last is that of the next row) among it.
        text: prompt and first token.
    """

    model: Any
    memory: Memory
    model_kwargs: dict[str, Any]
    text: Text


class Rows:
    """A `Pass` over logits that lie in one tensor."""

    def __init__(
        self,
        logits: torch.Tensor,
        wants: Wants,
        hidden: torch.Tensor | None = None,
        layers: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        """Queue what was asked for.

        Args:
            logits: [n + 1, vocabulary].
            wants: what will be asked for.
            hidden: [n + 1, d], the last hidden states.
            layers: of each layer [1, n + 1, d]. A single row takes all of them, as that of the prefill does in plain
                generate.
        """
        self._logits = logits
        self._hidden = hidden
        self._layers = layers
        self._choices = choices(logits, wants)
        self._offset = int(wants.best)
        self._best: list[int] | None = None
        self._host: NDArray[np.int64] | None = None

    def best(self) -> list[int]:
        """Return the most likely tokens; see `Pass`."""
        if self._best is None:
            self._best = self._fetch()[:, 0].tolist()
        return self._best

    def candidates(self) -> NDArray[np.int32]:
        """Return the top 8; see `Pass`."""
        return self._fetch()[:, self._offset :].astype(np.int32)

    def _fetch(self) -> NDArray[np.int64]:
        """Copy everything that was asked for to the host, at once."""
        if self._host is None:
            assert self._choices is not None, "asked for what was not wanted"
            self._host = self._choices.cpu().numpy()
        return self._host

    def logits(self, row: int) -> torch.Tensor:
        """Return the logits of a row; see `Pass`."""
        return self._logits[row : row + 1]

    def hidden(self, row: int) -> NDArray[np.float32] | None:
        """Return the hidden state of a row; see `Pass`."""
        if self._hidden is None:
            return None
        vector: NDArray[np.float32] = self._hidden[row].float().cpu().numpy()
        return vector

    def layers(self, row: int) -> tuple[torch.Tensor, ...]:
        """Return the hidden states of a row; see `Pass`."""
        assert self._layers is not None, "asked for what was not wanted"
        if len(self._logits) == 1:
            return self._layers
        return tuple(layer[:, row : row + 1] for layer in self._layers)


def choices(logits: torch.Tensor, wants: Wants) -> torch.Tensor | None:
    """Return int64 [n + 1, any], the most likely token and the candidates of every row, as far as they are wanted.

    Args:
        logits: [n + 1, vocabulary].
        wants: what is wanted.
    """
    if logits.dtype == torch.float64:  # plain generate compares as float32, in which more of them are equal
        logits = logits.float()
    columns = [torch.argmax(logits, dim=-1, keepdim=True)] if wants.best else []
    if wants.candidates:
        known = min(CANDIDATES, logits.shape[-1])
        columns.append(torch.topk(logits, known, dim=-1).indices)
        if known < CANDIDATES:
            columns.append(columns[-1].new_full((len(logits), CANDIDATES - known), -1))
    if not columns:
        return None
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)


class TreeForward:
    """Passes over trees, for models in which every layer attends to the whole text."""

    trees = True

    def __init__(self, prefilled: Prefilled) -> None:
        """Go on behind a prefill."""
        kwargs = prefilled.model_kwargs
        self._model = prefilled.model
        self._memory = prefilled.memory
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
        self._rows = 0

    def room(self) -> int | None:
        """Return the nodes that the cache can take; see `Forward`."""
        room = self._memory.room()
        return None if room is None else room - 1

    def run(self, tokens: NDArray[np.int64], tree: DraftTree, wants: Wants) -> Rows:
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
        with last_hidden(self._model, wants.hidden) as hidden:
            outputs = self._model(
                input_ids=ids, attention_mask=mask, position_ids=positions, return_dict=True, **self._kwargs
            )
        return rows_of(outputs, self._rows, wants, hidden)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep rows; see `Forward`."""
        self._memory.keep(self._rows, rows)

    def close(self) -> None:
        """Leave the cache as it should be; see `Forward`."""
        self._memory.close()


class ChainForward:
    """Passes over chains, for caches that can be made shorter; the model is called as plain generate calls it."""

    trees = False

    def __init__(self, prefilled: Prefilled) -> None:
        """Go on behind a prefill."""
        self._model = prefilled.model
        self._memory = prefilled.memory
        self._text = prefilled.text
        self._kwargs = prefilled.model_kwargs
        self._rows = 0

    def room(self) -> int | None:
        """Return the nodes that the cache can take; see `Forward`."""
        room = self._memory.room()
        if not self._memory.drafts:
            return 0
        return None if room is None else room - 1

    def run(self, tokens: NDArray[np.int64], tree: DraftTree, wants: Wants) -> Rows:
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
        return rows_of(outputs, self._rows, wants, hidden)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep rows, which are the first ones; see `Forward`."""
        self._memory.keep(self._rows, rows)
        if rows:
            self._kwargs = self._model._update_model_kwargs_for_generation(
                {}, self._kwargs, num_new_tokens=len(rows)
            )

    def close(self) -> None:
        """Leave the cache as it should be; see `Forward`."""
        self._memory.close()


@contextmanager
def last_hidden(model: Any, wanted: bool = True) -> Iterator[list[torch.Tensor]]:
    """Catch what the model's head is given: the last hidden states, after the final norm.

    Yields:
        a list that takes [1, rows, d] for every forward pass inside the block; it stays empty if they are not wanted or
        the model has no head of its own.
    """
    caught: list[torch.Tensor] = []
    head = model.get_output_embeddings() if wanted else None
    if head is None:
        yield caught
        return
    handle = head.register_forward_pre_hook(lambda _head, inputs: caught.append(inputs[0]))
    try:
        yield caught
    finally:
        handle.remove()


def rows_of(outputs: Any, rows: int, wants: Wants, hidden: Sequence[torch.Tensor] = ()) -> Rows:
    """Return the last rows of what a model returned.

    Args:
        outputs: of the model, for one text.
        rows: how many.
        wants: what will be asked for.
        hidden: what `last_hidden` caught.
    """
    return Rows(
        outputs.logits[0, -rows:],
        wants,
        hidden[-1][0, -rows:] if hidden else None,
        outputs.hidden_states if wants.layers else None,
    )


class ModelVerdict:
    """What the model says of a tree: a `Verdict`."""

    def __init__(self, rows: Pass, chooser: Chooser, wants: Wants) -> None:
        """Answer from a pass."""
        self._rows = rows
        self._chooser = chooser
        self._wants = wants

    def choose(self, row: int, emitted: Sequence[int]) -> int:
        """Return the token that the model emits at a row."""
        return self._chooser.choose(self._rows, row, emitted)

    def candidates(self) -> NDArray[np.int32] | None:
        """Return int32 [n + 1, 8], the most likely tokens at each row."""
        return self._rows.candidates() if self._wants.candidates else None

    def hidden(self, row: int) -> NDArray[np.float32] | None:
        """Return float32 [d], the last hidden state at a row."""
        return self._rows.hidden(row) if self._wants.hidden else None


class ModelTarget:
    """A model with a text: a `Target`."""

    def __init__(self, forward: Forward, chooser: Chooser, text: Text, vocab_size: int) -> None:
        """Decode a text.

        Args:
            forward: runs the passes.
            chooser: of tokens.
            text: all but its last token are in the cache.
            vocab_size: ids that the model knows.
        """
        self._forward = forward
        self._chooser = chooser
        self._text = text
        self._vocab_size = vocab_size
        self._wants = Wants(best=chooser.greedy, layers=chooser.layers is not None)
        self._pending = False

    def ask(self, *, candidates: bool, hidden: bool) -> None:
        """Have every pass tell what a drafter's session needs."""
        self._wants = self._wants._replace(candidates=candidates, hidden=hidden)

    def verify(self, tree: DraftTree) -> ModelVerdict:
        """Run one forward pass over the text's last token and a tree.

        Raises:
            DecodingError: a drafted token is not in the model's vocabulary.
        """
        tokens = np.empty(len(tree) + 1, np.int64)
        tokens[0] = self._text.ids[-1]
        tokens[1:] = tree.tokens
        if len(tree) and not 0 <= int(tree.tokens.min()) <= int(tree.tokens.max()) < self._vocab_size:
            wrong = next(token for token in tree.tokens.tolist() if not 0 <= token < self._vocab_size)
            raise DecodingError(
                f"the drafter proposes token {wrong}, expected an id that the model knows, below {self._vocab_size:,}: "
                "use a store that was built with the model's own tokenizer"
            )
        self._pending = True
        return ModelVerdict(self._forward.run(tokens, tree, self._wants), self._chooser, self._wants)

    def keep(self, accepted: Acceptance) -> None:
        """Take what was accepted into the text, and its rows into the cache."""
        self._forward.keep([0, *(node + 1 for node in accepted.path)])
        self._text.extend(accepted.tokens.tolist())
        self._pending = False

    def close(self) -> None:
        """Leave the cache as plain decoding leaves it; a pass of which nothing was kept is undone."""
        if self._pending:
            self._forward.keep(())
        self._forward.close()
