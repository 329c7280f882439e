"""The token that the model emits at a row: what plain `generate` does with one row of logits, for each visited node.

`Text` is what has been decoded so far, in the two forms that are needed: numbers for drafters, and the tensor that
logits processors and stopping criteria get, each at its own prefix.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from draftstore.errors import DecodingError, ProbabilityError

if TYPE_CHECKING:
    from draftstore.hf.passes import Pass

SPARE = 256
"""Tokens that the buffer of a text grows by."""


class Text:
    """The ids of a text that grows: those of the prompt, and what was emitted.

    Attributes:
        ids: every id, padding of the prompt too.
    """

    def __init__(self, input_ids: torch.Tensor) -> None:
        """Start from a prompt, int [1, length]."""
        self.ids: list[int] = input_ids[0].tolist()
        self._buffer = input_ids.long()  # as plain generate returns it
        self._written = len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what was emitted."""
        self.ids.extend(tokens)

    def tensor(self, emitted: Sequence[int] = ()) -> torch.Tensor:
        """Return int64 [1, length], the text and what has been emitted behind it, on the device of the prompt.

        It is a view of a buffer that is only ever appended to, so it keeps its content.

        Args:
            emitted: tokens that will be taken in by `extend` unless decoding fails.
        """
        length = len(self.ids) + len(emitted)
        if length > self._buffer.shape[1]:
            grown = self._buffer.new_empty(1, length + max(SPARE, length // 2))
            grown[:, : self._written] = self._buffer[:, : self._written]
            self._buffer = grown
        if length > self._written:
            fresh = [*self.ids[self._written :], *emitted[max(0, self._written - len(self.ids)) :]]
            self._buffer[0, self._written : length] = torch.tensor(fresh)
            self._written = length
        return self._buffer[:, :length]


class Chooser:
    """Chooses tokens from rows of logits.

    Attributes:
        greedy: whether the choice is the most likely token of the raw logits, so that a pass may settle it for all its
            rows at once, on the device.
        scores: [1, vocabulary] for every emitted token, after the processors; None if they were not asked for.
        logits: the same before the processors.
        layers: the hidden states of every layer for every emitted token; None if they were not asked for.
    """

    def __init__(
        self,
        text: Text,
        processors: Any,
        *,
        sample: bool = False,
        scores: bool = False,
        logits: bool = False,
        layers: bool = False,
    ) -> None:
        """Choose with the logits processors of a request.

        Args:
            text: what is being decoded.
            processors: a `LogitsProcessorList`.
            sample: draw, instead of taking the most likely token.
            scores: whether to collect the scores, like the next two.
            logits: raw logits.
            layers: hidden states.
        """
        self._text = text
        self._processors = processors
        self._sample = sample
        self.greedy = not sample and not scores and not logits and len(processors) == 0
        self.scores: tuple[torch.Tensor, ...] | None = () if scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if logits else None
        self.layers: tuple[tuple[torch.Tensor, ...], ...] | None = () if layers else None

    def choose(self, rows: "Pass", row: int, emitted: Sequence[int]) -> int:
        """Return the token that the model emits at a row; see `draftstore.decoding.acceptance.Choose`."""
        if self.layers is not None:
            self.layers += (rows.layers(row),)
        return rows.best()[row] if self.greedy else self._process(rows.logits(row), emitted)

    def _process(self, logits: torch.Tensor, emitted: Sequence[int]) -> int:
        """Do with one row of logits, [1, vocabulary], what plain generate does, step by step in its order.

        Raises:
            ProbabilityError: the processors leave no finite probabilities to draw from.
            DecodingError: the model's logits are not finite.
        """
        ids = self._text.tensor(emitted)
        logits = logits.to(copy=True, dtype=torch.float32, device=ids.device)
        scores = self._processors(ids, logits)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        if not self._sample:
            return int(torch.argmax(scores, dim=-1))
        probs = torch.nn.functional.softmax(scores, dim=-1)
        if not probs.isfinite().all():  # a GPU would not survive to draw from them
            if torch.nn.functional.softmax(logits, dim=-1).isfinite().all():
                raise ProbabilityError(
                    "the settings leave no finite probabilities: use milder penalties, biases or a higher temperature"
                )
            raise DecodingError("the model's logits are not finite: load it with another dtype")
        return int(torch.multinomial(probs, num_samples=1))
