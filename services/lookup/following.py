"""The served releases, and a thread that follows the catalogue: opens and warms new builds, and swaps.

    releases = Releases(settings, metrics)
    releases.start(opened)                      # calls `opened` once all that can be opened is open
    served = releases.get("chat")               # on any thread, for one request

A swap replaces an entry of a dict: earlier requests use the previous build to their end, later ones the new build. The
previous build stays open for 15 minutes, so that a rollback, which is for emergencies, is only a swap. While the
database is down, what is served stays.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

from draftstore.errors import DraftstoreError, StoreError
from draftstore.storage.manifest import manifest_digest
from schema.catalogue.releases import LiveRelease, LiveReleases
from services.lookup.metrics import Metrics
from services.lookup.served import Served, ServedLive, Serving
from services.lookup.settings import LookupSettings, Target

LOG = logging.getLogger(__name__)
KEPT_SECONDS = 900.0
"""Seconds that the previous build stays open, for a rollback."""
LAST_READERS = 60.0
"""Seconds after which no request uses a replaced store any more."""
LAST_SECONDS = 1.0
"""Maximum seconds to wait for the thread at shutdown."""
AGAIN_SECONDS = 10.0
"""Seconds until opening a failed store is retried."""


class _Failure(NamedTuple):
    """A target that cannot be opened, why, and when it is retried."""

    target: Target
    message: str
    again_at: float


class Releases:
    """The open stores by name, kept up to date by a thread."""

    def __init__(
        self, settings: LookupSettings, metrics: Metrics, kept_seconds: float = KEPT_SECONDS
    ) -> None:
        """Open nothing yet; `kept_seconds` is the time that the previous build stays open."""
        self.problem: str | None = None  # why the catalogue cannot be read
        self.read_at: float | None = None  # when it was last read, in Unix seconds
        self.unopened: list[str] = []  # names that should be served and are not
        self.settings = settings  # may be replaced between two checks
        self._metrics = metrics
        self._kept_seconds = kept_seconds
        self._catalogue: LiveReleases | None = None
        if settings.uses_catalogue:
            metrics.watch_catalogue(lambda: not self.problem, lambda: time.time() - (self.read_at or nan))
        self._released: list[Target] = []
        self._open: dict[str, Served] = {}
        # No release of the same name replaces a live store.
        self.live = {target.name: ServedLive(target) for target in settings.live}
        self._retired: dict[Served, float] = {}  # stores no longer served, the latest last, and since when
        self._failed: dict[str, _Failure] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def get(self, name: str) -> Serving:
        """Return the store of a name; KeyError if nothing of this name is served."""
        return self.live[name] if name in self.live else self._open[name]

    def describe(self, allowed: Callable[[str], bool] = lambda _: True) -> list[dict[str, Any]]:
        """Return descriptions of the stores that a client may see, as JSON values."""
        return [self.get(name).describe() for name in self.names if allowed(name)]

    @property
    def names(self) -> list[str]:
        """Names that are served."""
        return sorted({*self._open, *self.live})

    @property
    def failures(self) -> dict[str, str]:
        """Reasons why a name is not served, or is served from an older build."""
        return {name: failure.message for name, failure in self._failed.items()}

    @property
    def missing(self) -> list[str]:
        """Requested releases that the catalogue does not have."""
        known = {target.name for target in self._released}
        return sorted(set(self.settings.releases) - known) if self.read_at is not None else []

    def start(self, opened: Callable[[], object]) -> None:
        """Start the thread, which calls `opened` once all that can be opened at the start is open."""
        self._thread = threading.Thread(target=self._run, args=(opened,), name="releases", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close all stores, unless it is opening one: then the end of the process closes them."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(LAST_SECONDS)
            if self._thread.is_alive():
                return
        for held in (self._catalogue, *self.live.values(), *self._open.values(), *self._retired):
            if held is not None:
                held.close()

    def problem_at_start(self) -> str | None:
        """Return why the service should not start; None if it may.

        Every named store or release must open. Of unnamed releases, one is enough.
        """
        if self.settings.wait:
            return None
        for name, reason in sorted(self.failures.items()):
            if name in self.settings.names or not self.names:
                return f"{name!r} cannot be served: {reason}"
        if self.problem and self.read_at is None:
            return f"the catalogue cannot be read: {self.problem} (--store serves directories without one)"
        if self.missing:
            missing = ", ".join(map(repr, self.missing))
            return f"the catalogue has no release {missing}: see `draftstore releases list`, or publish it"
        if not self.names:
            return (
                "there is nothing to serve: publish a release with `draftstore releases publish`, name a directory "
                "with --store, or start with --wait"
            )
        return None

    def _run(self, opened: Callable[[], object]) -> None:
        self._follow()
        opened()
        while not self._stopping.wait(self.settings.poll_seconds):
            self._follow()

    def _follow(self) -> None:
        try:
            self.follow()
        except Exception:  # the thread must continue, whatever happens
            LOG.exception("following the releases failed, trying again")

    def follow(self) -> None:
        """Read the catalogue, open what is missing, close what is no longer wanted."""
        if self.settings.uses_catalogue:
            self._read()
        backend = self.settings.backend
        stores = [with_digest(target, backend) for target in self.settings.stores]
        found = (*self._released, *stores)
        targets = {target.name: target for target in found if target.name not in self.live}
        for name in self._open.keys() - targets.keys():
            LOG.info("no longer serving %r", name)
            self._retire(self._open.pop(name))
        self._failed = {name: failure for name, failure in self._failed.items() if name in targets}
        for target in targets.values():
            self._serve(target)
        self.unopened = sorted({*self.settings.names, *targets} - self._open.keys())
        served: dict[str, Serving] = {**self._open, **self.live}
        builds = {
            name: {"kind": store.kind, "build": f"{store.build:016x}", "tokenizer": f"{store.tokenizer:016x}"}
            for name, store in served.items()
        }
        self._metrics.show(builds, self.unopened)
        self._close_retired()

    def _read(self) -> None:
        """Read the releases, reconnecting if necessary; what was read before stays if that fails."""
        missing = self.missing
        try:
            if self._catalogue is None:
                self._catalogue = LiveReleases()
            live = self._catalogue.read()
        except (DraftstoreError, OSError) as error:
            self._lose(str(error))
            return
        if self.problem is not None:
            LOG.info("the catalogue can be read again")
        self.problem, self.read_at = None, time.time()
        self._released = catalogue_targets(live, self.settings.releases, self.settings.backend)
        if self.missing and self.missing != missing:
            LOG.warning("the catalogue has no release %s", ", ".join(map(repr, self.missing)))

    def _lose(self, problem: str) -> None:
        if self._catalogue is not None:
            self._catalogue.close()
            self._catalogue = None
        if self.problem is None:
            LOG.warning("the catalogue cannot be read; what is served stays: %s", problem)
        self.problem = problem

    def _serve(self, target: Target) -> None:
        name = target.name
        before, failure = self._open.get(name), self._failed.get(name)
        if before is not None and before.damage is not None:
            LOG.error("%r is no longer served: %s", name, before.damage)
            self._retire(self._open.pop(name))
            before = None
        if before is None or before.target != target:
            if failure is not None and failure.target == target and time.monotonic() < failure.again_at:
                return
            served = self._find_retired(target) or self._open_store(target)
            if served is None:
                return
            self._open[name] = served
            if before is not None:
                self._metrics.of(name).counts["swaps"] += 1
                self._retire(before)
        self._failed.pop(name, None)

    def _open_store(self, target: Target) -> Served | None:
        began = time.monotonic()
        texts = [served.text for served in self._open.values()]
        try:
            served = Served(target, texts)
        except Exception as error:  # noqa: BLE001 - the other releases must stay served
            self._fail(target, error)
            return None
        LOG.info("serving %s, opened in %.2f seconds", served, time.monotonic() - began)
        return served

    def _fail(self, target: Target, error: Exception) -> None:
        """Note why a target cannot be opened; it is logged only if it is new."""
        self._metrics.of(target.name).counts["open_failures"] += 1
        expected = isinstance(error, (DraftstoreError, OSError))
        message = str(error) if expected else f"{type(error).__name__}: {error}"
        known, before = self._failed.get(target.name), self._open.get(target.name)
        if known is None or (known.target, known.message) != (target, message):
            instead = f"; serving {before} as before" if before else ""
            unexpected = None if expected else error
            LOG.error("%r cannot be opened: %s%s", target.name, message, instead, exc_info=unexpected)
        self._failed[target.name] = _Failure(target, message, time.monotonic() + AGAIN_SECONDS)

    def _find_retired(self, target: Target) -> Served | None:
        for served in self._retired:
            if served.damage is None and served.target == target:
                LOG.info("serving %s again", served)
                del self._retired[served]
                return served
        return None

    def _retire(self, served: Served) -> None:
        self._retired[served] = time.monotonic()

    def _close_retired(self) -> None:
        """Close the stores that no request uses any more, except a name's previous build for a while."""
        now = time.monotonic()
        latest = {served.name: served for served in self._retired if served.name in self._open}
        for served, since in list(self._retired.items()):
            may_return = served is latest.get(served.name)
            if now - since > (self._kept_seconds if may_return else min(LAST_READERS, self._kept_seconds)):
                del self._retired[served]
                served.close()
                LOG.info("closed %s", served)


def with_digest(target: Target, backend: str | None = None) -> Target:
    """Return the target with the digest of its directory's current content, which a new build may have replaced."""
    try:
        return target._replace(digest=manifest_digest(target.path), backend=backend)
    except (StoreError, OSError):
        return target._replace(digest=None, backend=backend)


def catalogue_targets(
    live: Iterable[LiveRelease], names: Iterable[str] = (), backend: str | None = None
) -> list[Target]:
    """Return the targets of the named releases, or of all if no names are given."""
    wanted = set(names)
    return [
        Target(name, Path(path), digest, backend if backend in backends else None)
        for name, _, _, path, digest, backends in live
        if not wanted or name in wanted
    ]
