"""Queries of dense stores in frames: projected hidden states, and the projection; see docs/frames.md.

offset  type   payload of the answer to the operation PROJECTION
0       u32    dims, dimensions of a query
4       u32    hidden size, dimensions of a hidden state
8       f32 [dims, hidden size] weights, then f32 [dims] bias
"""

import struct
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.drafter import check_queries
from draftstore.drafting.projection import Projection
from draftstore.errors import DraftstoreError, WireError
from draftstore.remote.sections import Tag
from draftstore.remote.wire import MAX_PAYLOAD, short_hash

_NAMED = struct.Struct("<Q")
_SHAPE = struct.Struct("<II")
_NUMBER = np.dtype("<f4")


class OtherProjectionError(DraftstoreError):
    """Queries were projected to another space than the vectors of a store."""


class Queries(NamedTuple):
    """The queries of a batch of contexts to a dense store.

    Attributes:
        vectors: float32 [batch, dims], projected hidden states, of any length; rows with NaN are missing queries.
        projection: the projection that made them.
    """

    vectors: NDArray[np.float32]
    projection: Projection

    def check(self, batch: int) -> None:
        """Check the shape against a batch of contexts.

        Raises:
            DraftstoreError: the shape is wrong.
        """
        check_queries(self.vectors, batch, self.projection.dims)

    @property
    def any(self) -> bool:
        """Whether there is at least one query."""
        return not bool(np.isnan(self.vectors).any(axis=1).all())

    def part(self, start: int, stop: int) -> "Queries":
        """Return the queries of some contexts."""
        return Queries(self.vectors[start:stop], self.projection)

    def sections(self) -> dict[int, bytes]:
        """Return the sections of a draft request."""
        return {
            int(Tag.HIDDEN): self.vectors.astype(_NUMBER, copy=False).tobytes(),
            int(Tag.PROJECTION): _NAMED.pack(short_hash(self.projection.digest)),
        }


def read_queries(
    sections: Mapping[int, bytes], batch: int, projection: Projection
) -> NDArray[np.float32] | None:
    """Return the queries of a draft request for a dense store, float32 [batch, dims]; None if there are none.

    Args:
        sections: sections of the request.
        batch: number of its contexts.
        projection: projection of the store.

    Raises:
        OtherProjectionError: they were made by another projection.
        WireError: a section has the wrong size, or the projection is not named.
    """
    named, hidden = sections.get(Tag.PROJECTION), sections.get(Tag.HIDDEN)
    if named is not None:
        if len(named) != _NAMED.size:
            raise WireError(f"the section PROJECTION has {_NAMED.size} bytes, found {len(named)}")
        (found,) = _NAMED.unpack(named)
        if found != (expected := short_hash(projection.digest)):
            raise OtherProjectionError(
                f"queries of the projection {found:016x}, this build has {expected:016x}: fetch it with the "
                "operation PROJECTION"
            )
    if hidden is None:
        return None
    if named is None:
        raise WireError("the section HIDDEN comes with the section PROJECTION, which is missing")
    if len(hidden) != _NUMBER.itemsize * batch * projection.dims:
        raise WireError(
            f"the queries of {batch} contexts in {projection.dims} dimensions have "
            f"{_NUMBER.itemsize * batch * projection.dims:,} bytes, found {len(hidden):,}"
        )
    return np.frombuffer(hidden, _NUMBER).reshape(batch, projection.dims)


def encode_projection(projection: Projection) -> bytes:
    """Return the payload of an answer with a projection.

    Raises:
        WireError: it does not fit into a frame.
    """
    payload = _SHAPE.pack(projection.dims, projection.hidden_size) + projection.to_bytes()
    if len(payload) > MAX_PAYLOAD:
        raise WireError(
            f"a projection of {projection.hidden_size:,} numbers to {projection.dims:,} takes {len(payload):,} bytes, "
            f"and a frame has at most {MAX_PAYLOAD:,}: build the store with fewer dimensions"
        )
    return payload


def decode_projection(payload: bytes) -> Projection:
    """Decode `encode_projection`."""
    if len(payload) < _SHAPE.size:
        raise WireError(f"a projection has at least {_SHAPE.size} bytes, found {len(payload)}")
    dims, hidden_size = _SHAPE.unpack_from(payload)
    expected = _SHAPE.size + _NUMBER.itemsize * dims * (hidden_size + 1)
    if len(payload) != expected:
        raise WireError(
            f"a projection of {hidden_size:,} numbers to {dims:,} has {expected:,} bytes, found {len(payload):,}"
        )
    try:
        return Projection.from_bytes(payload[_SHAPE.size :], dims)
    except DraftstoreError as error:
        raise WireError(str(error)) from None
