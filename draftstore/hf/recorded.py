"""Recomputed hidden states of recorded outputs, as queries of dense stores in a replay."""

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from draftstore.decoding.replay import Recording
from draftstore.hf.states import last_states

TOGETHER = 16
"""Recordings whose states are in memory at a time."""


def with_states(model: Any, recordings: Iterable[Recording]) -> Iterator[Recording]:
    """Yield recordings with the states that predicted their outputs, in order.

    The model reads prompt and output at once. It must be the model that made the outputs, otherwise the states are not
    those of decoding.

    Args:
        model: model of transformers, on its device.
        recordings: any number; a few are read ahead.

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
    """Add its states to a recording."""
    wanted = len(recording.output)
    if wanted == 0 or states is None:
        return recording
    hidden = np.full((wanted, states.shape[1]), np.nan, np.float32)
    known = states[-wanted:]  # without a prompt, the first token has no state
    hidden[wanted - len(known) :] = known
    return dataclasses.replace(recording, hidden=hidden)
