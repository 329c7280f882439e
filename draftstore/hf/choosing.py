"""Choice of the token that the model emits at a row, exactly as plain `generate` does, for each visited node.

`Text` is the decoded text in two forms: numbers for drafters, and tensors of each prefix for logits processors and
stopping criteria.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from draftstore.errors import DecodingError, ProbabilityError

if TYPE_CHECKING:
    from draftstore.hf.passes import Rows

SPARE = 256
"""Growth of a text's buffer in tokens."""


class Text:
    """The ids of a growing text: prompt and emitted tokens.

    Attributes:
        ids: all ids, including padding of the prompt.
    """

    def __init__(self, input_ids: torch.Tensor) -> None:
        """Start from a prompt, int [1, length]."""
        self.ids: list[int] = input_ids[0].tolist()
        self._buffer = input_ids.long()  # as plain generate returns it
        self._written = len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append emitted tokens."""
        self.ids.extend(tokens)

    def tensor(self, emitted: Sequence[int] = ()) -> torch.Tensor:
        """Return int64 [1, length], the text followed by `emitted`, on the device of the prompt.

        It is a view of an append-only buffer, so its content stays valid.

        Args:
            emitted: tokens that `extend` will append later unless decoding fails.
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
        greedy: whether the choice is the argmax of the raw logits, which a pass can compute for all rows at once, on
            the device.
        scores: [1, vocabulary] for every emitted token, after the processors; None if not requested.
        logits: the same before the processors.
        layers: hidden states of every layer for every emitted token; None if not requested.
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
        random: torch.Generator | None = None,
    ) -> None:
        """Choose with the logits processors of a request.

        Args:
            text: the text being decoded.
            processors: a `LogitsProcessorList`.
            sample: whether to sample instead of taking the most likely token.
            scores: whether to collect the scores.
            logits: whether to collect raw logits.
            layers: whether to collect hidden states.
            random: source of random numbers; None: torch's own.
        """
        self._text = text
        self._processors = processors
        self._sample = sample
        self._random = random
        self.greedy = not sample and not scores and not logits and len(processors) == 0
        self.scores: tuple[torch.Tensor, ...] | None = () if scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if logits else None
        self.layers: tuple[tuple[torch.Tensor, ...], ...] | None = () if layers else None

    def choose(self, rows: "Rows", row: int, emitted: Sequence[int]) -> int:
        """Return the token that the model emits at a row; see `draftstore.decoding.acceptance.Choose`."""
        if self.layers is not None:
            self.layers += (rows.layers(row),)
        return rows.best()[row] if self.greedy else self._process(rows.logits(row), emitted)

    def _process(self, logits: torch.Tensor, emitted: Sequence[int]) -> int:
        """Process one row of logits, [1, vocabulary], with the same steps in the same order as plain generate."""
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
        if probs[0, 0].isnan():  # then all are, and a GPU would not survive to draw from them
            if not torch.nn.functional.softmax(logits, dim=-1)[0, 0].isnan():
                raise ProbabilityError(
                    "the settings leave no finite probabilities: use milder penalties, biases or a higher temperature"
                )
            raise DecodingError("the model's logits are not finite: load it with another dtype")
        return int(torch.multinomial(probs, num_samples=1, generator=self._random))
