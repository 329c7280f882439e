"""Following the stores to serve: a thread that reads the releases every few seconds.

    follower = Follower(stores, catalogue, reconciler)
    follower.start()
    ...
    follower.stop()

The database may be down, restarting or hanging: the last known releases stay, also those that an earlier process has
kept, and the thread tries again. It never ends on its own.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from draftstore.errors import DraftstoreError
from schema.live_releases import LiveRelease, LiveReleases
from services.lookup.stores.kept import KeptReleases
from services.lookup.stores.targets import Target, catalogue_targets, with_digest

LOG = logging.getLogger(__name__)
POLL_SECONDS = 2.0
"""Seconds between two reads of the catalogue."""
FIRST_PAUSE = 0.1
"""Seconds until the next attempt to reach the database; doubles each time, up to the polling interval."""

OnTargets = Callable[[list[Target]], None]


class Catalogue:
    """The releases of the catalogue, as last read.

    Attributes:
        names: releases to follow; empty: all.
        targets: the stores that they point at.
        problem: why the catalogue cannot be read; None when it can.
        read_at: when it was last read, by this or an earlier process, as Unix time in seconds; None: never.
    """

    def __init__(
        self, names: Iterable[str] = (), backend: str | None = None, kept: KeptReleases | None = None
    ) -> None:
        """Connect nowhere yet.

        Args:
            names: releases to follow; empty: all.
            backend: backend for the entries of CREST stores, where available.
            kept: file that keeps the releases for times without a database.
        """
        self.names = frozenset(names)
        self.targets: list[Target] = []
        self.problem: str | None = None
        self.read_at: float | None = None
        self._backend = backend
        self._kept = kept
        self._releases: LiveReleases | None = None

    def look(self) -> None:
        """Read the releases, reconnecting if necessary.

        Raises:
            DatabaseError: the database is down, refuses or hangs.
        """
        try:
            if self._releases is None:
                self._releases = LiveReleases()
            live = self._releases.read()
        except BaseException:
            self.close()
            raise
        self._take(live, time.time())
        if self._kept is not None:
            self._kept.keep(live)

    def recall(self) -> None:
        """Take the releases that were kept, unless some are known."""
        if not self.known and self._kept is not None and (kept := self._kept.load()) is not None:
            self._take(kept.releases, kept.read_at)

    def _take(self, live: Iterable[LiveRelease], read_at: float) -> None:
        self.targets = catalogue_targets(live, self.names, self._backend)
        self.read_at = read_at

    @property
    def known(self) -> bool:
        """Whether the releases are known, from the database or as they were kept."""
        return self.read_at is not None

    @property
    def missing(self) -> list[str]:
        """Return the requested releases that the catalogue does not have."""
        return sorted(self.names - {target.name for target in self.targets}) if self.known else []

    def close(self) -> None:
        """Close the connection."""
        releases, self._releases = self._releases, None
        if releases is not None:
            with suppress(Exception):
                releases.close()


class Follower:
    """A thread that calls `on_targets` with the stores to serve whenever they may have changed."""

    def __init__(
        self,
        stores: Sequence[Target],
        catalogue: Catalogue | None,
        on_targets: OnTargets,
        *,
        poll_seconds: float = POLL_SECONDS,
        recall: bool = False,
    ) -> None:
        """Follow directories and releases; a directory wins over a release of the same name.

        Args:
            stores: directories, whose content a newer build may replace.
            catalogue: releases; None: no database.
            on_targets: called in the thread with all targets; should not raise.
            poll_seconds: interval between two reads.
            recall: whether to begin with the releases that were kept, before the database is asked: what serves a
                moment ago is the best guess, and a database that hangs delays nothing.
        """
        self._stores = list(stores)
        self._catalogue = catalogue
        self._on_targets = on_targets
        self._poll_seconds = poll_seconds
        self._recall = recall
        self._pause = FIRST_PAUSE
        self._stopping = False
        self._wake = threading.Event()
        self._looked = threading.Event()
        self._informed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draftstore-following", daemon=True)

    @property
    def problem(self) -> str | None:
        """Return why the catalogue cannot be read; None when it can."""
        return None if self._catalogue is None else self._catalogue.problem

    @property
    def missing(self) -> list[str]:
        """Return the requested releases that the catalogue does not have."""
        return [] if self._catalogue is None else self._catalogue.missing

    @property
    def complete(self) -> bool:
        """Whether all targets are known: the catalogue has been read once and has all requested releases."""
        return self._catalogue is None or (self._catalogue.known and not self._catalogue.missing)

    @property
    def informed(self) -> bool:
        """Whether `on_targets` was called with the releases of the catalogue, as it is or as it was kept."""
        return self._informed.is_set()

    @property
    def read_at(self) -> float | None:
        """When the catalogue was last read, as Unix time in seconds; None if never, or without one."""
        return None if self._catalogue is None else self._catalogue.read_at

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wait_for_first(self, timeout: float) -> bool:
        """Wait for the first call of `on_targets`; return False on a timeout."""
        return self._looked.wait(timeout)

    def stop(self, timeout: float = 10.0) -> bool:
        """End the thread; return False if it is still busy after `timeout` (opening a store, say)."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._recall and self._catalogue is not None:
            self._begin_with_kept(self._catalogue)
        while not self._stopping:
            pause = self._poll_seconds
            try:
                pause = self._follow()
            except Exception:  # the thread must go on, whatever happens
                LOG.exception("following the catalogue failed, trying again")
            self._looked.set()
            self._wake.wait(pause)
            self._wake.clear()
        if self._catalogue is not None:
            self._catalogue.close()

    def _begin_with_kept(self, catalogue: Catalogue) -> None:
        """Tell the releases that were kept, if there are any."""
        try:
            catalogue.recall()
            if catalogue.known:
                self._tell()
        except Exception:  # the catalogue follows
            LOG.exception("the releases that were kept cannot be followed")

    def _follow(self) -> float:
        """Read the targets once; return the seconds until the next read."""
        pause = self._poll_seconds
        if self._catalogue is not None and not self._read(self._catalogue):
            pause = self._pause
            self._pause = min(2 * self._pause, self._poll_seconds)
        else:
            self._pause = FIRST_PAUSE
        self._tell()
        return pause

    def _tell(self) -> None:
        """Call `on_targets` with what is known."""
        stores = [with_digest(target) for target in self._stores]
        named = {target.name for target in stores}
        released = [] if self._catalogue is None else self._catalogue.targets
        known = self._catalogue is None or self._catalogue.known
        self._on_targets(stores + [target for target in released if target.name not in named])
        if known:
            self._informed.set()
            self._looked.set()

    def _read(self, catalogue: Catalogue) -> bool:
        """Read the catalogue; return False if that fails."""
        try:
            missing = catalogue.missing
            catalogue.look()
        except (DraftstoreError, OSError) as error:
            catalogue.recall()
            if catalogue.problem is None:
                LOG.warning("the catalogue cannot be read, %s: %s", _described(catalogue.read_at), error)
            catalogue.problem = str(error)
            return False
        if catalogue.problem is not None:
            LOG.info("the catalogue can be read again")
            catalogue.problem = None
        if catalogue.missing and catalogue.missing != missing:
            LOG.warning("the catalogue has no release %s", ", ".join(map(repr, catalogue.missing)))
        return True


def _described(read_at: float | None) -> str:
    """Say what is served without the catalogue."""
    if read_at is None:
        return "and no releases are known"
    return f"serving the releases as of {datetime.fromtimestamp(read_at, UTC).isoformat(timespec='seconds')}"
