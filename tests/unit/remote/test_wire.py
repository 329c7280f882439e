"""Frames: they are read as written, byte for byte as in docs/team/frames.md; damage is refused by name."""

import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import WireError
from draftstore.remote import wire
from draftstore.remote.wire import DraftRequest, Failure, Status
from draftstore.trees.batch import DraftBatch
from tests.unit.trees.test_batch import batch_of, slow_bytes
from tests.unit.trees.test_tree import trees

MOST = 2**32 - 1
ONE = np.zeros((1, 1), np.int32)
ROWS = np.arange(12, dtype=np.int32).reshape(3, 4)

ids = st.integers(0, 2**64 - 1)
octets = st.integers(0, 255)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)  # of up to four bytes a letter


@st.composite
def requests(draw: st.DrawFn) -> DraftRequest:
    batch, width, size = draw(st.integers(0, 4)), draw(st.integers(0, 6)), draw(st.integers(0, 5))
    tokens = [draw(st.integers(-(2**31), 2**31 - 1)) for _ in range(batch * width)]
    states = [draw(st.floats(width=16)) for _ in range(batch * size)]
    return DraftRequest(
        draw(names),
        draw(names),
        np.array(tokens, np.int32).reshape(batch, width),
        draw(st.integers(0, 0xFFFF)),
        draw(st.floats(0, 1, width=32)),
        np.array(states, np.float16).reshape(batch, size) if size else None,
    )


@st.composite
def batches(draw: st.DrawFn) -> DraftBatch:
    forest = draw(st.lists(trees(10), max_size=4))
    width = max([len(tree) for tree in forest], default=0) + draw(st.integers(0, 2))
    return batch_of(forest, width)._replace(
        match_lengths=np.array([draw(st.integers(0, 4096)) for _ in forest], np.int32),
        match_counts=np.array([draw(st.integers(0, 2**40)) for _ in forest], np.int64),
    )


def encoded(number: int, asked: DraftRequest) -> bytes:
    name, strategy, contexts, budget, min_prob, hidden = asked
    return wire.encode_request(number, name, contexts, budget, min_prob, strategy, hidden)


def slow_frame(operation: int, status: int, number: int, payload: bytes) -> bytes:
    return struct.pack("<IBBBBQ", len(payload), 2, operation, status, 0, number) + payload


def slow_request(number: int, asked: DraftRequest) -> bytes:
    """Write a request number by number."""
    name, strategy, contexts, budget, min_prob, hidden = asked
    states = np.zeros((len(contexts), 0), np.float16) if hidden is None else hidden
    data = struct.pack("<HHfBB", len(contexts), budget, min_prob, len(name.encode()), len(strategy.encode()))
    data += struct.pack("<HI", contexts.shape[1], states.shape[1])
    data += b"".join(struct.pack("<i", token) for token in contexts.ravel().tolist())
    data += b"".join(struct.pack("<e", number) for number in states.ravel().tolist())
    return slow_frame(2, 0, number, data + name.encode() + strategy.encode())


def slow_answer(number: int, build: int, tokenizer: int, micros: int, batch: DraftBatch) -> bytes:
    """Write an answer number by number."""
    drafts = batch.drafts()
    parts = [slow_bytes(draft.tree) for draft in drafts]
    data = struct.pack("<QQHHI", build, tokenizer, len(drafts), 0, min(micros, MOST))
    for column in (map(len, parts), batch.match_lengths.tolist(), batch.match_counts.tolist()):
        data += b"".join(struct.pack("<I", min(value, MOST)) for value in column)
    return slow_frame(0x82, 0, number, data + b"".join(parts))


def payload_of(what: DraftRequest | DraftBatch) -> bytes:
    return (encoded(1, what) if isinstance(what, DraftRequest) else wire.encode_answer(1, 2, 3, 4, what))[16:]


@given(octets, octets, ids, st.binary(max_size=40))
def test_a_frame_is_its_header_and_payload(operation: int, status: int, number: int, payload: bytes) -> None:
    data = wire.frame(operation, number, payload, status)
    assert data == slow_frame(operation, status, number, payload)
    assert wire.read_header(data) == (len(payload), 2, operation, status, 0, number)


@given(st.sampled_from([0, 1, 2, 2, 255]), st.integers(0, MOST), st.integers(0, wire.MAX_PAYLOAD))
def test_other_versions_and_long_frames_are_refused_by_the_header(
    version: int, length: int, most: int
) -> None:
    data = wire.HEADER.pack(length, version, 2, 0, 0, 77)
    if version != 2:
        with pytest.raises(WireError, match=f"version {version}, expected 2"):
            wire.read_header(data, most)
    elif length > most:
        with pytest.raises(wire.LongFrameError, match=f"{length:,} bytes, expected at most") as raised:
            wire.read_header(data, most)
        assert raised.value.header.request_id == 77
    else:
        assert wire.read_header(data, most).length == length


@given(ids, requests())
def test_a_request_has_the_bytes_of_the_page_and_is_read_as_written(number: int, asked: DraftRequest) -> None:
    data = encoded(number, asked)
    assert data == slow_request(number, asked)
    found = wire.decode_request(data[16:])
    for one, other in zip(found, asked, strict=True):
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
            assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
        else:
            assert one == other


@given(requests(), batches())
def test_what_is_cut_or_goes_on_is_refused(asked: DraftRequest, batch: DraftBatch) -> None:
    for payload, read in ((payload_of(asked), wire.decode_request), (payload_of(batch), wire.decode_answer)):
        for damaged in [*(payload[:size] for size in range(len(payload))), payload + b"\0"]:
            with pytest.raises(WireError, match=r"found|broken tree"):
                read(damaged)


@pytest.mark.parametrize("part", ["name", "strategy"])
def test_names_are_text_of_255_bytes_at_most(part: str) -> None:
    arguments: dict[str, Any] = {"name": "", "contexts": ONE, "budget": 8}
    for text in ("x" * 255, "ü" * 127):
        data = wire.encode_request(1, **{**arguments, part: text})
        assert getattr(wire.decode_request(data[16:]), part) == text
    with pytest.raises(WireError, match="UTF-8"):
        wire.decode_request(data[16:-1] + b"\xff")
    for text in ("x" * 256, "ü" * 128, "\ud800"):
        with pytest.raises(WireError, match="does not fit in a request"):
            wire.encode_request(1, **{**arguments, part: text})


def test_requests_have_their_limits() -> None:
    for shape in ((0xFFFF, 1), (1, 0xFFFF), (0xFFFF, 0), (0, 0xFFFF)):
        data = wire.encode_request(1, "chat", np.zeros(shape, np.int32), 0xFFFF)
        assert wire.decode_request(data[16:]).contexts.shape == shape
    for batch, width, budget in [(0x10000, 1, 8), (1, 0x10000, 8), (1, 1, 0x10000), (1, 1, -1)]:
        with pytest.raises(WireError, match="does not fit in a request"):
            wire.encode_request(1, "chat", np.zeros((batch, width), np.int32), budget)
    largest = np.zeros((64, 0xFFFF), np.int32)
    assert len(wire.encode_request(1, "x" * 240, largest, 8)) == 16 + wire.MAX_PAYLOAD
    with pytest.raises(WireError, match="16,777,217 bytes, expected at most 16,777,216"):
        wire.encode_request(1, "x" * 241, largest, 8)


@pytest.mark.parametrize("least", [-0.001, 1.001, math.nan, math.inf])
def test_a_least_probability_lies_between_0_and_1(least: float) -> None:
    with pytest.raises(WireError, match="expected 0 to 1"):
        wire.decode_request(wire.encode_request(1, "chat", ONE, 8, least)[16:])


@given(ids, ids, ids, st.integers(0, 2**40), batches())
def test_an_answer_has_the_bytes_of_the_page_and_is_read_as_written(
    number: int, build: int, tokenizer: int, micros: int, batch: DraftBatch
) -> None:
    data = wire.encode_answer(number, build, tokenizer, micros, batch)
    assert data == slow_answer(number, build, tokenizer, micros, batch)
    drafts = [draft._replace(match_count=min(draft.match_count, MOST)) for draft in batch.drafts()]
    found = wire.decode_answer(data[16:], contexts=len(drafts))
    assert (*found[:3], found.drafts.drafts()) == (build, tokenizer, min(micros, MOST), drafts)
    with pytest.raises(WireError, match=f"{len(drafts)} drafts for {len(drafts) + 1} contexts"):
        wire.decode_answer(data[16:], contexts=len(drafts) + 1)


def test_lengths_of_trees_do_not_wrap_around() -> None:
    for lengths in ((MOST, 4), (4, MOST), (MOST, MOST), (2**31, 2**31), (2**31 + 4, 2**31 + 4)):
        payload = struct.pack("<QQHHI6I", 1, 2, 2, 0, 0, *lengths, 0, 0, 0, 0) + b"\1\0\0\0" * 2
        with pytest.raises(WireError, match="broken tree"):
            wire.decode_answer(payload)


@given(octets, ids, st.sampled_from(list(Status)[1:]), st.floats(0, 1e6) | st.floats(min_value=1e9), names)
def test_a_failure_is_read_as_written(
    operation: int, number: int, status: Status, wait: float, message: str
) -> None:
    data = wire.encode_failure(operation, number, Failure(status, wait, message))
    assert data == slow_frame(operation | 0x80, status, number, data[16:20] + message.encode())
    found = wire.decode_failure(wire.read_header(data), data[16:])
    longest = min(wait, MOST / 1000)
    assert (found.status, found.message) == (status, message)
    assert longest - 1e-9 <= found.retry_after < longest + 0.0011  # whole milliseconds, never too few
