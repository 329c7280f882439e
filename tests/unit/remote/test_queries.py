"""Queries and projections in frames: what is written is read, and what is damaged is refused by name."""

import struct
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.drafting.projection import Projection
from draftstore.errors import DraftstoreError, WireError
from draftstore.remote import queries, wire
from draftstore.remote.queries import (
    OtherProjectionError,
    Queries,
    decode_projection,
    encode_projection,
    read_queries,
)
from draftstore.remote.sections import Tag
from tests.fakes.dense_stores import make_projection
from tests.unit.remote.test_wire import mutated

PROJECTION = make_projection(5, 3)
OTHER = make_projection(5, 3, seed=1)
NUMBERS = st.floats(width=32)


@st.composite
def projections(draw: st.DrawFn) -> Projection:
    dims, size = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    values = np.array([draw(finite) for _ in range(dims * (size + 1))], np.float32)
    return Projection(values[:-dims].reshape(dims, size), values[-dims:])


@st.composite
def vectors(draw: st.DrawFn, dims: int = 3) -> NDArray[np.float32]:
    batch = draw(st.integers(0, 4))
    return np.array([draw(NUMBERS) for _ in range(batch * dims)], np.float32).reshape(batch, dims)


def sections_of(rows: NDArray[np.float32], projection: Projection = PROJECTION) -> dict[int, bytes]:
    """Return the sections of queries as a service gets them."""
    contexts = np.zeros((len(rows), 1), np.int32)
    sections = Queries(rows, projection).sections()
    return dict(
        wire.decode_request(wire.encode_request(1, "chat", contexts, 8, sections=sections)[16:]).sections
    )


# -- queries ---------------------------------------------------------------------------------------------------


@given(vectors())
def test_queries_are_read_as_written(rows: NDArray[np.float32]) -> None:
    found = read_queries(sections_of(rows), len(rows), PROJECTION)
    assert found is not None
    assert found.dtype == np.float32
    assert found.shape == rows.shape
    assert found.tobytes() == rows.tobytes()  # NaNs too
    assert not found.flags.writeable


@pytest.mark.parametrize(
    "make", [np.asfortranarray, lambda rows: rows[:, ::-1][:, ::-1], lambda rows: rows.astype(">f4")]
)
def test_rows_may_lie_in_memory_as_they_like(
    make: Callable[[NDArray[np.float32]], NDArray[np.float32]],
) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert sections_of(make(rows)) == sections_of(rows)


@given(vectors(), st.integers(0, 4), st.integers(0, 4))
def test_parts_are_rows(rows: NDArray[np.float32], start: int, stop: int) -> None:
    asked = Queries(rows, PROJECTION)
    part = asked.part(start, stop)
    assert part.vectors.tobytes() == rows[start:stop].tobytes()
    assert part.projection is PROJECTION
    assert asked.any == any(not np.isnan(row).any() for row in rows)


@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (6,), (2, 3, 1)])
def test_queries_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    Queries(np.zeros((2, 3), np.float32), PROJECTION).check(2)
    with pytest.raises(DraftstoreError, match=r"queries of shape .* for 2 contexts: expected \(2, 3\)"):
        Queries(np.zeros(shape, np.float32), PROJECTION).check(2)


def test_without_queries_there_are_none() -> None:
    named = sections_of(np.zeros((2, 3), np.float32))
    del named[Tag.HIDDEN]
    assert read_queries({}, 2, PROJECTION) is None
    assert read_queries(named, 2, PROJECTION) is None
    assert read_queries({2: b"x", 900: b""}, 2, PROJECTION) is None


def test_queries_of_another_projection_are_refused_with_both_names() -> None:
    named = sections_of(np.zeros((2, 3), np.float32), OTHER)
    alone = {int(Tag.PROJECTION): named[Tag.PROJECTION]}
    for sections in (named, alone, {**named, int(Tag.HIDDEN): b"x"}):
        with pytest.raises(OtherProjectionError) as raised:
            read_queries(sections, 2, PROJECTION)
        for projection in (PROJECTION, OTHER):
            assert projection.digest[:16] in str(raised.value)


@pytest.mark.parametrize("size", [0, 4, 20, 23, 25, 28, 48])
def test_queries_of_another_size_are_refused(size: int) -> None:
    sections = {**sections_of(np.zeros((2, 3), np.float32)), Tag.HIDDEN: bytes(size)}
    with pytest.raises(WireError, match=f"2 contexts in 3 dimensions have 24 bytes, found {size}"):
        read_queries(sections, 2, PROJECTION)


@pytest.mark.parametrize("size", [0, 4, 7, 9, 32])
def test_a_name_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(WireError, match=f"PROJECTION has 8 bytes, found {size}"):
        read_queries({Tag.PROJECTION: bytes(size)}, 2, PROJECTION)


def test_queries_say_which_projection_made_them() -> None:
    sections = sections_of(np.zeros((2, 3), np.float32))
    del sections[Tag.PROJECTION]
    with pytest.raises(WireError, match="comes with the section PROJECTION"):
        read_queries(sections, 2, PROJECTION)


@given(st.dictionaries(st.integers(1, 4), st.binary(max_size=40)), st.integers(0, 5))
def test_any_sections_are_read_or_refused(sections: dict[int, bytes], batch: int) -> None:
    with suppress(WireError, OtherProjectionError):
        found = read_queries(sections, batch, PROJECTION)
        assert found is None or found.shape == (batch, 3)


# -- the projection --------------------------------------------------------------------------------------------


@given(projections())
def test_a_projection_is_read_as_written(projection: Projection) -> None:
    data = encode_projection(projection)
    assert struct.unpack_from("<II", data) == (projection.dims, projection.hidden_size)
    found = decode_projection(data)
    assert found.digest == projection.digest
    assert found.weights.tobytes() == projection.weights.tobytes()
    assert found.bias.tobytes() == projection.bias.tobytes()


@given(projections())
def test_a_projection_that_is_cut_is_refused(projection: Projection) -> None:
    data = encode_projection(projection)
    for size in range(len(data)):
        with pytest.raises(WireError, match="found"):
            decode_projection(data[:size])
    with pytest.raises(WireError, match="found"):
        decode_projection(data + b"\0")


@given(projections(), st.data())
def test_a_projection_that_is_changed_is_read_or_refused(projection: Projection, data: st.DataObject) -> None:
    with suppress(WireError):
        found = decode_projection(mutated(data, encode_projection(projection)))
        assert np.isfinite(found.weights).all()


@pytest.mark.parametrize("head", [(0, 0), (0, 7), (1 << 31, 1 << 31), (2**32 - 1, 2**32 - 1)])
def test_a_projection_of_impossible_sizes_is_refused(head: tuple[int, int]) -> None:
    with pytest.raises(WireError):
        decode_projection(struct.pack("<II", *head))


def test_a_projection_with_a_nan_is_refused() -> None:
    data = encode_projection(PROJECTION)[:-4] + struct.pack("<f", np.nan)
    with pytest.raises(WireError, match="not finite"):
        decode_projection(data)


def test_a_projection_fits_into_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(encode_projection(PROJECTION))
    monkeypatch.setattr(queries, "MAX_PAYLOAD", size)
    encode_projection(PROJECTION)
    monkeypatch.setattr(queries, "MAX_PAYLOAD", size - 1)
    with pytest.raises(WireError, match=f"takes {size} bytes.*build the store with fewer dimensions"):
        encode_projection(PROJECTION)
