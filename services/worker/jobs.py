"""A decoding job and its events."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, TypeAlias

from draftstore.hf.requests import GenerationRequest
from services.worker.problems import ApiError
from services.worker.writing import Reason, Scored, Usage


@dataclasses.dataclass(frozen=True)
class Delta:
    """A chunk of one answer, with the tokens that begin in it if likelihoods are asked for."""

    index: int
    text: str
    scored: Sequence[Scored] = ()


@dataclasses.dataclass(frozen=True)
class Answered:
    """One answer is complete."""

    index: int
    text: str
    reason: Reason
    scored: Sequence[Scored] = ()


@dataclasses.dataclass(frozen=True)
class Finished:
    """All answers are complete."""

    usage: Usage


@dataclasses.dataclass(frozen=True)
class Failed:
    """Decoding failed."""

    error: ApiError


@dataclasses.dataclass(frozen=True)
class Gone:
    """The client has disconnected."""


Event: TypeAlias = Delta | Answered | Finished | Failed | Gone


@dataclasses.dataclass(eq=False)
class DecodingJob:
    """One decoding job: all answers that a client asks for at once.

    Attributes:
        id: id in the answer and the log.
        endpoint: `chat` or `completions`.
        requests: one for each answer; those to one prompt share its array.
        post: takes events; called from any thread.
        stops: stop strings.
        lead: see `Writing`.
        bearer: name of the client's token.
        record: turns an answer into a record of the response log.
        created: time of arrival in monotonic seconds.
        cancelled: whether its answers are no longer wanted: the client has gone, or one of them failed.
        begun: answers whose decoding has begun.
        done: answers decoded so far.
        failure: why it failed; None while it has not.
        reason: `length` if one of them ended at its limit.
        waited: seconds until decoding began; None before.
        first: seconds until the first token; None before.
        usage: figures so far.
    """

    id: str
    endpoint: str
    requests: Sequence[GenerationRequest]
    post: Callable[[Event], None]
    stops: Sequence[str] = ()
    lead: str = ""
    bearer: str = ""
    record: Callable[[Answered], Mapping[str, Any]] | None = None
    created: float = dataclasses.field(default_factory=monotonic)
    cancelled: bool = False
    begun: int = 0
    done: int = 0
    failure: ApiError | None = None
    reason: Reason = "stop"
    waited: float | None = None
    first: float | None = None
    usage: Usage = dataclasses.field(default_factory=lambda: Usage(0))

    @property
    def over(self) -> bool:
        """Whether nothing more is to be decoded."""
        return self.done == (self.begun if self.cancelled else len(self.requests))
