"""Whether an output is that of plain decoding, and if not, whether rounding excuses it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

EXCUSED = 1e-4
"""A difference is excused where the two largest logits lie no further apart."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where an output parts from that of plain decoding.

    Attributes:
        place: of the first token that differs, in the output.
        expected: the token of plain decoding; -1 if it had ended.
        found: the other token; -1 if that output had ended.
        margin: between the two largest logits there, computed by one pass over the whole text.
    """

    place: int
    expected: int
    found: int
    margin: float

    @property
    def excused(self) -> bool:
        """Whether rounding explains it."""
        return self.margin <= EXCUSED and self.expected >= 0 and self.found >= 0


def compare(
    model: Any, prompt: NDArray[np.int32], expected: Sequence[int], found: Sequence[int]
) -> Difference | None:
    """Return where two outputs of one prompt part; None if they are the same.

    Args:
        model: of transformers, that which decoded.
        prompt: int32 [n].
        expected: ids of plain decoding.
        found: ids of another way.
    """
    longest = max(len(expected), len(found))
    pairs = zip(_padded(expected, longest), _padded(found, longest), strict=True)
    place = next((i for i, (left, right) in enumerate(pairs) if left != right), None)
    if place is None:
        return None
    margin = margin_at(model, np.concatenate([prompt, np.array(expected[:place], np.int32)]))
    left, right = _padded(expected, longest)[place], _padded(found, longest)[place]
    return Difference(place, left, right, margin)


def margin_at(model: Any, text: NDArray[np.int32]) -> float:
    """Return how far apart the two largest logits are that predict what follows a text, int32 [n]."""
    import torch

    with torch.inference_mode():
        ids = torch.from_numpy(text.astype(np.int64))[None].to(model.device)
        logits = model(ids, logits_to_keep=1).logits[0, -1].float()
        first, second = logits.topk(2).values.tolist()
    return float(first - second)


def _padded(tokens: Sequence[int], size: int) -> list[int]:
    return [*tokens, *[-1] * (size - len(tokens))]
