"""The hidden states of recorded outputs, computed again: what dense stores are asked with when outputs are replayed."""

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from draftstore.decoding.replay import Recording
from draftstore.hf.states import last_states

TOGETHER = 16
"""Recordings whose states are held at once."""


def with_states(model: Any, recordings: Iterable[Recording]) -> Iterator[Recording]:
    """Yield recordings with the states that predicted their outputs, in their order.

    The model reads prompt and output at once. It must be the one that made the outputs, or drafts are asked for with
    states that no decoding would have.

    Args:
        model: of transformers, on its device.
        recordings: any number of them; a few are read ahead.

    Raises:
        ModelError: see `draftstore.hf.states.last_states`.
    """
    left = iter(recordings)
    while together := list(islice(left, TOGETHER)):
        texts = [np.concatenate([recording.prompt, recording.output[:-1]]) for recording in together]
        longest = max(map(len, texts))
        hidden = dict(last_states(model, texts, max_length=max(longest, 1)))
        for place, recording in enumerate(together):
            yield _with(recording, hidden.pop(place, None))


def _with(recording: Recording, states: Any) -> Recording:
    """Return a recording with its states.

    Args:
        recording: without.
        states: float32 [prompt + output - 1, hidden_size]; None where that is nothing.
    """
    wanted = len(recording.output)
    if wanted == 0 or states is None:
        return recording
    hidden = np.full((wanted, states.shape[1]), np.nan, np.float32)
    known = states[-wanted:]  # without a prompt, nothing predicted the first token
    hidden[wanted - len(known) :] = known
    return dataclasses.replace(recording, hidden=hidden)
