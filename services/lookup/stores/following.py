"""Following the stores to serve: a thread that listens for moved releases, and polls now and then.

    follower = Follower(stores, releases, reconciler)
    follower.start()
    ...
    follower.stop()

The database may be down, restarting or hanging: the last known releases stay, and the thread tries again. It never ends
on its own.
"""

import logging
import os
import select
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import psycopg

from draftstore.errors import DraftstoreError
from schema.notices import Notices
from services.lookup.stores.targets import Target, catalogue_targets, with_digest

LOG = logging.getLogger(__name__)
POLL_SECONDS = 5.0
"""Seconds between two reads of the catalogue if no notification arrives."""
FIRST_PAUSE = 0.1
"""Seconds until the next attempt to reach the database; doubles each time, up to the polling interval."""

OnTargets = Callable[[list[Target]], None]


class Catalogue:
    """The releases of the catalogue, as last read."""

    def __init__(self, names: Iterable[str] = (), backend: str | None = None) -> None:
        """Connect nowhere yet.

        Args:
            names: releases to follow; empty: all.
            backend: backend for the entries of CREST stores, where available.
        """
        self.names = frozenset(names)
        self.targets: list[Target] = []
        self.problem: str | None = None
        self.known = False
        self._backend = backend
        self._notices: Notices | None = None

    def fileno(self) -> int | None:
        """Return a descriptor that becomes readable when a release moves; None without a connection."""
        try:
            return None if self._notices is None else self._notices.fileno()
        except psycopg.Error:  # closed by now
            return None

    def look(self) -> None:
        """Read the releases, reconnecting if necessary.

        Raises:
            DatabaseError: the database is down, refuses or hangs.
        """
        try:
            if self._notices is None:
                self._notices = Notices()
            while True:
                live = self._notices.releases()
                if not self._notices.moved():  # a release may move during the query
                    break
        except BaseException:
            self.close()
            raise
        self.targets = catalogue_targets(live, self.names, self._backend)
        self.known = True

    @property
    def missing(self) -> list[str]:
        """Return the requested releases that the catalogue does not have."""
        return sorted(self.names - {target.name for target in self.targets}) if self.known else []

    def close(self) -> None:
        """Close the connection."""
        notices, self._notices = self._notices, None
        if notices is not None:
            with suppress(Exception):
                notices.close()


class Follower:
    """A thread that calls `on_targets` with the stores to serve whenever they may have changed."""

    def __init__(
        self,
        stores: Sequence[Target],
        catalogue: Catalogue | None,
        on_targets: OnTargets,
        *,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """Follow directories and releases; a directory wins over a release of the same name.

        Args:
            stores: directories, whose content a newer build may replace.
            catalogue: releases; None: no database.
            on_targets: called in the thread with all targets; should not raise.
            poll_seconds: interval between two reads.
        """
        self._stores = list(stores)
        self._catalogue = catalogue
        self._on_targets = on_targets
        self._poll_seconds = poll_seconds
        self._pause = FIRST_PAUSE
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._looked = threading.Event()
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

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def look(self) -> None:
        """Make the thread read the targets now."""
        os.eventfd_write(self._wake, 1)

    def wait_for_first(self, timeout: float) -> bool:
        """Wait for the first call of `on_targets`; return False on a timeout."""
        return self._looked.wait(timeout)

    def stop(self, timeout: float = 10.0) -> bool:
        """End the thread; return False if it is still busy after `timeout` (opening a store, say)."""
        self._stopping = True
        self.look()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Release its resources, after `stop`."""
        os.close(self._wake)

    def _run(self) -> None:
        while not self._stopping:
            pause = self._poll_seconds
            try:
                pause = self._follow()
            except Exception:  # the thread must go on, whatever happens
                LOG.exception("following the catalogue failed, trying again")
            self._looked.set()
            self._wait(pause)
        if self._catalogue is not None:
            self._catalogue.close()

    def _follow(self) -> float:
        """Read the targets once; return the seconds until the next read."""
        pause = self._poll_seconds
        if self._catalogue is not None and not self._read(self._catalogue):
            pause = self._pause
            self._pause = min(2 * self._pause, self._poll_seconds)
        else:
            self._pause = FIRST_PAUSE
        stores = [with_digest(target) for target in self._stores]
        named = {target.name for target in stores}
        released = [] if self._catalogue is None else self._catalogue.targets
        self._on_targets(stores + [target for target in released if target.name not in named])
        return pause

    def _read(self, catalogue: Catalogue) -> bool:
        """Read the catalogue; return False if that fails."""
        try:
            missing = catalogue.missing
            catalogue.look()
        except (DraftstoreError, OSError) as error:
            if catalogue.problem is None:
                LOG.warning("the catalogue cannot be read, serving the releases known so far: %s", error)
            catalogue.problem = str(error)
            return False
        if catalogue.problem is not None:
            LOG.info("the catalogue can be read again")
            catalogue.problem = None
        if catalogue.missing and catalogue.missing != missing:
            LOG.warning("the catalogue has no release %s", ", ".join(map(repr, catalogue.missing)))
        return True

    def _wait(self, seconds: float) -> None:
        """Wait until the time is over, a release moves, or somebody calls `look`."""
        heard = None if self._catalogue is None else self._catalogue.fileno()
        poll = select.poll()  # unlike `select`, no limit on descriptor numbers
        for file in (self._wake, heard):
            if file is not None:
                poll.register(file, select.POLLIN)
        poll.poll(seconds * 1000)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
