"""Frames: what is written is read, in whatever pieces it arrives, and what is damaged is refused by name."""

import json
import math
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.errors import WireError
from draftstore.remote import wire
from draftstore.remote.buffer import FrameBuffer
from draftstore.remote.wire import Failure, Frame, Operation, Status
from draftstore.trees.batch import DraftBatch
from draftstore.trees.tree import DraftTree
from tests.examples import examples
from tests.unit.trees.test_batch import batch_of
from tests.unit.trees.test_tree import ANIMALS, WIDE, chain, trees

MOST = 2**32 - 1

ids = st.integers(0, 2**64 - 1)
bytes_or_flags = st.integers(0, 255)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)  # of up to four bytes a letter
probs = st.floats(0, 1, width=32)
tagged = st.dictionaries(st.integers(0, 0xFFFF), st.binary(max_size=20), max_size=4)
headers = st.builds(
    lambda operation, number, payload, status, flags: wire.frame(operation, number, payload, status, flags),
    bytes_or_flags, ids, st.binary(max_size=40), bytes_or_flags, bytes_or_flags,
)  # fmt: skip


@st.composite
def contexts(draw: st.DrawFn) -> NDArray[np.int32]:
    batch, width = draw(st.integers(0, 4)), draw(st.integers(0, 6))
    numbers = [draw(st.integers(-(2**31), 2**31 - 1)) for _ in range(batch * width)]
    return np.array(numbers, np.int32).reshape(batch, width)


@st.composite
def batches(draw: st.DrawFn, least: int = 0) -> DraftBatch:
    forest = draw(st.lists(trees(10), min_size=least, max_size=4))
    width = max([len(tree) for tree in forest], default=0) + draw(st.integers(0, 2))
    lengths = [draw(st.integers(0, 4096)) for _ in forest]
    counts = [draw(st.integers(0, 2**40)) for _ in forest]
    return batch_of(forest, width)._replace(
        match_lengths=np.array(lengths, np.int32), match_counts=np.array(counts, np.int64)
    )


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Draw a whole frame."""
    return wire.encode_request(
        draw(ids),
        draw(names),
        draw(contexts()),
        draw(st.integers(0, 0xFFFF)),
        draw(probs),
        draw(names),
        draw(tagged),
    )


def refuse_alone(read: Callable[[], object]) -> None:
    """Read what may be damaged: it is read, or there is a `WireError`, and nothing else."""
    with suppress(WireError):
        read()


def mutated(data: st.DataObject, whole: bytes) -> bytes:
    """Change, remove and insert some bytes."""
    broken = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(broken)))
        removed = data.draw(st.integers(0, 4))
        broken[at : at + removed] = data.draw(st.binary(max_size=4))
    return bytes(broken)


def part_of(batch: DraftBatch, start: int, stop: int) -> DraftBatch:
    columns: list[Any] = [column[start:stop] for column in batch]
    return DraftBatch(*columns)


def answer_payload(batch: DraftBatch) -> bytes:
    return wire.encode_answer(1, 2, 3, 4, batch)[wire.HEADER.size :]


def is_valid_answer(payload: bytes, vocab_size: int = 70_000, budget: int = 12) -> None:
    """Read an answer; what gets through keeps every promise."""
    answer = wire.decode_answer(payload, vocab_size, budget)
    for draft in answer.drafts:
        draft.tree.validate()
        assert draft.tree.tokens.max(initial=0) < vocab_size
        assert len(draft.tree) <= budget


# -- the header ------------------------------------------------------------------------------------------------


@given(bytes_or_flags, ids, st.binary(max_size=40), bytes_or_flags, bytes_or_flags)
def test_a_frame_is_its_header_and_payload(
    operation: int, number: int, payload: bytes, status: int, flags: int
) -> None:
    data = wire.frame(operation, number, payload, status, flags)
    assert data == struct.pack("<IBBBBQ", len(payload), 1, operation, status, flags, number) + payload
    assert wire.read_header(data) == (len(payload), 1, operation, status, flags, number)
    assert wire.read_header(memoryview(data)) == wire.read_header(bytearray(data))


@given(st.integers(0, 255).filter(lambda version: version != wire.VERSION), st.integers(0, MOST))
def test_another_version_is_refused_whatever_its_length(version: int, length: int) -> None:
    with pytest.raises(WireError, match=f"version {version}, expected 1") as raised:
        wire.read_header(wire.HEADER.pack(length, version, 2, 0, 0, 1))
    assert not isinstance(raised.value, wire.LongFrameError)


@pytest.mark.parametrize("most", [0, 1000, wire.MAX_PAYLOAD])
def test_a_long_frame_is_refused_by_its_header(most: int) -> None:
    assert wire.read_header(wire.HEADER.pack(most, 1, 2, 0, 0, 77), most).length == most
    for length in (most + 1, MOST):
        with pytest.raises(
            wire.LongFrameError, match=f"{length:,} bytes, expected at most {most:,}"
        ) as raised:
            wire.read_header(wire.HEADER.pack(length, 1, 2, 0, 0, 77), most)
        assert raised.value.header.request_id == 77


# -- streams ---------------------------------------------------------------------------------------------------


@given(st.lists(headers, max_size=6), st.data())
def test_a_stream_may_be_cut_anywhere(frames: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    buffer = FrameBuffer()
    found: list[Frame] = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += buffer.feed(stream[start:stop])
    assert [wire.HEADER.pack(*frame.header) + frame.payload for frame in found] == frames
    assert all(type(frame.payload) is bytes for frame in found)


@given(st.lists(headers, min_size=1, max_size=4), st.data())
def test_a_frame_is_there_with_its_last_byte_and_not_before(frames: list[bytes], data: st.DataObject) -> None:
    buffer = FrameBuffer()
    for whole in frames:
        for i in range(len(whole) - 1):
            assert not list(buffer.feed(whole[i : i + 1]))
        assert len(list(buffer.feed(whole[-1:]))) == 1


@given(st.lists(headers, max_size=3), st.binary(min_size=16, max_size=60), st.data())
def test_frames_before_the_damage_are_read(frames: list[bytes], junk: bytes, data: st.DataObject) -> None:
    junk = junk[:4] + bytes([data.draw(st.integers(2, 255))]) + junk[5:]
    stream = b"".join(frames) + junk
    cut = data.draw(st.integers(0, len(stream)))
    buffer, found = FrameBuffer(), 0
    with pytest.raises(WireError, match="version"):  # noqa: PT012
        for piece in (stream[:cut], stream[cut:]):
            for _ in buffer.feed(piece):
                found += 1
    assert found == len(frames)


@given(st.lists(st.binary(max_size=50), max_size=6), st.sampled_from([0, 30, wire.MAX_PAYLOAD]))
def test_any_bytes_are_frames_or_refused(pieces: list[bytes], most: int) -> None:
    def read() -> None:
        buffer = FrameBuffer(most)
        for piece in pieces:
            for frame in buffer.feed(piece):
                assert len(frame.payload) == frame.header.length <= most

    refuse_alone(read)


def test_the_limit_of_a_stream_may_change_between_two_frames() -> None:
    buffer = FrameBuffer(4)
    stream = wire.frame(1, 0, b"hi") + wire.frame(2, 1, b"a longer one")
    found = []
    for frame in buffer.feed(stream):
        found.append(frame.payload)
        buffer.most = 100  # as after a greeting
    assert found == [b"hi", b"a longer one"]
    with pytest.raises(wire.LongFrameError):
        list(FrameBuffer(4).feed(stream))


# -- requests --------------------------------------------------------------------------------------------------


@given(ids, names, contexts(), st.integers(0, 0xFFFF), probs, names, tagged)
def test_a_request_is_read_as_written(
    number: int,
    name: str,
    rows: NDArray[np.int32],
    budget: int,
    prob: float,
    strategy: str,
    sections: dict[int, bytes],
) -> None:
    (frame,) = FrameBuffer().feed(wire.encode_request(number, name, rows, budget, prob, strategy, sections))
    header, payload = frame
    assert header == (len(payload), 1, Operation.DRAFT, 0, 0, number)
    found = wire.decode_request(payload)
    assert (found.name, found.strategy, found.budget, found.min_prob) == (name, strategy, budget, prob)
    assert found.sections == sections
    assert found.contexts.dtype == np.int32
    assert found.contexts.shape == rows.shape
    assert np.array_equal(found.contexts, rows)


@pytest.mark.parametrize(
    "make", [np.asfortranarray, lambda rows: rows[:, ::-1][:, ::-1], lambda rows: rows.astype(">i4")]
)
def test_rows_may_lie_in_memory_as_they_like(make: Callable[[Any], Any]) -> None:
    rows = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert wire.encode_request(1, "chat", make(rows), 8) == wire.encode_request(1, "chat", rows, 8)


@given(st.floats(0, 1))
def test_a_least_probability_travels_as_float32(prob: float) -> None:
    data = wire.encode_request(1, "chat", np.zeros((1, 1), np.int32), 8, prob)
    assert wire.decode_request(data[16:]).min_prob == float(np.float32(prob))


@pytest.mark.parametrize("prob", [math.nan, math.inf, -math.inf, -1e-9, 1.0001, 2.0])
def test_a_least_probability_is_one(prob: float) -> None:
    data = wire.encode_request(1, "chat", np.zeros((1, 1), np.int32), 8, prob)
    with pytest.raises(WireError, match="least probability"):
        wire.decode_request(data[16:])


@given(requests())
def test_a_request_that_is_cut_is_refused(whole: bytes) -> None:
    payload = whole[16:]
    for size in range(len(payload)):
        with pytest.raises(WireError, match="found"):
            wire.decode_request(payload[:size])
    with pytest.raises(WireError, match="found"):
        wire.decode_request(payload + b"\0")


@given(requests(), st.data())
def test_a_request_that_is_changed_is_read_or_refused(whole: bytes, data: st.DataObject) -> None:
    refuse_alone(lambda: wire.decode_request(mutated(data, whole[16:])))


@given(st.integers(0, 3), st.integers(0, 3), st.binary(max_size=60), st.integers(0, 12), st.integers(0, 12))
def test_any_sections_and_names_are_read_or_refused(
    batch: int, width: int, rest: bytes, named: int, how: int
) -> None:
    sections = max(0, len(rest) - 4 * batch * width - named - how)
    head = struct.pack("<HHfBBHI", batch, 8, 0.0, named, how, width, sections)
    refuse_alone(lambda: wire.decode_request(head + rest))


@given(st.binary(max_size=80))
def test_any_bytes_are_a_request_or_refused(payload: bytes) -> None:
    refuse_alone(lambda: wire.decode_request(payload))


def with_sections(data: bytes) -> bytes:
    return struct.pack("<HHfBBHI", 0, 8, 0.0, 0, 0, 0, len(data)) + data


@pytest.mark.parametrize(
    "data",
    [
        bytes(7),
        struct.pack("<HHI", 1, 0, 1),
        struct.pack("<HHI", 1, 0, 1) + b"abc",
        struct.pack("<HHI", 1, 0, 5) + b"abcd",
        struct.pack("<HHI", 1, 0, MOST) + b"abcd",
        struct.pack("<HHI", 1, 1, 4) + b"abcd",
        struct.pack("<HHI", 1, 0, 0) * 2,
        struct.pack("<HHI", 1, 0, 0) + b"\0",
    ],
)
def test_sections_that_do_not_fit_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="section"):
        wire.decode_request(with_sections(data))


def test_what_fills_a_section_up_is_not_read() -> None:
    data = struct.pack("<HHI", 9, 0, 1) + b"a\1\2\3"
    assert wire.decode_request(with_sections(data)).sections == {9: b"a"}


@pytest.mark.parametrize("part", ["name", "strategy"])
def test_names_have_255_bytes_at_most(part: str) -> None:
    rows = np.zeros((1, 1), np.int32)
    arguments: dict[str, Any] = {"name": "chat", "contexts": rows, "budget": 8}
    for text in ("x" * 255, "ü" * 127):
        data = wire.encode_request(1, **{**arguments, part: text})
        assert getattr(wire.decode_request(data[16:]), part) == text
    for text in ("x" * 256, "ü" * 128, "\ud800"):
        with pytest.raises(WireError, match="no request can carry this"):
            wire.encode_request(1, **{**arguments, part: text})


@pytest.mark.parametrize("place", [16, 20])
def test_names_are_text(place: int) -> None:
    data = bytearray(wire.encode_request(1, "chat", np.zeros((0, 0), np.int32), 8, strategy="fast")[16:])
    data[place] = 0xFF
    with pytest.raises(WireError, match="UTF-8"):
        wire.decode_request(bytes(data))


@pytest.mark.parametrize(
    ("shape", "budget"),
    [
        ((0xFFFF + 1, 1), 8),
        ((1, 0xFFFF + 1), 8),
        ((1, 1), 0xFFFF + 1),
        ((1, 1), -1),
        ((4,), 8),
        ((1, 2, 3), 8),
    ],
)
def test_what_no_request_can_carry_is_refused(shape: tuple[int, ...], budget: int) -> None:
    with pytest.raises(WireError, match="no request can carry this"):
        wire.encode_request(1, "chat", np.zeros(shape, np.int32), budget)


@pytest.mark.parametrize("sections", [{0x10000: b""}, {-1: b""}])
def test_tags_that_no_request_can_carry_are_refused(sections: dict[int, bytes]) -> None:
    with pytest.raises(WireError, match="no request can carry this"):
        wire.encode_request(1, "chat", np.zeros((1, 1), np.int32), 8, sections=sections)


def test_the_largest_batch_and_width() -> None:
    for shape in ((0xFFFF, 1), (1, 0xFFFF), (0xFFFF, 0), (0, 0xFFFF)):
        data = wire.encode_request(1, "chat", np.zeros(shape, np.int32), 0xFFFF)
        assert wire.decode_request(data[16:]).contexts.shape == shape


def test_a_request_fits_into_a_frame() -> None:
    room = wire.MAX_PAYLOAD - 16 - len("chat")
    data = wire.encode_request(1, "chat", np.zeros((1024, room // 4096), np.int32), 8)
    assert len(data) <= 16 + wire.MAX_PAYLOAD
    with pytest.raises(WireError, match="expected at most 16,777,216"):
        wire.encode_request(1, "chat", np.zeros((1024, room // 4096 + 1), np.int32), 8)


# -- answers ---------------------------------------------------------------------------------------------------


@given(ids, ids, ids, st.integers(0, 2**40), batches(), bytes_or_flags)
def test_an_answer_is_read_as_written(
    number: int, build: int, tokenizer: int, micros: int, batch: DraftBatch, flags: int
) -> None:
    (frame,) = FrameBuffer().feed(wire.encode_answer(number, build, tokenizer, micros, batch, flags))
    header, payload = frame
    assert header == (len(payload), 1, Operation.DRAFT | wire.ANSWER, Status.OK, flags, number)
    found = wire.decode_answer(payload)
    assert found[:3] == (build, tokenizer, min(micros, MOST))
    assert [draft.tree for draft in found.drafts] == [draft.tree for draft in batch.drafts()]
    assert [draft[1:] for draft in found.drafts] == [
        (draft.match_length, min(draft.match_count, MOST)) for draft in batch.drafts()
    ]


@given(batches(least=1), st.data())
def test_an_answer_in_parts_is_the_same(batch: DraftBatch, data: st.DataObject) -> None:
    size = len(batch.sizes)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=3)))
    parts = [
        wire.encode_drafts(part_of(batch, start, stop))
        for start, stop in zip([0, *cuts], [*cuts, size], strict=True)
    ]
    assert wire.join_answer(1, 2, 3, 4, parts, 5) == wire.encode_answer(1, 2, 3, 4, batch, 5)


def test_big_numbers_stay_at_the_largest() -> None:
    for size in (1, 3):
        batch = batch_of([ANIMALS] * size, 4)._replace(match_counts=np.full(size, 2**62, np.int64))
        answer = wire.decode_answer(wire.encode_answer(1, 0, 0, 2**50, batch)[16:])
        assert answer.micros == MOST
        assert [draft.match_count for draft in answer.drafts] == [MOST] * size


@given(batches())
def test_an_answer_that_is_cut_is_refused(batch: DraftBatch) -> None:
    payload = answer_payload(batch)
    for size in range(len(payload)):
        with pytest.raises(WireError, match="answer"):
            wire.decode_answer(payload[:size])
    with pytest.raises(WireError, match="more than the"):
        wire.decode_answer(payload + b"\0")


@examples(300)
@given(batches(least=1), st.data())
def test_an_answer_that_is_changed_is_valid_or_refused(batch: DraftBatch, data: st.DataObject) -> None:
    refuse_alone(lambda: is_valid_answer(mutated(data, answer_payload(batch))))


@given(st.binary(max_size=90), st.integers(0, 4) | st.none())
def test_any_bytes_are_a_valid_answer_or_refused(payload: bytes, batch: int | None) -> None:
    if batch is not None and len(payload) >= 18:
        payload = payload[:16] + struct.pack("<H", batch) + payload[18:]
    refuse_alone(lambda: is_valid_answer(payload))


@pytest.mark.parametrize(
    "lengths", [(MOST, 4), (4, MOST), (MOST, MOST), (2**31, 2**31), (2**31 + 4, 2**31 + 4)]
)
def test_lengths_of_trees_do_not_wrap_around(lengths: tuple[int, int]) -> None:
    payload = (
        struct.pack("<QQHHI", 1, 2, 2, 0, 0) + struct.pack("<6I", *lengths, 0, 0, 0, 0) + b"\1\0\0\0" * 2
    )
    with pytest.raises(WireError, match="broken tree"):
        wire.decode_answer(payload)


def test_trees_keep_to_vocabulary_and_budget() -> None:
    payload = answer_payload(batch_of([DraftTree.empty(), WIDE], 2))
    most = int(WIDE.tokens.max())
    assert wire.decode_answer(payload, most + 1, len(WIDE)).drafts[1].tree == WIDE
    with pytest.raises(WireError, match="tree 2 of 2: a token id lies outside the vocabulary"):
        wire.decode_answer(payload, most)
    with pytest.raises(WireError, match="tree 2 of 2: 2 nodes, more than requested"):
        wire.decode_answer(payload, budget=1)


def test_a_damaged_tree_is_refused_with_its_place() -> None:
    payload = bytearray(answer_payload(batch_of([ANIMALS, ANIMALS], 4)))
    payload[-1] = 0  # the last level: out of order
    with pytest.raises(WireError, match="tree 2 of 2: nodes are out of order"):
        wire.decode_answer(bytes(payload))


def test_trees_of_any_size() -> None:
    for n in (0, 1, 256, 257, 5000):
        for token in (3, 65_535, 65_536):
            wanted = chain(n, token)
            payload = answer_payload(batch_of([wanted], n))
            assert wire.decode_answer(payload).drafts[0].tree == wanted


# -- failures and documents ------------------------------------------------------------------------------------


@given(
    bytes_or_flags,
    ids,
    st.sampled_from([status for status in Status if status]),
    st.floats(0, 1e6),
    names,
    bytes_or_flags,
)
def test_a_failure_is_read_as_written(
    operation: int, number: int, status: Status, wait: float, message: str, flags: int
) -> None:
    data = wire.encode_failure(operation, number, Failure(status, wait, message), flags)
    (frame,) = FrameBuffer().feed(data)
    header, payload = frame
    assert header[2:] == (operation | wire.ANSWER, status, flags, number)
    found = wire.decode_failure(header, payload)
    assert (found.status, found.message) == (status, message)
    assert (
        wait <= found.retry_after + 1e-9 <= wait + 0.0010001 + 1e-9 * wait
    )  # in whole milliseconds, never too short


@pytest.mark.parametrize("wait", [1e9, 1e308, math.inf])
def test_a_long_wait_stays_at_the_longest(wait: float) -> None:
    (frame,) = FrameBuffer().feed(wire.encode_failure(2, 1, Failure(Status.BUSY, wait, "")))
    assert wire.decode_failure(*frame).retry_after == MOST / 1000


@given(bytes_or_flags, st.binary(max_size=20))
def test_any_bytes_are_a_failure_or_refused(status: int, payload: bytes) -> None:
    header = wire.Header(len(payload), 1, 0x82, status, 0, 1)
    refuse_alone(lambda: wire.decode_failure(header, payload))


@pytest.mark.parametrize(
    ("status", "payload"),
    [(1, b""), (1, b"\0\0\0"), (10, bytes(4)), (255, bytes(4)), (1, bytes(4) + b"\xff")],
)
def test_a_damaged_failure_is_refused(status: int, payload: bytes) -> None:
    with pytest.raises(WireError, match=f"status {status} cannot be read"):
        wire.decode_failure(wire.Header(len(payload), 1, 0x82, status, 0, 1), payload)


def test_a_document() -> None:
    document = {"releases": [{"name": "ü", "tokens": 3}]}
    (frame,) = FrameBuffer().feed(wire.encode_json(Operation.RELEASES, 7, document, wire.CLOSING))
    assert isinstance(frame, Frame)
    assert frame.header[2:] == (Operation.RELEASES | wire.ANSWER, Status.OK, wire.CLOSING, 7)
    assert json.loads(frame.payload) == document


def test_a_short_hash_is_the_beginning_of_a_digest() -> None:
    assert wire.short_hash("0123456789abcdef" + "f" * 48) == 0x0123456789ABCDEF
