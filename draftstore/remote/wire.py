"""The wire format for contexts and drafts between decoders and the lookup service; see docs/frames.md.

Frames follow each other over a Unix socket or TCP: a header of 16 bytes, then the payload. All numbers are
little-endian. A connection may have several concurrent requests; an answer carries the id of its request, and may
overtake others.
"""

import enum
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import DraftTreeError, WireError
from draftstore.remote.sections import decode_sections, encode_sections
from draftstore.trees.batch import Draft, DraftBatch, decode_trees
from draftstore.trees.codec import MAX_NODES

VERSION = 1
MAX_PAYLOAD = 1 << 24
"""Maximum bytes; longer data are not valid frames."""
MAX_NAME = 255
"""Bytes of the name of a release."""
ANSWER = 0x80
CLOSING = 1
"""Flag of an answer: the service is about to stop, reconnect for further requests."""

HEADER = struct.Struct("<IBBBBQ")
"""Bytes of the payload, version, operation (with `ANSWER` in answers), `Status`, flags, request id."""
_DRAFT = struct.Struct("<HHfBBHI")
"""Contexts, budget, least probability, bytes of the name, of the strategy, width of a context, bytes of all sections.

Behind it stand the contexts, i32 [batch, width], the sections (`draftstore.remote.sections`), the name, the strategy.
"""
_DRAFTS = struct.Struct("<QQHHI")
"""Build, tokenizer, contexts, zero, duration of the lookup in microseconds; then the table and the trees."""
_ROW = struct.Struct("<III")
"""The table of one context: bytes of its tree, match length, match count."""
_FAILURE = struct.Struct("<I")
"""Milliseconds to wait; then a message."""
_MOST = (1 << 32) - 1
CONTEXT = np.dtype("<i4")
_TABLE = np.dtype("<u4")


class Operation(enum.IntEnum):
    """Operation of a request."""

    HELLO = 1
    """Present a bearer token (payload: UTF-8, may be empty); the answer holds the limits of the service as JSON."""
    DRAFT = 2
    """Draft for a batch of contexts."""
    RELEASES = 3
    """List what is served, as JSON (no payload)."""
    PROJECTION = 4
    """Return the projection of a dense store (payload: its name), see `draftstore.remote.queries`."""


class Status(enum.IntEnum):
    """Result of a request."""

    OK = 0
    BAD_REQUEST = 1
    UNAUTHORIZED = 2
    FORBIDDEN = 3
    NOT_FOUND = 4
    TOO_LARGE = 5
    BUSY = 6
    UNAVAILABLE = 7
    INTERNAL = 8
    OTHER_PROJECTION = 9


_DRAFT_ANSWER = int(Operation.DRAFT) | ANSWER


class Header(NamedTuple):
    """The header of a frame."""

    length: int
    version: int
    operation: int
    status: int
    flags: int
    request_id: int


class Frame(NamedTuple):
    """A whole frame."""

    header: Header
    payload: bytes


class LongFrameError(WireError):
    """A frame exceeds the reader's limit; its payload is not read."""

    def __init__(self, header: Header, most: int) -> None:
        super().__init__(f"a frame of {header.length:,} bytes, expected at most {most:,}")
        self.header = header


class DraftRequest(NamedTuple):
    """A draft request.

    Attributes:
        name: a release or a store.
        strategy: drafting strategy; empty for the store's default.
        contexts: int32 [batch, width], the last tokens of each text, padded with -1 on the left.
        budget: maximum nodes of a tree.
        min_prob: minimum probability of a node.
        sections: data by tag.
    """

    name: str
    strategy: str
    contexts: NDArray[np.int32]
    budget: int
    min_prob: float
    sections: Mapping[int, bytes]


class EncodedDrafts(NamedTuple):
    """The drafts of some contexts, encoded for an answer.

    Attributes:
        table: u32 [3, contexts], size of each tree in bytes, match lengths, match counts.
        trees: all trees, concatenated.
    """

    table: bytes
    trees: bytes


class DraftAnswer(NamedTuple):
    """An answer with drafts.

    Attributes:
        build: build of the store, the same for all drafts, see `short_hash`.
        tokenizer: tokenizer of that store, see `short_hash`.
        micros: duration of the lookup in microseconds.
        drafts: one for each context.
    """

    build: int
    tokenizer: int
    micros: int
    drafts: list[Draft]


class Failure(NamedTuple):
    """A failure of a request.

    Attributes:
        status: kind of failure.
        retry_after: seconds to wait before another request; 0 if waiting does not help.
        message: message for people.
    """

    status: Status
    retry_after: float
    message: str


def short_hash(digest: str) -> int:
    """Return the first eight bytes of a hexadecimal digest, big-endian: enough to distinguish builds."""
    return int(digest[:16], 16)


def frame(operation: int, request_id: int, payload: bytes = b"", status: int = 0, flags: int = 0) -> bytes:
    """Return a frame."""
    return HEADER.pack(len(payload), VERSION, operation, status, flags, request_id) + payload


def read_header(data: bytes | bytearray | memoryview, most: int = MAX_PAYLOAD) -> Header:
    """Read the header at the start of `data`."""
    header = Header(*HEADER.unpack_from(data))
    if header.version != VERSION:
        raise WireError(f"a frame of version {header.version}, expected {VERSION}: is this the draft port?")
    if header.length > most:
        raise LongFrameError(header, most)
    return header


def encode_request(
    request_id: int,
    name: str,
    contexts: NDArray[np.int32],
    budget: int,
    min_prob: float = 0.0,
    strategy: str = "",
    sections: Mapping[int, bytes] | None = None,
) -> bytes:
    """Return the frame of a draft request; the arguments are those of `DraftRequest`."""
    try:
        named, how = name.encode(), strategy.encode()
        batch, width = contexts.shape
        tagged = encode_sections(sections) if sections else b""
        head = _DRAFT.pack(batch, budget, min_prob, len(named), len(how), width, len(tagged))
    except (struct.error, OverflowError, ValueError) as error:
        raise WireError(f"no request can carry this: {error}") from None
    length = len(head) + 4 * batch * width + len(tagged) + len(named) + len(how)
    if length > MAX_PAYLOAD:
        raise WireError(f"a request of {length:,} bytes, expected at most {MAX_PAYLOAD:,}")
    rows = contexts.astype(CONTEXT, copy=False).tobytes()
    header = HEADER.pack(length, VERSION, Operation.DRAFT, 0, 0, request_id)
    return b"".join((header, head, rows, tagged, named, how))


def decode_request(payload: bytes) -> DraftRequest:
    """Decode the payload of a draft request.

    Raises:
        WireError: a length does not match, or a value is out of range.
    """
    if len(payload) < _DRAFT.size:
        raise WireError(f"a draft request has at least {_DRAFT.size} bytes, found {len(payload)}")
    batch, budget, min_prob, named, how, width, tagged = _DRAFT.unpack_from(payload)
    sections = _DRAFT.size + 4 * batch * width
    expected = sections + tagged + named + how
    if len(payload) != expected:
        raise WireError(
            f"a draft request of {batch} contexts of {width} tokens has {expected} bytes here, found {len(payload)}"
        )
    if not 0.0 <= min_prob <= 1.0:
        raise WireError(f"a least probability of {min_prob}, expected 0 to 1")
    contexts = np.frombuffer(payload, CONTEXT, batch * width, _DRAFT.size).reshape(batch, width)
    names = sections + tagged
    try:
        name = payload[names : names + named].decode()
        strategy = payload[names + named :].decode()
    except UnicodeDecodeError:
        raise WireError("the name of a release or of a strategy is not UTF-8") from None
    found = decode_sections(payload, sections, names) if tagged else {}
    return DraftRequest(name, strategy, contexts, budget, min_prob, found)


def encode_drafts(batch: DraftBatch) -> EncodedDrafts:
    """Encode the drafts of a batch of contexts, or of a part of one."""
    sizes, trees = batch.encode_trees()
    if len(sizes) == 1:  # the same, faster
        count = min(batch.match_counts.item(), _MOST)
        return EncodedDrafts(_ROW.pack(sizes.item(), batch.match_lengths.item(), count), trees.tobytes())
    table = np.empty((3, len(sizes)), _TABLE)
    table[0] = sizes
    table[1] = batch.match_lengths
    table[2] = np.minimum(batch.match_counts, _MOST)
    return EncodedDrafts(table.tobytes(), trees.tobytes())


def encode_answer(
    request_id: int, build: int, tokenizer: int, micros: int, batch: DraftBatch, flags: int = 0
) -> bytes:
    """Return the frame of an answer; the arguments are those of `DraftAnswer`."""
    return join_answer(request_id, build, tokenizer, micros, [encode_drafts(batch)], flags)


def join_answer(
    request_id: int, build: int, tokenizer: int, micros: int, parts: Sequence[EncodedDrafts], flags: int = 0
) -> bytes:
    """Return the frame of an answer from the parts of its batch, in order, at least one."""
    table, trees = parts[0]
    if len(parts) > 1:
        table = b"".join(_column(part.table, place) for place in range(3) for part in parts)
        trees = b"".join(part.trees for part in parts)
    head = _DRAFTS.pack(build, tokenizer, len(table) // _ROW.size, 0, min(micros, _MOST))
    length = len(head) + len(table) + len(trees)
    header = HEADER.pack(length, VERSION, _DRAFT_ANSWER, 0, flags, request_id)
    return b"".join((header, head, table, trees))


def _column(table: bytes, place: int) -> bytes:
    """Return one of the three columns of a table."""
    size = len(table) // 3
    return table[place * size : (place + 1) * size]


def decode_answer(payload: bytes, vocab_size: int = 1 << 31, budget: int = MAX_NODES) -> DraftAnswer:
    """Decode the payload of an answer and validate its trees, since decoders trust them."""
    if len(payload) < _DRAFTS.size:
        raise WireError(f"an answer has at least {_DRAFTS.size} bytes, found {len(payload)}")
    build, tokenizer, batch, _, micros = _DRAFTS.unpack_from(payload)
    start = _DRAFTS.size + 12 * batch
    if len(payload) < start:
        raise WireError(f"an answer of {batch} drafts has at least {start} bytes, found {len(payload)}")
    sizes = np.frombuffer(payload, _TABLE, batch, _DRAFTS.size)
    try:
        trees = decode_trees(payload, start, sizes, vocab_size, budget)
    except DraftTreeError as error:
        raise WireError(f"an answer holds a broken tree: {error}") from None
    if batch == 1:  # the same, faster
        _, match, count = _ROW.unpack_from(payload, _DRAFTS.size)
        return DraftAnswer(build, tokenizer, micros, [Draft(trees[0], match, count)])
    numbers = struct.unpack_from(f"<{2 * batch}I", payload, _DRAFTS.size + 4 * batch)
    drafts = list(map(Draft, trees, numbers[:batch], numbers[batch:]))
    return DraftAnswer(build, tokenizer, micros, drafts)


def encode_json(operation: int, request_id: int, document: Any, flags: int = 0) -> bytes:
    """Return the frame of a JSON answer."""
    return frame(operation | ANSWER, request_id, json.dumps(document).encode(), Status.OK, flags)


def encode_failure(operation: int, request_id: int, failure: Failure, flags: int = 0) -> bytes:
    """Return the frame of a failure."""
    wait = _FAILURE.pack(math.ceil(min(failure.retry_after * 1000, _MOST)))
    return frame(operation | ANSWER, request_id, wait + failure.message.encode(), failure.status, flags)


def decode_failure(header: Header, payload: bytes) -> Failure:
    """Decode the payload of a frame whose status is not `OK`."""
    try:
        (millis,) = _FAILURE.unpack_from(payload)
        return Failure(Status(header.status), millis / 1000, payload[_FAILURE.size :].decode())
    except (struct.error, ValueError) as error:
        raise WireError(f"an answer of status {header.status} cannot be read: {error}") from None
