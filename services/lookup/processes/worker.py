"""A worker process: opens the stores, answers frames on one event loop, follows the catalogue, drains."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable
from functools import partial

import uvloop

from draftstore.errors import DraftstoreError
from services.common import logs
from services.lookup.figures.totals import Labels, WorkerState
from services.lookup.frames.answering import Answerer
from services.lookup.frames.server import FrameServer
from services.lookup.processes.forking import REFUSED, SupervisorLink
from services.lookup.processes.inheritance import Inheritance
from services.lookup.settings import LookupSettings
from services.lookup.stores.following import Catalogue, Follower, OnTargets
from services.lookup.stores.kept import KeptReleases
from services.lookup.stores.reconciling import Reconciler
from services.lookup.stores.served import DIGEST_SHOWN, OpenStores, ServedStore, open_served
from services.lookup.stores.targets import Target

LOG = logging.getLogger(__name__)

BEAT = 0.25
"""Seconds between two heartbeats."""
SWITCH = 1e-4
"""Maximum seconds that a thread opening a store may delay a lookup (GIL switch interval)."""
FIRST_LOOK = 24 * 3600.0
"""Time limit in seconds for opening the stores: large ones are read from disk first."""
ORPHAN_SECONDS = 3.0
"""Seconds beyond the drain time that a process has to end when its supervisor is gone."""


def main(inherited: Inheritance, number: int, link: SupervisorLink) -> int:
    """Run worker `number` until it is told to end; returns the exit status."""
    settings = inherited.settings
    logs.configure(settings.log_format, settings.log_level, f"worker-{number}")
    sys.setswitchinterval(SWITCH)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(LookupWorker(inherited, number, link).run())


class LookupWorker:
    """The parts of a worker process."""

    def __init__(self, inherited: Inheritance, number: int, link: SupervisorLink) -> None:
        """Open nothing yet."""
        self._inherited = inherited
        self._settings = inherited.settings
        self._link = link
        self._number = number
        self._slot = inherited.figures.slot(number)
        self._open_stores = OpenStores()
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Open, serve, drain; returns the exit status."""
        loop = asyncio.get_running_loop()
        sockets = self._inherited.keep_for_worker()
        self._slot.begin()
        limits = self._settings.all_limits
        answerer = Answerer(self._open_stores, self._inherited.permissions, limits, self._slot)
        server = FrameServer(answerer)
        server.tls = self._inherited.tls
        self._watch(loop, server)
        reconciler = Reconciler(
            self._open_stores, self._runner(loop), swapped=self._swapped, open_served=self._opener(loop)
        )
        follower = make_follower(self._settings, reconciler, recall=self._slot.restarts > 0)
        beats = asyncio.create_task(self._beat(server, follower))
        follower.start()
        await asyncio.to_thread(follower.wait_for_first, FIRST_LOOK)
        problem = find_problem(self._settings, self._open_stores, reconciler, follower)
        if problem and not self._slot.restarts:
            self._link.report(failed=problem)
            return REFUSED
        await self._catch_up(follower)
        gc.collect()
        gc.freeze()  # the collector skips long-lived objects
        server.share(sockets, self._inherited.figures, self._number)
        self._slot.state = WorkerState.READY
        self._link.report(ready=True, releases=self._open_stores.describe())
        await self._stop.wait()
        self._slot.state = WorkerState.DRAINING
        await server.drain()
        beats.cancel()
        follower.stop(timeout=0.5)
        return 0

    async def _catch_up(self, follower: Follower) -> None:
        """Wait until this process knows the releases, if its predecessor did: clients are better off elsewhere."""
        while self._slot.catalogue_read and not (follower.informed or self._stop.is_set()):
            await asyncio.sleep(BEAT)

    def _watch(self, loop: asyncio.AbstractEventLoop, server: FrameServer) -> None:
        """Handle signals and the end of the supervisor."""
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, reload, self._inherited, partial(self._follow_files, server))
        self._link.watch(
            lambda: loop.call_soon_threadsafe(self._stop.set),
            self._settings.limits.drain_seconds + ORPHAN_SECONDS,
        )

    def _follow_files(self, server: FrameServer) -> None:
        """Apply changed tokens, and a changed certificate to new connections."""
        server.change_permissions(self._inherited.permissions)
        server.tls = self._inherited.tls

    def _runner(self, loop: asyncio.AbstractEventLoop) -> Callable[[Callable[[], None]], None]:
        """Return a function that applies changes to the open stores in the loop and updates the counters."""

        def change(call: Callable[[], None]) -> None:
            call()
            self._announce()

        def run(call: Callable[[], None]) -> None:
            loop.call_soon_threadsafe(change, call)

        return run

    def _opener(self, loop: asyncio.AbstractEventLoop) -> Callable[[Target], ServedStore]:
        """Return a function that opens a store in the following thread, and counts failures in the loop."""

        def count(name: str) -> None:
            self._slot.release(name).unopened()

        def open_counted(target: Target) -> ServedStore:
            try:
                return open_served(target, self._settings.partition)
            except Exception:
                loop.call_soon_threadsafe(count, target.name)
                raise

        return open_counted

    def _swapped(self, name: str) -> None:
        self._slot.release(name).swapped()

    def _announce(self) -> None:
        """Publish the served releases in the counters."""
        stores = [self._open_stores.get(name) for name in self._open_stores.names()]
        self._slot.announce(
            (served.name, Labels(served.kind, served.digest[:DIGEST_SHOWN], f"{served.tokenizer:016x}"))
            for served in stores
        )

    async def _beat(self, server: FrameServer, follower: Follower) -> None:
        """Record heartbeats and the state of the catalogue, and release connections beyond this worker's share."""
        while True:
            self._slot.heartbeat()
            self._slot.follow(follower.read_at, away=follower.problem is not None)
            if self._slot.state == WorkerState.READY:
                server.share_out(self._inherited.figures.connections())
            await asyncio.sleep(BEAT)


def make_follower(settings: LookupSettings, on_targets: OnTargets, *, recall: bool) -> Follower:
    """Return a follower of the stores and releases in the settings; it uses the catalogue only if needed."""
    catalogue = None
    if settings.uses_catalogue:
        catalogue = Catalogue(settings.releases, settings.backend, KeptReleases.beside(settings.socket))
    return Follower(settings.stores, catalogue, on_targets, poll_seconds=settings.poll_seconds, recall=recall)


def find_problem(
    settings: LookupSettings, open_stores: OpenStores, reconciler: Reconciler, follower: Follower
) -> str | None:
    """Return why the service should not start; None if it may.

    A store or release that the user named must open. Of unnamed releases, one is enough.
    """
    if settings.wait:
        return None
    named = {target.name for target in settings.stores} | set(settings.releases)
    for name, reason in sorted(reconciler.failures.items()):
        if name in named or not open_stores.names():
            return f"{name!r} cannot be served: {reason}"
    if follower.problem and not follower.complete:
        return f"the catalogue cannot be read: {follower.problem} (--store serves directories without one)"
    if follower.missing:
        missing = ", ".join(map(repr, follower.missing))
        return f"the catalogue has no release {missing}: see `draftstore releases list`, or publish it"
    if not open_stores.names():
        return (
            "there is nothing to serve: publish a release with `draftstore releases publish`, name a directory with "
            "--store, or start with --wait"
        )
    return None


def reload(inherited: Inheritance, changed: Callable[[], None]) -> None:
    """Reread tokens and certificate, and call `changed` if they are valid."""
    try:
        inherited.reload()
    except DraftstoreError as error:
        LOG.warning("a file cannot be used, the earlier one stays valid", extra={"error": str(error)})
    else:
        changed()
        LOG.info("read again")
