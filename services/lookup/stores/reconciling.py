"""Reconciling the open stores with the targets: new stores are opened and warmed while the old ones still serve.

The store before stays open for a while: a rollback, which is for emergencies, is then a swap and nothing else.
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from draftstore.errors import DraftstoreError
from services.lookup.stores.served import DIGEST_SHOWN, OpenStores, ServedStore, open_served
from services.lookup.stores.targets import Target

LOG = logging.getLogger(__name__)
FIRST_PAUSE = 1.0
"""Seconds until a failed store is tried again; doubles each time."""
LONGEST_PAUSE = 60.0
KEPT_SECONDS = 900.0
"""Seconds that the store before stays open, for a rollback."""

Swapped = Callable[[str], None]
Failed = Callable[[str, str], None]
Run = Callable[[Callable[[], None]], object]


class Failure(NamedTuple):
    """A target that cannot be opened.

    Attributes:
        target: the target.
        message: the reason.
        pause: seconds until the next attempt.
        again_at: time of the next attempt, as `time.monotonic`.
    """

    target: Target
    message: str
    pause: float
    again_at: float


class Kept(NamedTuple):
    """The store that a name was served from before; this module is one of its readers.

    Attributes:
        target: its target.
        served: the store.
        until: time until which it stays open, as `time.monotonic`.
    """

    target: Target
    served: ServedStore
    until: float


def _ignore(*_: object) -> None:
    """Do nothing."""


class Reconciler:
    """Keeps the targets open; called repeatedly by the thread that follows them."""

    def __init__(
        self,
        open_stores: OpenStores,
        run: Run = lambda call: call(),
        *,
        swapped: Swapped = _ignore,
        failed: Failed = _ignore,
        open_served: Callable[[Target], ServedStore] = open_served,
        kept_seconds: float = KEPT_SECONDS,
    ) -> None:
        """Start with no open stores.

        Args:
            open_stores: the stores to manage.
            run: runs a swap on the thread that answers requests, in order, as `loop.call_soon_threadsafe` does.
            swapped: called on that thread with the name of a swapped store.
            failed: called with the name and reason when a store cannot be opened.
            open_served: opens and warms a store.
            kept_seconds: time that the store before stays open.
        """
        self._open_stores = open_stores
        self._run = run
        self._swapped = swapped
        self._failed = failed
        self._open_served = open_served
        self._kept_seconds = kept_seconds
        self._serving: dict[str, ServedStore] = {}
        self._kept: dict[str, Kept] = {}
        self._opened: dict[str, Target] = {}
        self._failures: dict[str, Failure] = {}

    @property
    def failures(self) -> dict[str, str]:
        """Reasons why a name is not served, or is served from an older build."""
        return {name: failure.message for name, failure in self._failures.items()}

    def __call__(self, targets: Iterable[Target]) -> None:
        """Open missing stores and close unwanted ones; never raises."""
        wanted = {target.name: target for target in targets}
        for name in self._opened.keys() - wanted.keys():
            self._remove(name)
        for name in self._failures.keys() - wanted.keys():
            del self._failures[name]
        for name, kept in list(self._kept.items()):
            if name not in wanted or time.monotonic() >= kept.until:
                self._let_go(name)
        for target in wanted.values():
            self._serve(target)

    def _remove(self, name: str) -> None:
        del self._opened[name], self._serving[name]
        LOG.info("no longer serving %r", name)
        self._run(lambda: self._take_away(name))

    def _take_away(self, name: str) -> None:
        self._open_stores.remove(name)

    def _serve(self, target: Target) -> None:
        """Open a target unless it is open or has failed recently."""
        opened, failure = self._opened.get(target.name), self._failures.get(target.name)
        if opened is not None and (opened.digest, opened.backend) == (target.digest, target.backend):
            self._failures.pop(
                target.name, None
            )  # the newer build that could not be opened is no longer wanted
            return
        if failure is not None and failure.target == target and time.monotonic() < failure.again_at:
            return
        began = time.monotonic()
        kept = self._kept.get(target.name)
        if kept is not None and (kept.target.digest, kept.target.backend) == (target.digest, target.backend):
            LOG.info("serving %r from build %s again", target.name, kept.served.digest[:DIGEST_SHOWN])
            del self._kept[target.name]
            self._swap(target, kept.served, partial(self._put_back, kept.served))
            return
        try:
            served = self._open_served(target)
        except (DraftstoreError, OSError) as error:
            self._note(target, str(error))
        except Exception as error:
            LOG.exception("%r cannot be opened", target.name)
            self._note(target, f"{type(error).__name__}: {error}")
        else:
            LOG.info(
                "serving %r from build %s, opened in %.2f seconds",
                target.name, served.digest[:DIGEST_SHOWN], time.monotonic() - began,
            )  # fmt: skip
            self._swap(target, served, partial(self._put, served))

    def _swap(self, target: Target, served: ServedStore, put: Callable[[], None]) -> None:
        """Have a store put in its place, and keep the one before."""
        name = target.name
        self._failures.pop(name, None)
        self._let_go(name)
        before = self._opened.get(name)
        if before is not None and before.path != target.path and self._kept_seconds > 0:
            self._serving[name].acquire()  # it is replaced only below
            self._kept[name] = Kept(before, self._serving[name], time.monotonic() + self._kept_seconds)
        self._opened[name], self._serving[name] = target._replace(digest=served.digest), served
        self._run(put)

    def _let_go(self, name: str) -> None:
        """Close the store before of a name, unless others read it."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            kept.served.release()

    def _put_back(self, served: ServedStore) -> None:
        """Serve the store before again; from here on it is no longer kept."""
        served.revive()
        self._put(served)
        served.release()

    def _put(self, served: ServedStore) -> None:
        if self._open_stores.put(served.name, served) is not None:
            self._swapped(served.name)

    def _note(self, target: Target, message: str) -> None:
        """Record a failure to open a target; the same reason is reported once."""
        before = self._failures.get(target.name)
        again = before is not None and before.target == target
        pause = min(2 * before.pause, LONGEST_PAUSE) if before is not None and again else FIRST_PAUSE
        self._failures[target.name] = Failure(target, message, pause, time.monotonic() + pause)
        if before is None or (before.target, before.message) != (target, message):
            kept = self._opened.get(target.name)
            LOG.error(
                "%r cannot be opened: %s%s",
                target.name, message,
                f"; serving build {str(kept.digest)[:DIGEST_SHOWN]} as before" if kept else "",
            )  # fmt: skip
            self._failed(target.name, message)
