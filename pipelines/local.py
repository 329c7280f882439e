"""Prefect on this machine: a server, a work pool, the deployments of prefect.yaml and a worker, until Ctrl-C.

    python -m pipelines.local up        all of it (`make prefect`)
    python -m pipelines.local deploy    work pool and deployments alone, on the server that PREFECT_API_URL names

A worker starts every flow run in a session of its own and, told to end, waits for all of them; told twice, it leaves
them behind. So this program adopts what its services leave (it is their subreaper), and ends flow runs before the
worker. What a flow run had not finished, the next one goes on with.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import click

from draftstore.errors import DraftstoreError
from pipelines import QUIET

CHECKOUT = Path(__file__).resolve().parent.parent
POOL = "draftstore"
START_SECONDS = 90.0
GRACE_SECONDS = 20.0
POLL_SECONDS = 0.2

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)


class LocalError(DraftstoreError):
    """A service did not start, or ended by itself."""


class Stopped(BaseException):
    """Ctrl-C or SIGTERM: time to end everything."""


class Service:
    """A program in a session of its own that ends when this one does."""

    def __init__(
        self, name: str, arguments: Sequence[str], environment: dict[str, str], log: Path | None
    ) -> None:
        """Start it.

        Args:
            name: for messages.
            arguments: of `prefect`.
            environment: all of its variables.
            log: file of its output; this program's own without one.
        """
        self.name, self.log = name, log
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(log.open("wb")) if log else None
            self.process = subprocess.Popen(  # noqa: S603 - our own arguments
                prefect_command(*arguments),
                cwd=CHECKOUT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if log else None,
                start_new_session=True,  # Ctrl-C in a terminal is for this program alone
                preexec_fn=_end_with_parent,
            )

    def require_running(self) -> None:
        """Refuse a service that ended.

        Raises:
            LocalError: it did.
        """
        code = self.process.poll()
        if code is not None:
            tail = ""
            if self.log:
                lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
                tail = ", the end of its log:\n" + "\n".join(lines[-15:])
            raise LocalError(f"the {self.name} ended by itself with status {code}{tail}")

    def stop(self) -> None:
        """End it and the flow runs that it started: SIGTERM, again after a while, then SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is not None:
                break
            self.process.send_signal(number)
            for run in _flow_runs():  # a worker waits for them
                _signal(run, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_SECONDS / 2)


def prefect_command(*arguments: str) -> list[str]:
    """Return the command line of this environment's `prefect`."""
    return [sys.executable, "-m", "prefect", *arguments]


def prefect_environment(state: Path, url: str) -> dict[str, str]:
    """Return the environment of the server, the worker and every flow run.

    Args:
        state: folder of the server's database and of what Prefect keeps for itself.
        url: the server's API.
    """
    return {
        "PREFECT_WORKER_QUERY_SECONDS": "1",  # runs start in a second
        **os.environ,
        **QUIET,
        "PREFECT_HOME": str(state.resolve()),
        "PREFECT_API_URL": url,
        "PREFECT_CLI_PROMPT": "false",
    }


@click.group()
def main() -> None:
    """Prefect on this machine."""


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the server.")
@click.option("--port", default=4200, show_default=True, type=click.IntRange(1, 65_535), help="Its port.")
@click.option(
    "--state",
    default=CHECKOUT / "data" / "prefect",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of Prefect's own database and logs. [default: data/prefect in the checkout]",
)
def up(host: str, port: int, state: Path) -> None:
    """Start everything and keep it running until Ctrl-C.

    \b
    Example:
      python -m pipelines.local up --port 4300
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        with running(host, port, state) as services:
            click.echo(_welcome(host, port, state))
            while True:
                time.sleep(POLL_SECONDS)
                for service in services:
                    service.require_running()
    except Stopped:
        click.echo("Everything is stopped; an unfinished build goes on when its flow runs again.")
    except LocalError as error:
        raise click.ClickException(str(error)) from None


@main.command("deploy")
def deploy_command() -> None:
    """Make the work pool and the deployments of prefect.yaml, on the server that PREFECT_API_URL names."""
    try:
        deploy({**os.environ, **QUIET, "PREFECT_CLI_PROMPT": "false"})
    except LocalError as error:
        raise click.ClickException(str(error)) from None


@contextlib.contextmanager
def running(host: str, port: int, state: Path) -> Iterator[list[Service]]:
    """Start server, pool, deployments and worker; end all of them, and every flow run, on leaving.

    Args:
        host: address of the server.
        port: its port.
        state: folder of its database and logs.

    Raises:
        LocalError: the port is taken, or something did not start.
    """
    _require_free(host, port)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)
    state.mkdir(parents=True, exist_ok=True)
    url = f"http://{host}:{port}/api"
    environment = prefect_environment(state, url)
    services: list[Service] = []
    try:
        click.echo("starting the server ...")
        arguments = ("server", "start", "--host", host, "--port", str(port))
        services.append(Service("server", arguments, environment, state / "server.log"))
        _wait_healthy(url, services[0])
        click.echo("making the work pool and the deployments ...")
        deploy(environment)
        arguments = ("worker", "start", "--pool", POOL, "--type", "process")
        services.append(Service("worker", arguments, environment, log=None))
        yield services
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # nothing may cut the tidying short
        _stop_all(services)


def deploy(environment: dict[str, str]) -> None:
    """Make the work pool, and every deployment of prefect.yaml, or bring them up to date.

    Args:
        environment: of `prefect`; names the server.

    Raises:
        LocalError: `prefect` refused; its output is in the message.
    """
    for arguments in (
        ("work-pool", "create", POOL, "--type", "process", "--overwrite"),
        ("deploy", "--all", "--prefect-file", "prefect.yaml"),
    ):
        ran = subprocess.run(  # noqa: S603 - our own arguments
            prefect_command("--no-prompt", *arguments),
            cwd=CHECKOUT,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode != 0:
            raise LocalError(f"prefect {' '.join(arguments)} failed:\n{ran.stdout}{ran.stderr}")


def _welcome(host: str, port: int, state: Path) -> str:
    command = Path(sys.executable).with_name("prefect")
    return f"""
Prefect is at http://{host}:{port} (its log: {state / "server.log"}). In another terminal:

  export PREFECT_API_URL=http://{host}:{port}/api
  {command} deployment run build-crest/default --watch

Ctrl-C stops everything.
"""


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise Stopped


def _require_free(host: str, port: int) -> None:
    """Refuse a port that something listens on.

    Raises:
        LocalError: it is taken, or the address is not this machine's.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise LocalError(
                f"cannot listen on {host}:{port} ({error.strerror}): choose another --port "
                "(make prefect ARGS='--port 4300')"
            ) from None


def _wait_healthy(url: str, server: Service) -> None:
    """Wait until the server answers.

    Raises:
        LocalError: it ended, or did not answer in time.
    """
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        server.require_running()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):  # noqa: S310
            return
        time.sleep(POLL_SECONDS)
    raise LocalError(f"the server at {url} did not answer within {START_SECONDS:.0f} s: see {server.log}")


def _stop_all(services: Sequence[Service]) -> None:
    """End flow runs, then the worker, then the server, then what any of them left behind."""
    for run in _flow_runs():  # before the worker, which would not leave them the time to tell the catalogue
        _signal(run, signal.SIGTERM)
    _wait_gone(_flow_runs, GRACE_SECONDS / 2)
    for service in reversed(services):
        service.stop()
    _wait_gone(_flow_runs, GRACE_SECONDS / 4)
    for run in _flow_runs():
        _signal(run, signal.SIGKILL)
    # The embedded PostgreSQL goes with its last client; one that others use stays.
    _wait_gone(_descendants, GRACE_SECONDS / 2)


def _wait_gone(find: Callable[[], list[int]], seconds: float) -> None:
    """Wait until none of some processes is left, and collect those that ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not find():
            return
        time.sleep(POLL_SECONDS)


def _flow_runs() -> list[int]:
    """Return the processes of flow runs below this one."""
    return [pid for pid in _descendants() if b"prefect.engine" in _command_line(pid)]


def _descendants() -> list[int]:
    """Return all processes below this one."""
    found, waiting = [], [os.getpid()]
    while waiting:
        parent = waiting.pop()
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                children = [int(pid) for pid in (task / "children").read_text().split()]
                found += children
                waiting += children
    return found


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


if __name__ == "__main__":
    main()
