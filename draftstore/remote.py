"""What the two clients of the lookup service are made of, whether they wait in threads or in event loops."""

import json
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftstore.addresses import Address, Endpoint, default_socket
from draftstore.breaker import Breaker
from draftstore.counters import Counters, Outcome
from draftstore.errors import DraftstoreError, LookupServiceError
from draftstore.judging import MAX_CONTEXT, Judge, Request, Trouble, check_answer
from draftstore.manifest import TokenizerIdentity
from draftstore.wire import Frame, Operation, frame

BUDGET = 64
CONTEXT_SIZE = 16
"""Tokens that a session sends; REST looks back as far, CREST less."""
DEADLINE = 0.002
CHECK_SECONDS = 5.0
RESOLVE_SECONDS = 0.5
"""How long a new client waits for a host name at most."""

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

    def _renew(self) -> None:
        """Make a client anew in a forked process."""
        self._judge.renew()
        self._endpoint.renew()

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
        return Request(number, frame(Operation.RELEASES, number), 0, 0)

    def _check_request(self, strategy: str) -> Request:
        """Return the smallest question for a draft."""
        nothing = np.full((1, self.context_size), -1, np.int32)
        (request,) = self._judge.requests(nothing, 1, 0.0, strategy)
        return request

    def _checked(self, releases: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return what the service says of this release, and learn from it."""
        found = next((release for release in releases if release.get("name") == self.name), {})
        size = found.get("vocab_size")
        if isinstance(size, int):
            self._judge.learn_vocabulary(size)
        self._judge.breaker.reset()
        return found

    def _error(self, trouble: Trouble) -> LookupServiceError:
        """Return what `check` and `releases` raise."""
        text = f"no drafts of {self.name!r} from {self.address}: {str(trouble).rstrip('.')}"
        hint = _HINTS.get(trouble.outcome)
        return LookupServiceError(f"{text}; {hint}" if hint else text)


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
