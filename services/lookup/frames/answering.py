"""Answers to requests: what is allowed, and refusals. Uses no sockets.

job = answerer.begin(frame, grant)      # a checked draft request, or the bytes of a refusal
job = answerer.repeat(data, grant, job.kind)   # the same without the checks, if only id and contexts are new
"""

from time import perf_counter

from draftstore.errors import DraftstoreError, WireError, counted
from draftstore.remote.queries import OtherProjectionError, read_queries
from draftstore.remote.wire import (
    ANSWER,
    MAX_NAME,
    VERSION,
    DraftRequest,
    Failure,
    Frame,
    Header,
    Operation,
    Status,
    decode_request,
    encode_failure,
    encode_json,
)
from draftstore.remote.wire import frame as encode_frame
from services.common.permissions import Grant, Permissions
from services.lookup.figures.counting import ReleaseCounters, Slot
from services.lookup.frames.jobs import DraftJob, ReleaseStats, RequestKind
from services.lookup.limits import Limits
from services.lookup.stores.served import OpenStores, UnknownReleaseError

_HELLO = int(Operation.HELLO)
_RELEASES = int(Operation.RELEASES)
_PROJECTION = int(Operation.PROJECTION)
_NEEDS_TOKEN = "this service needs a token first (operation HELLO)"  # noqa: S105 (a sentence)


class Answerer:
    """Answers the requests of one process."""

    def __init__(self, open_stores: OpenStores, permissions: Permissions, limits: Limits, slot: Slot) -> None:
        """Answer from the open stores.

        Args:
            open_stores: the stores that are served.
            permissions: permissions of clients; may be replaced at any time.
            limits: limits on requests.
            slot: counters of this process.
        """
        self.permissions = permissions
        self.limits = limits
        self.slot = slot
        self._open_stores = open_stores
        self._stats: dict[str, ReleaseStats] = {}

    def begin(self, frame: Frame, grant: Grant | None, flags: int = 0) -> DraftJob | bytes:
        """Check a draft request.

        Args:
            frame: frame of operation `DRAFT`.
            grant: grant of the client; None before it presented a token, where one is needed.
            flags: flags of the answer if the request is refused.

        Returns:
            The job, or the answer if there is nothing to look up.
        """
        began = perf_counter()
        if grant is None:
            return self.refuse(frame.header, Status.UNAUTHORIZED, _NEEDS_TOKEN, flags)
        try:
            request = decode_request(frame.payload)
        except WireError as error:
            return self.refuse(frame.header, Status.BAD_REQUEST, str(error), flags)
        if not grant.allows(request.name):  # whether or not it exists
            return self._forbid(frame.header, grant, request.name, flags)
        limits = self.limits
        batch, width = request.contexts.shape
        most = limits.budget if grant.max_budget is None else grant.max_budget
        if batch > limits.batch or width > limits.context or request.budget > most:
            return self.refuse(frame.header, Status.TOO_LARGE, self._too_large(request, most), flags)
        return self._find(frame, request, grant, began, flags)

    def repeat(self, data: bytes, grant: Grant | None, kind: RequestKind | None) -> DraftJob | None:
        """Return the job of data that are one more request of a kind; None if they must be looked at."""
        began = perf_counter()
        found = None if kind is None else kind.repeated(data, grant)
        if kind is None or found is None or not self._open_stores.still(kind.served):
            return None
        return DraftJob(kind, *found, began)

    def _find(
        self, frame: Frame, request: DraftRequest, grant: Grant, began: float, flags: int
    ) -> DraftJob | bytes:
        """Find the store of a request and check that the request fits it."""
        name = request.name
        try:
            served = self._open_stores.get(name)
            served.drafter(request.strategy)
        except UnknownReleaseError as error:
            return self.refuse(frame.header, Status.NOT_FOUND, str(error), flags)
        except DraftstoreError as error:
            return self.refuse(frame.header, Status.NOT_FOUND, f"{name!r}: {error}", flags)
        stats = self._stats.get(name)
        if stats is None:
            stats = self._stats[name] = ReleaseStats(self.slot.release(name))
        kind = RequestKind(frame, request, grant, served, stats)
        number = frame.header.request_id
        if served.projection is None:  # hidden states are ignored
            return DraftJob(kind, number, request.contexts, began)
        try:
            queries = read_queries(request.sections, len(request.contexts), served.projection)
        except WireError as error:
            return self.refuse(frame.header, Status.BAD_REQUEST, f"{name!r}: {error}", flags)
        except OtherProjectionError as error:
            message = f"{name!r}: {error}"
            return self.refuse(frame.header, Status.OTHER_PROJECTION, message, flags, figures=stats.figures)
        return DraftJob(kind, number, request.contexts, began, queries)

    def answer_other(self, frame: Frame, grant: Grant | None, flags: int = 0) -> bytes:
        """Answer a request other than a draft request or greeting."""
        header = frame.header
        if header.operation not in (_RELEASES, _PROJECTION):
            message = f"operation {header.operation} is unknown: this service speaks version {VERSION}"
            return self.refuse(header, Status.BAD_REQUEST, message, flags)
        if grant is None:
            return self.refuse(header, Status.UNAUTHORIZED, _NEEDS_TOKEN, flags)
        if header.operation == _PROJECTION:
            return self._answer_projection(frame, grant, flags)
        return encode_json(
            _RELEASES, header.request_id, {"releases": self._open_stores.describe(grant.allows)}, flags
        )

    def _answer_projection(self, frame: Frame, grant: Grant, flags: int) -> bytes:
        """Answer with the projection of a dense store."""
        header = frame.header
        if len(frame.payload) > MAX_NAME:
            message = f"the name of a release has at most {MAX_NAME} bytes, found {len(frame.payload):,}"
            return self.refuse(header, Status.BAD_REQUEST, message, flags)
        try:
            name = frame.payload.decode()
        except UnicodeDecodeError:
            return self.refuse(header, Status.BAD_REQUEST, "the name of a release is not UTF-8", flags)
        if not grant.allows(name):
            return self._forbid(header, grant, name, flags)
        try:
            served = self._open_stores.get(name)
        except UnknownReleaseError as error:
            return self.refuse(header, Status.NOT_FOUND, str(error), flags)
        if served.projection is None:
            message = f"{name!r} has no projection: its store is of kind {served.kind!r}, expected 'dresd'"
            return self.refuse(header, Status.NOT_FOUND, message, flags)
        return encode_frame(
            header.operation | ANSWER, header.request_id, served.encoded_projection, Status.OK, flags
        )

    def greet(self, frame: Frame, flags: int = 0, budget: int | None = None) -> tuple[Grant | None, bytes]:
        """Answer a greeting."""
        header = frame.header
        grant = self.permissions.identify(frame.payload)
        if grant is None:
            message = "this token is not known here"
            return None, self.refuse(header, Status.UNAUTHORIZED, message, flags)
        most = grant.max_budget or budget or self.limits.budget
        document = {"version": VERSION, "limits": self.limits.public(most)}
        return grant, encode_json(_HELLO, header.request_id, document, flags)

    def refuse(
        self, header: Header, status: Status, message: str, flags: int = 0, retry_after: float = 0.0,
        figures: ReleaseCounters | None = None,
    ) -> bytes:  # fmt: skip
        """Return a failure and count it under its release if served, else under none."""
        data = encode_failure(
            header.operation, header.request_id, Failure(status, retry_after, message), flags
        )
        (figures or self.slot.nothing).fail(status, header.length, len(data))
        return data

    def _forbid(self, header: Header, grant: Grant, name: str, flags: int) -> bytes:
        """Refuse a release that the token does not cover."""
        return self.refuse(header, Status.FORBIDDEN, f"the token {grant.name!r} may not use {name!r}", flags)

    def _too_large(self, request: DraftRequest, most: int) -> str:
        """Say which limit a request exceeds."""
        batch, width = request.contexts.shape
        limits = self.limits
        return (
            f"{counted(batch, 'context')} of {counted(width, 'token')} with a budget of {request.budget}: expected "
            f"at most {limits.batch} contexts of {limits.context} tokens with a budget of {most}"
        )
