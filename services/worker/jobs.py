"""A decoding job and its events."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, TypeAlias

from draftstore.hf.requests import GenerationRequest
from services.worker.problems import ApiError
from services.worker.writing import Reason, Usage


@dataclasses.dataclass(frozen=True)
class Delta:
    """A chunk of the answer."""

    text: str


@dataclasses.dataclass(frozen=True)
class Finished:
    """The answer is complete."""

    text: str
    reason: Reason
    usage: Usage


@dataclasses.dataclass(frozen=True)
class Failed:
    """Decoding failed."""

    error: ApiError


@dataclasses.dataclass(frozen=True)
class Gone:
    """The client has disconnected."""


Event: TypeAlias = Delta | Finished | Failed | Gone


@dataclasses.dataclass(eq=False)
class DecodingJob:
    """One decoding job.

    Attributes:
        id: id in the answer and the log.
        endpoint: `chat` or `completions`.
        request: generation request.
        post: takes events; called from any thread.
        stops: stop strings.
        lead: see `Writing`.
        bearer: name of the client's token.
        record: turns the answer into a record of the response log.
        created: time of arrival in monotonic seconds.
        cancelled: whether the client has gone.
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
