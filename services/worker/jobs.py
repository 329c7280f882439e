"""A request on its way through the decoder, and what comes back of it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, TypeAlias

from draftstore.hf.requests import GenerationRequest
from services.worker.problems import ApiError
from services.worker.writing import Reason, Usage


@dataclasses.dataclass(frozen=True)
class Delta:
    """A piece of the answer."""

    text: str


@dataclasses.dataclass(frozen=True)
class Finished:
    """The whole answer is there."""

    text: str
    reason: Reason
    usage: Usage


@dataclasses.dataclass(frozen=True)
class Failed:
    """There will be no more of the answer."""

    error: ApiError


@dataclasses.dataclass(frozen=True)
class Gone:
    """The client went away: nobody waits for an answer."""


Event: TypeAlias = Delta | Finished | Failed | Gone


@dataclasses.dataclass(eq=False)
class DecodingJob:
    """One request.

    Attributes:
        id: in the answer and in the log.
        endpoint: `chat` or `completions`.
        request: what is decoded.
        post: takes events; it is called from any thread.
        stops: texts that end the answer.
        lead: see `Writing`.
        bearer: name of the token that it came with.
        record: turns the answer into a line of the response log.
        created: when it came, in monotonic seconds.
        cancelled: whether nobody waits for it any more.
    """

    id: str
    endpoint: str
    request: GenerationRequest
    post: Callable[[Event], None]
    stops: Sequence[str] = ()
    lead: str = ""
    bearer: str = ""
    record: Callable[[str], Mapping[str, Any]] | None = None
    created: float = dataclasses.field(default_factory=monotonic)
    cancelled: bool = False
