"""Following what is to be served: a thread that hears of releases that move, and looks by itself now and then.

    follower = Follower(stores, releases, reconciler)
    follower.start()
    ...
    follower.stop()

The database may be away, restarted or hang: what is known stays known, and the thread tries again. It never ends by
itself.
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
"""Between two looks at the catalogue, if no notice comes."""
FIRST_PAUSE = 0.1
"""Seconds until another attempt to reach the database; it doubles each time, up to the time between two looks."""

OnTargets = Callable[[list[Target]], None]


class Catalogue:
    """The releases of the catalogue, as far as they are known."""

    def __init__(self, names: Iterable[str] = (), backend: str | None = None) -> None:
        """Connect nowhere yet.

        Args:
            names: the releases that matter; none: all.
            backend: where the entries of CREST stores are read, if they are there.
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
        """Read the releases, on a new connection if need be.

        Raises:
            DatabaseError: the database is away, refuses or hangs.
        """
        try:
            if self._notices is None:
                self._notices = Notices()
            while True:
                live = self._notices.releases()
                if not self._notices.moved():  # between asking and answering
                    break
        except BaseException:
            self.close()
            raise
        self.targets = catalogue_targets(live, self.names, self._backend)
        self.known = True

    @property
    def missing(self) -> list[str]:
        """Return the releases that were asked for and that the catalogue does not have."""
        return sorted(self.names - {target.name for target in self.targets}) if self.known else []

    def close(self) -> None:
        """Close the connection."""
        notices, self._notices = self._notices, None
        if notices is not None:
            with suppress(Exception):
                notices.close()


class Follower:
    """A thread that calls `on_targets` with what is to be served, whenever it may have changed."""

    def __init__(
        self,
        stores: Sequence[Target],
        catalogue: Catalogue | None,
        on_targets: OnTargets,
        *,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """Follow directories and releases; a directory comes before a release of the same name.

        Args:
            stores: directories, which a newer build may replace.
            catalogue: releases; None: there is no database.
            on_targets: called in the thread, with all targets; it should not raise.
            poll_seconds: time between two looks.
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
        """Return the releases that were asked for and that the catalogue does not have."""
        return [] if self._catalogue is None else self._catalogue.missing

    @property
    def complete(self) -> bool:
        """Whether all targets are known: the catalogue has been read at least once, and has what was asked for."""
        return self._catalogue is None or (self._catalogue.known and not self._catalogue.missing)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def look(self) -> None:
        """Have it look now."""
        os.eventfd_write(self._wake, 1)

    def wait_for_first(self, timeout: float) -> bool:
        """Wait until `on_targets` was called for the first time; tell whether it was."""
        return self._looked.wait(timeout)

    def stop(self, timeout: float = 10.0) -> bool:
        """End the thread; tell whether it ended in time (it may be reading a store, or waiting for the database)."""
        self._stopping = True
        self.look()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Let go of what it holds, after `stop`."""
        os.close(self._wake)

    def _run(self) -> None:
        while not self._stopping:
            pause = self._poll_seconds
            try:
                pause = self._follow()
            except Exception:  # whatever it is: to stand still would be worse
                LOG.exception("following the catalogue failed, trying again")
            self._looked.set()
            self._wait(pause)
        if self._catalogue is not None:
            self._catalogue.close()

    def _follow(self) -> float:
        """Look once, and return the seconds until the next look."""
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
        """Read the catalogue; tell whether that was possible."""
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
        """Wait until it is time for another look, a release moves, or somebody asks for a look."""
        heard = None if self._catalogue is None else self._catalogue.fileno()
        poll = select.poll()  # takes descriptors of any number, unlike `select`
        for file in (self._wake, heard):
            if file is not None:
                poll.register(file, select.POLLIN)
        poll.poll(seconds * 1000)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
