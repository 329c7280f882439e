"""Projection of hidden states to queries of dense stores on the device, so that only a few numbers are copied."""

import weakref

import torch

from draftstore.drafting.projection import Projection
from draftstore.errors import DecodingError

_Weights = tuple[torch.Tensor, torch.Tensor]
_KEPT: "weakref.WeakKeyDictionary[Projection, dict[torch.device, _Weights]]" = weakref.WeakKeyDictionary()


def project(projection: Projection, states: torch.Tensor) -> torch.Tensor:
    """Project hidden states in float32, whatever their type.

    Args:
        projection: projection of a dense store; its weights are copied to a device once.
        states: [..., hidden_size].

    Returns:
        float32 [..., dims], on the same device.

    Raises:
        DecodingError: the states have the wrong size.
    """
    if states.shape[-1] != projection.hidden_size:
        raise DecodingError(
            f"the model's hidden states have {states.shape[-1]:,} numbers, those of the store have "
            f"{projection.hidden_size:,}: use a store that was built with this model"
        )
    weights, bias = _weights_on(projection, states.device)
    return torch.nn.functional.linear(states.float(), weights, bias)


def _weights_on(projection: Projection, device: torch.device) -> _Weights:
    """Return weights, float32 [dims, hidden_size], and bias, float32 [dims], on a device."""
    places = _KEPT.setdefault(projection, {})
    if device not in places:
        with torch.inference_mode(mode=False):  # they are also used outside of it
            weights, bias = (torch.tensor(array) for array in (projection.weights, projection.bias))
            places[device] = weights.to(device), bias.to(device)
    return places[device]
