"""The wire format for contexts and drafts between decoders and the lookup service; see docs/team/frames.md.

Frames are sent consecutively over a Unix socket or TCP: a header of 16 bytes, then the payload. All numbers are
little-endian. Answers arrive in the order of their requests and carry their ids.
"""

import enum
import json
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import DraftTreeError, WireError
from draftstore.live.log import LiveDocument
from draftstore.trees.batch import DraftBatch, decode_drafts
from draftstore.trees.codec import MAX_NODES

VERSION = 2
MAX_PAYLOAD = 1 << 24
"""Maximum bytes of the payload of a valid frame."""
MAX_DOCUMENTS = 64
"""Maximum documents of an append."""
ANSWER = 0x80
"""Bit set in the operation of answers."""

HEADER = struct.Struct("<IBBBBQ")
"""Payload length in bytes, version, operation, `Status`, zero, request id."""
_DRAFT = struct.Struct("<HHfBBHI")
"""Contexts, budget, minimum probability, bytes of name and strategy, tokens per context, size of a hidden state.

Followed by the contexts, i32 [batch, width]; the hidden states, f16 [batch, size]; the name; the strategy.
"""
_DRAFTS = struct.Struct("<QQHHI")
"""Build, tokenizer, contexts, zero, duration of the lookup in microseconds.

Followed by a table, u32 [3, batch]: bytes of each tree, match lengths, match counts; and the trees.
"""
_ROW = struct.Struct("<III")
"""The table for one draft."""
_APPEND = struct.Struct("<IHBB32s")
"""Size of the vocabulary, documents, bytes of the name, 1 if digests follow, tokenizer (SHA-256).

Followed by a table, u32 [3, documents]: tokens of each, how many belong to the prompt, version of the model; the
hashes of the prompts, u64 [documents]; the digests of the documents, u8 [documents, 16], if any; the tokens, i32; the
name.
"""
_RECALL = struct.Struct("<QHH")
"""Hash of a prompt, maximum answers, bytes of the name; followed by the name."""
_FORGET = struct.Struct("<IH")
"""Version, bytes of the name; followed by the name."""
_FAILURE = struct.Struct("<I")
"""Milliseconds to wait; followed by a message."""
_MOST = (1 << 32) - 1
_DIGEST = 16
_TOKEN = np.dtype("<i4")
_STATE = np.dtype("<f2")
_NUMBER = np.dtype("<u4")
_HASH = np.dtype("<u8")


class Operation(enum.IntEnum):
    """Operation of a request."""

    HELLO = 1
    """Present a bearer token (payload: UTF-8, may be empty); the answer has the limits of the service as JSON."""
    DRAFT = 2
    """Draft for a batch of contexts."""
    RELEASES = 3
    """List the served releases as JSON (no payload)."""
    APPEND = 4
    """Append documents to a live store; the answer is JSON."""
    RECALL = 5
    """List the latest answers to a prompt in a live store: their number, u32, their sizes, u32 each, and ids, i32."""
    FORGET = 6
    """Forget the documents of earlier versions in a live store; the answer is JSON."""


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


class Header(NamedTuple):
    """The header of a frame."""

    length: int
    version: int
    operation: int
    status: int
    zero: int
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
        hidden: float16 [batch, size], the states that predicted the last tokens, for dense stores; a row with a
            non-finite value is unknown. None: no states.
    """

    name: str
    strategy: str
    contexts: NDArray[np.int32]
    budget: int
    min_prob: float
    hidden: NDArray[np.float16] | None


class AppendRequest(NamedTuple):
    """Documents for a live store.

    Attributes:
        name: name of the live store.
        vocab_size: size of the model's vocabulary.
        fingerprint: fingerprint of the model's tokenizer, hexadecimal.
        documents: the documents; digests are sent if all have one.
    """

    name: str
    vocab_size: int
    fingerprint: str
    documents: Sequence[LiveDocument]


class DraftAnswer(NamedTuple):
    """An answer with drafts.

    Attributes:
        build: build of the store, the same for all drafts; see `short_hash`.
        tokenizer: tokenizer of that store; see `short_hash`.
        micros: duration of the lookup in microseconds.
        drafts: those of all contexts.
    """

    build: int
    tokenizer: int
    micros: int
    drafts: DraftBatch


class Failure(NamedTuple):
    """A failure of a request.

    Attributes:
        status: kind of failure.
        retry_after: seconds to wait before another request; 0 if waiting does not help.
        message: human-readable message.
    """

    status: Status
    retry_after: float
    message: str


def short_hash(digest: str) -> int:
    """Return the first eight bytes of a hexadecimal digest, big-endian: enough to distinguish builds."""
    return int(digest[:16], 16)


def frame(operation: int, request_id: int, payload: bytes = b"", status: int = 0) -> bytes:
    """Return a frame."""
    return HEADER.pack(len(payload), VERSION, operation, status, 0, request_id) + payload


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
    hidden: NDArray[np.float16] | None = None,
) -> bytes:
    """Return the frame of a draft request; the arguments are those of `DraftRequest`."""
    try:
        named, how = name.encode(), strategy.encode()
        batch, width = contexts.shape
        size = 0 if hidden is None else hidden.shape[1]
        head = _DRAFT.pack(batch, budget, min_prob, len(named), len(how), width, size)
    except (struct.error, OverflowError, ValueError) as error:
        raise WireError(f"this does not fit in a request: {error}") from None
    rows = contexts.astype(_TOKEN, copy=False).tobytes()
    states = b"" if hidden is None else hidden.astype(_STATE, copy=False).tobytes()
    payload = b"".join((head, rows, states, named, how))
    if len(payload) > MAX_PAYLOAD:
        raise WireError(f"a request of {len(payload):,} bytes, expected at most {MAX_PAYLOAD:,}")
    return frame(Operation.DRAFT, request_id, payload)


def decode_request(payload: bytes) -> DraftRequest:
    """Decode the payload of a draft request; WireError if a length does not match, or a value is out of range."""
    if len(payload) < _DRAFT.size:
        raise WireError(f"a draft request has at least {_DRAFT.size} bytes, found {len(payload)}")
    batch, budget, min_prob, named, how, width, size = _DRAFT.unpack_from(payload)
    states = _DRAFT.size + 4 * batch * width
    names = states + 2 * batch * size
    if len(payload) != (expected := names + named + how):
        raise WireError(f"a draft request whose head gives {expected} bytes, found {len(payload)}")
    if not 0.0 <= min_prob <= 1.0:
        raise WireError(f"a minimum probability of {min_prob}, expected 0 to 1")
    contexts = np.frombuffer(payload, _TOKEN, batch * width, _DRAFT.size).reshape(batch, width)
    hidden = np.frombuffer(payload, _STATE, batch * size, states).reshape(batch, size) if size else None
    try:
        name, strategy = payload[names : names + named].decode(), payload[names + named :].decode()
    except UnicodeDecodeError:
        raise WireError("the name of a release or strategy is not UTF-8") from None
    return DraftRequest(name, strategy, contexts, budget, min_prob, hidden)


def encode_append(request_id: int, request: AppendRequest) -> bytes:
    """Return the frame of an append."""
    named = request.name.encode()
    documents = request.documents
    known = bool(documents) and all(each.digest for each in documents)
    try:
        rows = [(len(each.ids), each.prompt_size, each.version) for each in documents]
        table = np.array(rows, _NUMBER).T
        prompts = np.array([each.prompt for each in documents], _HASH)
        digest = bytes.fromhex(request.fingerprint)
        head = _APPEND.pack(request.vocab_size, len(documents), len(named), known, digest)
    except (struct.error, ValueError, OverflowError) as error:
        raise WireError(f"this does not fit in a request: {error}") from None
    digests = [each.digest for each in documents] if known else []
    ids = [each.ids.astype(_TOKEN, copy=False).tobytes() for each in documents]
    parts = head, table.tobytes(), prompts.tobytes(), *digests, *ids, named
    return frame(Operation.APPEND, request_id, b"".join(parts))


def decode_append(payload: bytes) -> AppendRequest:
    """Decode the payload of an append; WireError if a length does not match."""
    try:
        vocab_size, count, named, known, digest = _APPEND.unpack_from(payload)
        count = min(count, MAX_DOCUMENTS)  # more would fail the length check below
        table = np.frombuffer(payload, _NUMBER, 3 * count, _APPEND.size)
        sizes, leads, versions = table.reshape(3, count).tolist()
        place = _APPEND.size + (12 + 8) * count
        prompts = np.frombuffer(payload, _HASH, count, place - 8 * count).tolist()
        start = place + (_DIGEST * count if known else 0)
        ids = np.frombuffer(payload, _TOKEN, sum(sizes), start)
        name = payload[start + 4 * sum(sizes) :].decode()
    except (struct.error, ValueError) as error:
        raise WireError(f"an append cannot be read: {error}") from None
    if not 0 < vocab_size < 1 << 31:
        raise WireError(f"an append for a vocabulary of {vocab_size:,} ids")
    longer = any(prompt_size > size for size, prompt_size in zip(sizes, leads, strict=True))
    if len(name.encode()) != named or known > 1 or longer:
        raise WireError("an append with inconsistent lengths")
    parts = np.split(ids, np.cumsum(sizes)[:-1]) if count else []
    digests = [payload[at : at + _DIGEST] for at in range(place, start, _DIGEST)] or [b""] * count
    documents = [
        LiveDocument(part, lead, known_by, prompt=prompt, version=version)
        for part, lead, known_by, prompt, version in zip(
            parts, leads, digests, prompts, versions, strict=True
        )
    ]
    return AppendRequest(name, vocab_size, digest.hex(), documents)


def encode_recall(request_id: int, name: str, prompt: int, count: int) -> bytes:
    """Return the frame that requests at most `count` answers to a prompt, by its hash."""
    named = name.encode()
    return frame(Operation.RECALL, request_id, _RECALL.pack(prompt, count, len(named)) + named)


def decode_recall(payload: bytes) -> tuple[str, int, int]:
    """Return the name of a live store, the hash of a prompt and the maximum number of answers."""
    name, prompt, count = _named(_RECALL, payload)
    return name, prompt, count


def encode_forget(request_id: int, name: str, version: int) -> bytes:
    """Return the frame that makes a live store forget the documents of versions before one."""
    named = name.encode()
    try:
        return frame(Operation.FORGET, request_id, _FORGET.pack(version, len(named)) + named)
    except struct.error as error:
        raise WireError(f"this does not fit in a request: {error}") from None


def decode_forget(payload: bytes) -> tuple[str, int]:
    """Return the name of a live store and a version."""
    name, version = _named(_FORGET, payload)
    return name, version


def _named(form: struct.Struct, payload: bytes) -> list[Any]:
    """Return a name, and the numbers before it without the last, its size."""
    try:
        *numbers, size = form.unpack_from(payload)
        name = payload[form.size :].decode()
    except (struct.error, ValueError) as error:
        raise WireError(f"a request cannot be read: {error}") from None
    if size != len(name.encode()):
        raise WireError("a request with inconsistent lengths")
    return [name, *numbers]


def encode_answers(request_id: int, answers: Sequence[NDArray[np.int32]]) -> bytes:
    """Return the frame of recalled answers."""
    sizes = np.array([len(answers), *map(len, answers)], _NUMBER)
    ids = [answer.astype(_TOKEN, copy=False).tobytes() for answer in answers]
    return frame(Operation.RECALL | ANSWER, request_id, b"".join((sizes.tobytes(), *ids)))


def decode_answers(payload: bytes, vocab_size: int = 1 << 31) -> list[NDArray[np.int32]]:
    """Return recalled answers, int32 [any] each; WireError for wrong lengths, or an id outside the vocabulary."""
    try:
        (count,) = np.frombuffer(payload, _NUMBER, 1)
        sizes = np.frombuffer(payload, _NUMBER, min(int(count), len(payload)), 4).astype(np.int64)
        ids = np.frombuffer(payload, _TOKEN, offset=4 + 4 * len(sizes))
    except ValueError as error:
        raise WireError(f"recalled answers cannot be read: {error}") from None
    if sizes.sum() != len(ids) or len(sizes) != count:
        raise WireError("recalled answers with inconsistent lengths")
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise WireError(f"recalled answers with ids outside the vocabulary of {vocab_size:,}")
    return np.split(ids, np.cumsum(sizes)[:-1]) if len(sizes) else []


def encode_answer(request_id: int, build: int, tokenizer: int, micros: int, batch: DraftBatch) -> bytes:
    """Return the frame of an answer; the arguments are those of `DraftAnswer`."""
    sizes, trees = batch.encode_trees()
    if len(sizes) == 1:  # the same, faster
        count = min(batch.match_counts.item(), _MOST)
        table = _ROW.pack(sizes.item(), batch.match_lengths.item(), count)
    else:
        counts = np.minimum(batch.match_counts, _MOST)
        table = np.array((sizes, batch.match_lengths, counts), _NUMBER).tobytes()
    head = _DRAFTS.pack(build, tokenizer, len(sizes), 0, min(micros, _MOST))
    return frame(Operation.DRAFT | ANSWER, request_id, b"".join((head, table, trees.tobytes())))


def decode_answer(
    payload: bytes, vocab_size: int = 1 << 31, budget: int = MAX_NODES, contexts: int | None = None
) -> DraftAnswer:
    """Decode the payload of an answer for so many contexts and validate its trees, which decoders trust."""
    if len(payload) < _DRAFTS.size:
        raise WireError(f"an answer has at least {_DRAFTS.size} bytes, found {len(payload)}")
    build, tokenizer, batch, _, micros = _DRAFTS.unpack_from(payload)
    if contexts is not None and batch != contexts:
        raise WireError(f"{batch} drafts for {contexts} contexts")
    if len(payload) < (start := _DRAFTS.size + 12 * batch):
        raise WireError(f"an answer of {batch} drafts has at least {start} bytes, found {len(payload)}")
    try:
        drafts = decode_drafts(payload, _DRAFTS.size, batch, vocab_size, budget)
    except DraftTreeError as error:
        raise WireError(f"an answer has a broken tree: {error}") from None
    return DraftAnswer(build, tokenizer, micros, drafts)


def encode_json(operation: int, request_id: int, document: Any) -> bytes:
    """Return the frame of a JSON answer."""
    return frame(operation | ANSWER, request_id, json.dumps(document).encode())


def encode_failure(operation: int, request_id: int, failure: Failure) -> bytes:
    """Return the frame of a failure."""
    wait = _FAILURE.pack(math.ceil(min(failure.retry_after * 1000, _MOST)))
    return frame(operation | ANSWER, request_id, wait + failure.message.encode(), failure.status)


def decode_failure(header: Header, payload: bytes) -> Failure:
    """Decode the payload of a frame whose status is not `OK`."""
    try:
        (millis,) = _FAILURE.unpack_from(payload)
        return Failure(Status(header.status), millis / 1000, payload[_FAILURE.size :].decode())
    except (struct.error, ValueError) as error:
        raise WireError(f"an answer of status {header.status} cannot be read: {error}") from None
