"""What the two clients of the lookup service are made of, whether they wait in threads or in event loops."""

import json
import os
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.projection import Projection
from draftstore.errors import DraftstoreError, LookupServiceError, WireError
from draftstore.remote.addresses import Address, Endpoint, default_socket
from draftstore.remote.breaker import Breaker
from draftstore.remote.counters import Counters, Outcome
from draftstore.remote.judging import MAX_CONTEXT, Judge, Request, Trouble, check_answer
from draftstore.remote.queries import Queries, decode_projection
from draftstore.remote.wire import MAX_PAYLOAD, Frame, Operation, frame
from draftstore.storage.manifest import TokenizerIdentity

BUDGET = 64
CONTEXT_SIZE = 16
"""Tokens that a session sends; REST looks back as far, CREST less."""
DEADLINE = 0.002
CHECK_SECONDS = 5.0
RESOLVE_SECONDS = 0.5
"""How long a new client waits for a host name at most."""
MAX_SHOWN = 100
"""Letters of a name that the service tells."""
REFRESH_SECONDS = 1.0
"""Least time between two looks for the projection that a release has moved to."""
LONGEST_REFRESH = 4 * CHECK_SECONDS
"""Seconds after which such a look is given up: its event loop may have ended."""

Talk = Generator[Request, Frame, dict[str, Any]]
"""Yields what is to be asked, is sent the answers, and returns what the service says of the release."""

_HINTS = {
    Outcome.UNREACHABLE: "is `draftstore serve` running there?",
    Outcome.TIMEOUT: "it hangs, or is overloaded, or this is not its port for drafts",
    Outcome.CLOSED: "it is stopping, or this is no lookup service",
    Outcome.GARBAGE: "is this the port for drafts, and a version that fits this client?",
    Outcome.INVALID: "does its version fit this client?",
    Outcome.UNAUTHORIZED: "give one with token=...; `draftstore tokens new` makes one",
    Outcome.FORBIDDEN: "the token needs a permission for this release, see `draftstore tokens`",
    Outcome.NOT_FOUND: "publish a release of that name, or start the service with it",
}


class Remote:
    """One release or store of a lookup service, as one client sees it."""

    def __init__(
        self,
        address: str | Path | Address | None = None,
        name: str = "",
        *,
        token: str | None = None,
        tokenizer: TokenizerIdentity | None = None,
        vocab_size: int | None = None,
        target_model: str | None = None,
        context_size: int = CONTEXT_SIZE,
        deadline: float = DEADLINE,
        breaker: Breaker | None = None,
    ) -> None:
        """Get ready to ask, without asking: the service may be started later.

        Args:
            address: `unix:/path`, `/path`, `tcp://host:port` or `host:port`; by default the socket that
                `draftstore serve` makes on this machine for this user.
            name: of the release or store.
            token: a bearer token, where the service wants one.
            tokenizer: of the model; drafts of another one are refused. By default that of the first answer is kept to.
            vocab_size: ids of the model's vocabulary; drafts with others are refused.
            target_model: the model; `check` refuses a release that is bound to another one. None takes any.
            context_size: tokens of a text that sessions send.
            deadline: seconds that a call takes at most, from its start to the drafts of all its contexts.
            breaker: when to leave the service alone; by default after three failures in a row, for 50 ms to 5 s.

        Raises:
            DraftstoreError: a setting that makes no sense.
        """
        if not name:
            raise DraftstoreError("a client needs the name of a release or a store: RemoteStore(name=...)")
        if not 1 <= context_size <= MAX_CONTEXT:
            raise DraftstoreError(f"a context of {context_size} tokens: expected 1 to {MAX_CONTEXT:,}")
        self.name = name
        self.address = Address.parse(default_socket() if address is None else address)
        self.context_size = context_size
        self._target_model = target_model
        self._projection: Projection | None = None
        self._next_refresh = 0.0
        self._judge = Judge(
            name, where=self.address, token=token, tokenizer=tokenizer, vocab_size=vocab_size, deadline=deadline,
            breaker=breaker,
        )  # fmt: skip
        self._endpoint = Endpoint(self.address)
        self._endpoint.wait(RESOLVE_SECONDS)
        self._start()
        _everyone.add(self)

    def _start(self) -> None:
        """Get ready to keep connections."""

    @property
    def counters(self) -> Counters:
        """What has been asked so far, and what came of it."""
        return self._judge.counters

    @property
    def vocab_size(self) -> int:
        """Ids of the vocabulary: as given, or as `check` found them; 2 ** 31 while nobody has said."""
        return self._judge.vocab_size

    @property
    def projection(self) -> Projection | None:
        """From hidden states to the queries of a dense release, as `check` found it, or as it has moved since."""
        return self._projection

    def _renew(self) -> None:
        """Make a client anew in a forked process."""
        self._judge.renew()
        self._endpoint.renew()
        self._next_refresh = 0.0

    def _again(self, trouble: Trouble, attempt: int) -> bool:
        """Return whether a request should be sent once more, on a new connection."""
        if trouble.outcome is Outcome.CLOSED:
            again = attempt == 1  # that service may be gone, and another in its place
        else:
            again = trouble.outcome is Outcome.UNREACHABLE and attempt < len(self._endpoint)
        if again:
            self.counters.add("retries")
        return again

    def _releases_request(self) -> Request:
        """Return the question what is served."""
        number = self._judge.next_id()
        return Request(number, frame(Operation.RELEASES, number))

    def _projection_request(self) -> Request:
        """Return the question for the projection of a dense release."""
        number = self._judge.next_id()
        asked = frame(Operation.PROJECTION, number, self.name.encode())
        return Request(number, asked, longest_answer=MAX_PAYLOAD)

    def _checking(self, strategy: str) -> Talk:
        """Find out whether drafts can be had, and learn what drafting takes.

        Raises:
            Trouble: they cannot.
        """
        nothing = np.full((1, self.context_size), -1, np.int32)
        (request,) = self._judge.requests(nothing, 1, 0.0, strategy)
        self._judge.drafts(request, (yield request))
        found = yield from self._learning()
        self._judge.breaker.reset()
        return found

    def _learning(self) -> Talk:
        """Learn what is served under the name, and its projection where that is new.

        Raises:
            Trouble: the service does not say, it is for another model, or it moves on all the time.
        """
        for _ in range(3):
            found = self._fitting(read_releases((yield self._releases_request())))
            digest = _digest_of(found)
            if digest is None:
                self._projection = None
                return found
            if self._projection is not None and self._projection.digest == digest:
                return found
            projection = read_projection((yield self._projection_request()))
            if projection.digest == digest:
                self._projection = self._checked(projection)
                return found
        raise Trouble(Outcome.UNAVAILABLE, "it moves from one build to the next all the time: try again")

    def _fitting(self, releases: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return what the service says of this release, if it is for this model.

        Raises:
            Trouble: it is not.
        """
        found = next((release for release in releases if release.get("name") == self.name), {})
        model = found.get("target_model")
        if model is not None and self._target_model not in (None, model):
            raise Trouble(
                Outcome.OTHER_PROJECTION,
                f"its store is made for the model {_shown(model)}, expected {self._target_model!r}: publish a build "
                "for this model, or ask for another release",
            )
        size = found.get("vocab_size")
        if isinstance(size, int):
            self._judge.learn_vocabulary(size)
        return found

    def _checked(self, projection: Projection) -> Projection:
        """Return a projection that takes the same states as the one before it, if there was one.

        Raises:
            Trouble: whoever hands over states goes on with those of its model.
        """
        before = self._projection
        if before is not None and before.hidden_size != projection.hidden_size:
            raise Trouble(
                Outcome.OTHER_PROJECTION,
                f"it wants hidden states of {projection.hidden_size} numbers by now, expected {before.hidden_size}: "
                "its store is made for another model",
            )
        return projection

    def _must_refresh(self, trouble: Trouble, queries: Queries | None) -> bool:
        """Return whether to learn the projection anew: it is the one refused, and nobody is at it or just was."""
        known, now = self._projection, monotonic()
        if trouble.outcome is not Outcome.OTHER_PROJECTION or queries is None or now < self._next_refresh:
            return False
        if known is not None and known.digest != queries.projection.digest:
            return False  # another one is known by now; the text that asked will soon be over
        self._next_refresh = now + LONGEST_REFRESH
        return True

    @contextmanager
    def _refreshed(self) -> Iterator[None]:
        """Note that the projection was learned anew, or why it was not."""
        try:
            yield
        except Trouble as trouble:
            self._judge.warn(trouble, "refresh")
        finally:
            self._next_refresh = monotonic() + REFRESH_SECONDS

    def _error(self, trouble: Trouble) -> LookupServiceError:
        """Return what `check` and `releases` raise."""
        text = f"no drafts of {self.name!r} from {self.address}: {str(trouble).rstrip('.')}"
        hint = _HINTS.get(trouble.outcome)
        return LookupServiceError(f"{text}; {hint}" if hint else text)


class Following:
    """What the drafters of dense releases share: they keep a projection for as long as a text is decoded.

    Attributes:
        projection: from hidden states to queries; of a drafter it changes when a text begins, never in between.
    """

    projection: Projection
    _moved = False

    def _follow(
        self, latest: Projection | None, hidden: NDArray[np.float32] | None
    ) -> tuple[Projection, NDArray[np.float32] | None]:
        """Take over the projection that the release has by now.

        Args:
            latest: that one, if it is known.
            hidden: float32 [d], a state that was projected with `projection`, as whoever did it knew that.

        Returns:
            The projection of the text that begins, whatever other threads take over meanwhile; the state, or None if it
            is one of the projection before.
        """
        known = self.projection
        if latest is not None and latest is not known:
            self._moved = True
            self.projection = latest
            return latest, None
        if self._moved and hidden is not None and hidden.shape != (known.dims,):
            return known, None  # another thread's text began in between
        return known, hidden

    def _asked(self, batch: int, queries: NDArray[np.float32] | None) -> Queries:
        """Return what a batch of contexts asks with; without queries, with rows that are none."""
        if queries is None:
            queries = np.full((batch, self.projection.dims), np.nan, np.float32)
        return Queries(np.ascontiguousarray(queries, np.float32), self.projection)


def read_projection(answer: Frame) -> Projection:
    """Return the projection that a service has sent.

    Raises:
        Trouble: it fails, or sends none.
    """
    payload = check_answer(answer, Operation.PROJECTION)
    try:
        return decode_projection(payload)
    except WireError as error:
        raise Trouble(Outcome.GARBAGE, str(error)) from None


def _digest_of(described: dict[str, Any]) -> str | None:
    """Return the digest of the projection of a release; None if it has none."""
    projection = described.get("projection")
    digest = projection.get("digest") if isinstance(projection, dict) else None
    return digest if isinstance(digest, str) else None


def _shown(value: Any) -> str:
    """Return what a service says as it may stand in a message."""
    return repr(value)[:MAX_SHOWN]


def read_releases(answer: Frame) -> list[dict[str, Any]]:
    """Return what a service says that it serves.

    Raises:
        Trouble: it fails, or says no such thing.
    """
    payload = check_answer(answer, Operation.RELEASES)
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError):
        raise Trouble(Outcome.GARBAGE, "its list of releases is no JSON") from None
    found = document.get("releases") if isinstance(document, dict) else None
    if not isinstance(found, list) or not all(isinstance(release, dict) for release in found):
        raise Trouble(Outcome.GARBAGE, "its answer holds no list of releases")
    return found


_everyone: weakref.WeakSet[Remote] = weakref.WeakSet()


def _after_fork() -> None:
    """Make every client anew: connections belong to the parent, locks may be held by threads that are not here."""
    for remote in list(_everyone):
        remote._renew()


os.register_at_fork(after_in_child=_after_fork)
