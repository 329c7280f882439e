"""Answers to many prompts at once: left-padded batches through plain `generate` of transformers.

Random numbers belong to an answer, not to a batch: grouping into batches and interruptions change samples only by
rounding.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from draftstore.errors import ModelError
from draftstore.hf.loading import LoadedModel

HEADS = (128, 2048)
"""Numbers of top tokens to sort when searching for a nucleus: tried in turn, then the whole vocabulary."""


class Choice(NamedTuple):
    """Sampling settings.

    Attributes:
        max_new_tokens: maximum tokens of an answer.
        temperature: 0 takes the most likely token.
        top_p: probability mass of nucleus sampling.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0


class Row(NamedTuple):
    """One answer to decode.

    Attributes:
        prompt: int32 [n].
        seed: seed of its random numbers; non-negative integers.
    """

    prompt: NDArray[np.int32]
    seed: tuple[int, ...] = ()


class Batches:
    """Decodes rows in batches; halves the batch size permanently when device memory runs out."""

    def __init__(
        self,
        loaded: LoadedModel,
        choice: Choice,
        most: int,
        on_tokens: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Prepare for a model.

        Args:
            loaded: the model.
            choice: sampling settings.
            most: maximum rows per batch.
            on_tokens: called after every pass with the number of answers that grew.
        """
        self.most = most
        self._loaded, self._choice, self._on_tokens = loaded, choice, on_tokens

    def decode(self, rows: Sequence[Row]) -> Iterator[list[list[int]]]:
        """Yield the answers batch by batch, without their end tokens.

        Raises:
            ModelError: not even one row fits into device memory.
        """
        done = 0
        while done < len(rows):
            part = rows[done : done + self.most]
            answers = self._attempt(part)
            if answers is not None:
                done += len(part)
                yield answers
            elif len(part) == 1:
                raise ModelError(
                    f"a prompt of {len(part[0].prompt):,} tokens and an answer do not fit into the memory of "
                    f"{self._loaded.model.device}: use a smaller --dtype, or skip long prompts with --max-prompt-tokens"
                )
            else:
                self.most = len(part) // 2
                gc.collect()
                torch.cuda.empty_cache()

    def _attempt(self, rows: Sequence[Row]) -> list[list[int]] | None:
        """Return the answers, or None if memory runs out."""
        try:
            return decode_rows(self._loaded, rows, self._choice, self._on_tokens)
        except torch.OutOfMemoryError:
            return None  # memory held by the traceback is freed only after this block


@torch.inference_mode()
def decode_rows(
    loaded: LoadedModel,
    rows: Sequence[Row],
    choice: Choice,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> list[list[int]]:
    """Return the answers to one batch of rows, without their end tokens."""
    model: Any = loaded.model
    ends = loaded.ends
    width = max(len(row.prompt) for row in rows)
    padding = ends[0] if ends else 0
    ids = np.full((len(rows), width), padding, np.int64)
    for place, row in zip(ids, rows, strict=True):
        place[width - len(row.prompt) :] = row.prompt
    mask = np.stack([np.arange(width) >= width - len(row.prompt) for row in rows]).astype(np.int64)
    chooser = _Chooser(rows, width, choice, padding, on_tokens)
    output = model.generate(
        torch.from_numpy(ids).to(model.device),
        attention_mask=torch.from_numpy(mask).to(model.device),
        logits_processor=LogitsProcessorList([chooser]),
        max_new_tokens=choice.max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=padding,
        # Otherwise transformers warns that the model's sampling settings are ignored.
        do_sample=False, temperature=None, top_p=None, top_k=None,
    )  # fmt: skip
    return [_until_end(answer, frozenset(ends)) for answer in output[:, width:].tolist()]


def _until_end(answer: list[int], ends: frozenset[int]) -> list[int]:
    """Return an answer without its end token and the padding after it."""
    length = next((place for place, token in enumerate(answer) if token in ends), len(answer))
    return answer[:length]


class _Chooser(LogitsProcessor):
    """Restricts sampling to one drawn token; reports every pass."""

    def __init__(
        self, rows: Sequence[Row], width: int, choice: Choice, padding: int, on_tokens: Callable[[int], None]
    ) -> None:
        self._width, self._choice, self._padding, self._on_tokens = width, choice, padding, on_tokens
        if choice.temperature:
            draws = [np.random.default_rng(row.seed).random(choice.max_new_tokens) for row in rows]
            self._draws = torch.from_numpy(np.stack(draws))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1] - self._width
        self._on_tokens(int((input_ids[:, -1] != self._padding).sum()) if place else len(input_ids))
        if not self._choice.temperature:
            return scores
        numbers = self._draws[:, place].to(scores)
        tokens = draw(scores, numbers, self._choice.temperature, self._choice.top_p)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


def draw(scores: torch.Tensor, numbers: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Sample a token for each row by nucleus sampling with mass `top_p`.

    Args:
        scores: float [rows, vocabulary], logits.
        numbers: float [rows], in [0, 1).
        temperature: above 0.
        top_p: 1 samples from all tokens.

    Returns:
        int64 [rows].
    """
    probs = torch.softmax(scores / temperature, -1)
    if top_p >= 1:
        return _pick(probs.cumsum(-1), numbers, probs > 0)
    vocabulary = probs.shape[1]
    for size in (*(head for head in HEADS if head < vocabulary), vocabulary):
        top, tokens = probs.topk(size)
        mass = top.cumsum(-1)
        if float(mass[:, -1].min()) >= top_p:
            break
    places = _pick(mass, numbers, (mass - top < top_p) & (top > 0))
    return tokens.gather(1, places[:, None])[:, 0]


def _pick(mass: torch.Tensor, numbers: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return the sampled index in each row, int64 [rows], by cumulative probabilities [rows, n] and numbers [rows]."""
    places = torch.arange(mass.shape[1], device=mass.device)
    last = torch.where(allowed, places, 0).amax(-1, keepdim=True)
    target = numbers[:, None] * mass.gather(1, last)
    return torch.minimum(torch.searchsorted(mass, target, right=True), last)[:, 0]
