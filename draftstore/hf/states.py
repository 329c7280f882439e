"""The last hidden states of texts, which are the keys of dense stores.

    for index, states in StateReader(model).read(texts):    # in any order; float32 [tokens of the text, hidden size]

These are the inputs of the model's head, the same that `draftstore.hf.passes.last_hidden` captures during decoding,
but computed in batches and without the head.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from draftstore.decoding.replay import Recording
from draftstore.errors import ModelError
from draftstore.hf.loading import LoadedModel, positions_of
from draftstore.hf.passes import last_hidden
from draftstore.stores.dresd.kernels.passages import cut_windows
from draftstore.stores.dresd.projection import Projection

MAX_LENGTH = 1024
TOGETHER = 16
"""Recordings whose states are in memory at the same time."""
BATCH_TOKENS = 16_384
"""Default tokens of a batch, including padding."""
CPU_BATCH_TOKENS = 2_048
"""The same on CPUs: batches that fit into their caches are up to four times as fast."""
VOLATILE = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"})
"""Configuration keys that do not affect the model's output, or are recorded elsewhere."""


class _Window(NamedTuple):
    text: int
    start: int
    first: int
    stop: int


class StateReader:
    """Reads the states of one model."""

    def __init__(self, model: Any) -> None:
        """Prepare to run a model without its head; ModelError if it has no head of its own, or has an encoder."""
        self.model = model
        self._decode = _find_decoder(model)

    def read(
        self,
        texts: Sequence[NDArray[Any]],
        max_length: int = MAX_LENGTH,
        batch_tokens: int | None = None,
        projection: Projection | None = None,
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield index and states, float32 [n, size], of each non-empty text once, in batches of similar length.

        Batches depend only on texts and arguments, so two calls give the same bits on the same machine. A text longer
        than `max_length`, or than the model's positions, is read in windows that overlap by a quarter.

        Args:
            texts: int [n] each, with BOS if the model expects one.
            batch_tokens: maximum tokens of a batch, but at least one window. None: a default for the device.
            projection: applied on the device, so that only projected states are copied.
        """
        size = min(max_length, positions_of(self.model) or max_length)
        pieces = [
            _Window(index, *cut) for index, ids in enumerate(texts) for cut in cut_windows(len(ids), size)
        ]
        pieces.sort(key=lambda piece: piece.start - piece.stop)  # longest first; stable
        begun: dict[int, tuple[NDArray[np.float32], int]] = {}
        usual = CPU_BATCH_TOKENS if self.model.device.type == "cpu" else BATCH_TOKENS
        for batch in _batches(pieces, batch_tokens or usual):
            states = self._run([texts[piece.text][piece.start : piece.stop] for piece in batch], projection)
            for piece, rows in zip(batch, states, strict=True):
                length = len(texts[piece.text])
                text, missing = begun.pop(piece.text, (None, length))
                if text is None:
                    text = np.empty((length, rows.shape[1]), np.float32)
                text[piece.first : piece.stop] = rows[piece.first - piece.start : piece.stop - piece.start]
                missing -= piece.stop - piece.first
                if missing:
                    begun[piece.text] = text, missing
                else:
                    yield piece.text, text

    def _run(self, ids: list[NDArray[Any]], projection: Projection | None) -> NDArray[np.float32]:
        """Return float32 [texts, longest, size]; rows beyond the end of a shorter text are invalid."""
        # Padding is on the right, and no valid position attends to it: no mask is needed.
        longest = max(map(len, ids))
        padded = np.stack([np.pad(row, (0, longest - len(row)), "edge") for row in ids]).astype(np.int64)
        try:
            with torch.inference_mode():
                hidden = self._decode(torch.from_numpy(padded).to(self.model.device))
                states: NDArray[np.float32] = _project(hidden.float(), projection).cpu().numpy()
        except torch.OutOfMemoryError:
            raise ModelError(
                f"a batch of {padded.size:,} tokens needs more memory than the device has: use smaller batches or "
                "shorter windows",
                "batch_tokens",
                "max_length",
            ) from None
        return states


def _project(states: torch.Tensor, projection: Projection | None) -> torch.Tensor:
    """Return states [..., hidden_size] projected on their device, float32 [..., dims]; unchanged without projection."""
    if projection is None:
        return states
    weights, bias = (torch.tensor(array).to(states.device) for array in (projection.weights, projection.bias))
    return torch.nn.functional.linear(states, weights, bias)


def _find_decoder(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from ids [texts, n] to the inputs [texts, n, d] of the head."""
    # Use the decoder alone if the result is the same: some models scale the decoder's output before the head.
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ModelError(f"{name} has an encoder, expected a decoder-only model")
    if model.get_output_embeddings() is None:
        raise ModelError(
            f"{name} has no output layer of its own, but dense stores need the states that enter it"
        )

    def through_head(ids: torch.Tensor) -> torch.Tensor:
        with last_hidden(model) as caught:
            model(input_ids=ids, use_cache=False)
        return caught[-1]

    def decoder_alone(ids: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return states

    probe = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        same = model.base_model is not model and torch.allclose(
            through_head(probe), decoder_alone(probe), rtol=1e-3, atol=1e-3
        )
    return decoder_alone if same else through_head


def _batches(pieces: Sequence[_Window], batch_tokens: int) -> Iterator[list[_Window]]:
    """Yield pieces, sorted longest first, in batches of at most `batch_tokens` tokens, including padding."""
    begin = 0
    while begin < len(pieces):
        longest = pieces[begin].stop - pieces[begin].start
        end = begin + max(batch_tokens // longest, 1)
        yield list(pieces[begin:end])
        begin = end


def with_states(model: Any, recordings: Iterable[Recording]) -> Iterator[Recording]:
    """Yield recordings in order, with the states that predicted their outputs, from the model that made the outputs.

    A pass reads prompt and output of a few recordings together. ModelError as from `StateReader`.
    """
    reader, left = StateReader(model), iter(recordings)
    while together := list(islice(left, TOGETHER)):
        texts = [np.concatenate([recording.prompt, recording.output[:-1]]) for recording in together]
        longest = max(map(len, texts))
        hidden = dict(reader.read(texts, max(longest, 1)))
        for place, recording in enumerate(together):
            yield _with(recording, hidden.pop(place, None))


def _with(recording: Recording, states: Any) -> Recording:
    wanted = len(recording.output)
    if wanted == 0 or states is None:
        return recording
    hidden = np.full((wanted, states.shape[1]), np.nan, np.float32)
    known = states[-wanted:]  # without a prompt, the first token has no state
    hidden[wanted - len(known) :] = known
    return dataclasses.replace(recording, hidden=hidden)


class ModelStates:
    """A model as a source of states for `draftstore.stores.dresd.build`."""

    def __init__(self, loaded: LoadedModel, *, batch_tokens: int | None = None) -> None:
        """Read the states of a loaded model in batches of `batch_tokens` tokens; ModelError as from `StateReader`."""
        model: Any = loaded.model
        self._reader = StateReader(model)
        self._batch_tokens = batch_tokens
        self.name = loaded.name
        self.vocab_size = loaded.vocab_size
        self.hidden_size = int(model.get_output_embeddings().weight.shape[1])
        self.positions = loaded.positions

    def identity(self) -> dict[str, str]:
        """Return what determines the states: the weights' type and checksum, and the configuration."""
        model = self._reader.model
        return {"dtype": str(model.dtype).removeprefix("torch."), "weights": weights_digest(model)}

    def states(
        self, texts: Sequence[NDArray[Any]], projection: Projection | None = None
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield the states of texts; see `StateReader.read`."""
        longest = max(map(len, texts), default=1)
        return self._reader.read(texts, longest, self._batch_tokens, projection)


def weights_digest(model: Any) -> str:
    """Return a SHA-256 checksum that identifies a model regardless of its location and files.

    It covers the configuration and the name, shape, type and bit sum of each tensor. The sum is over integers, so it
    is exact and equal on every device; it is computed at memory bandwidth.
    """
    config = model.config.to_diff_dict()
    known = {key: value for key, value in config.items() if key not in VOLATILE}
    digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype} {_bit_sum(tensor)}\n".encode())
    return digest.hexdigest()


def _bit_sum(tensor: torch.Tensor) -> int:
    """Return the sum of a tensor's bits as 64-bit integers with wrap-around."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().flatten().view(integers.get(tensor.element_size(), torch.int8))
    return int(bits.sum(dtype=torch.int64))
