"""Prefect on this machine: a server, a work pool, the deployments of prefect.yaml and a worker, until Ctrl-C.

    python -m pipelines.local up        all of it (`make prefect`)
    python -m pipelines.local deploy    only work pool and deployments, on the server in PREFECT_API_URL

A worker starts every flow run in its own session; when stopped, it waits for all of them, and when killed, it leaves
them running. So this program adopts orphans of its services (as their subreaper), and ends flow runs before the worker.
The next run resumes what a flow run had not finished.
"""

import contextlib
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import click
import psutil

from draftstore.errors import DraftstoreError
from pipelines import QUIET
from pipelines.secret import AUTH_FILE, auth_string

CHECKOUT = Path(__file__).resolve().parent.parent
POOL = "draftstore"
POOL_TEMPLATE = "pipelines/pool.json"
"""The base job template of the work pool: runs can set none of its variables, such as the command of their process."""
START_SECONDS = 90.0
GRACE_SECONDS = 10.0
"""Seconds that flow runs, worker and server each have to end by themselves."""
POLL_SECONDS = 0.2
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PRCTL = ctypes.CDLL(None).prctl
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36

WELCOME = """
Prefect is at http://{host}:{port} (its log: {log}). In another terminal:

  export PREFECT_API_URL=http://{host}:{port}/api
  export PREFECT_API_AUTH_STRING="$(cat {auth})"
  {prefect} deployment run build-crest/default --watch

The page asks for what `cat {auth}` prints. Ctrl-C stops everything.
"""


class LocalError(click.ClickException):
    """A service did not start, or ended unexpectedly."""


def prefect_command(*arguments: str) -> list[str]:
    """Return the command line of this environment's `prefect`."""
    return [sys.executable, "-m", "prefect", *arguments]


def prefect_environment(state: Path, url: str) -> dict[str, str]:
    """Return the environment of the server, the worker and every flow run.

    Args:
        state: existing folder of the server's database, its password and Prefect's own files.
        url: the server's API.

    Raises:
        SecretError: others can read the password.
    """
    port, auth = urlsplit(url).port, auth_string(state)
    return {
        "PREFECT_WORKER_QUERY_SECONDS": "1",  # runs start in a second
        # Pages of other sites can read no answer; the page of the server has both of these names.
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"{url.removesuffix('/api')},http://localhost:{port}",
        **os.environ,
        **QUIET,
        "PREFECT_SERVER_API_AUTH_STRING": auth,
        "PREFECT_API_AUTH_STRING": auth,
        "PREFECT_HOME": str(state.resolve()),
        "PREFECT_API_URL": url,
        "PREFECT_CLI_PROMPT": "false",
    }


@click.group()
def main() -> None:
    """Prefect on this machine."""


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address that the server listens at.")
@click.option(
    "--port", default=4200, show_default=True, type=click.IntRange(1, 65_535), help="Port of the server."
)
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
    _require_free(host, port)
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        log, environment = state / "server.log", prefect_environment(state, f"http://{host}:{port}/api")
        with _everything_ended():
            click.echo("starting the server ...")
            server = _start(environment, "server", "start", "--host", host, "--port", str(port), log=log)
            _wait_healthy(server, environment["PREFECT_API_URL"], log)
            click.echo("making the work pool and the deployments ...")
            deploy(environment)
            worker = _start(environment, "worker", "start", "--pool", POOL, "--type", "process")
            prefect = Path(sys.executable).with_name("prefect")
            auth = shlex.quote(str((state / AUTH_FILE).resolve()))
            click.echo(WELCOME.format(host=host, port=port, log=log, auth=auth, prefect=prefect))
            names = {server.pid: f"server (see {log})", worker.pid: "worker"}
            while (ended := os.wait())[0] not in names:
                pass  # an orphan of a service
            status = os.waitstatus_to_exitcode(ended[1])
            raise LocalError(f"the {names[ended[0]]} ended by itself with status {status}")
    except DraftstoreError as error:
        raise LocalError(str(error)) from None
    except KeyboardInterrupt:
        click.echo("Everything is stopped; an unfinished build resumes when its flow runs again.")


@main.command("deploy")
def deploy_command() -> None:
    """Make the work pool and the deployments of prefect.yaml, on the server that PREFECT_API_URL names."""
    deploy({**os.environ, **QUIET, "PREFECT_CLI_PROMPT": "false"})


def deploy(environment: dict[str, str]) -> None:
    """Create or update the work pool and every deployment of prefect.yaml.

    Raises:
        LocalError: `prefect` refused; its output is in the message.
    """
    for arguments in (
        (
            "work-pool",
            "create",
            POOL,
            "--type",
            "process",
            "--base-job-template",
            POOL_TEMPLATE,
            "--overwrite",
        ),
        ("deploy", "--all", "--prefect-file", "prefect.yaml"),
    ):
        command = prefect_command("--no-prompt", *arguments)
        ran = subprocess.run(  # noqa: S603 - our own arguments
            command,
            cwd=CHECKOUT,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode != 0:
            raise LocalError(f"prefect {' '.join(arguments)} failed:\n{ran.stdout}{ran.stderr}")


def _require_free(host: str, port: int) -> None:
    """Refuse a port in use.

    Raises:
        LocalError: the port is taken, or the address is not this machine's.
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


def _start(environment: dict[str, str], *arguments: str, log: Path | None = None) -> subprocess.Popen[bytes]:
    """Start `prefect`; it gets SIGTERM when this program ends in any way."""
    with log.open("wb") if log else contextlib.nullcontext() as output:
        return subprocess.Popen(  # noqa: S603 - our own arguments
            prefect_command(*arguments),
            cwd=CHECKOUT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if log else None,
            start_new_session=True,  # Ctrl-C goes only to this program
            preexec_fn=lambda: _PRCTL(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM),
        )


def _wait_healthy(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until the server answers.

    Raises:
        LocalError: it ended, or did not answer in time.
    """
    end = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):  # noqa: S310
            return
        time.sleep(POLL_SECONDS)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    how = "did not answer in time" if server.poll() is None else f"ended with status {server.poll()}"
    raise LocalError("\n".join([f"the server at {url} {how}, the end of its log:", *lines]))


@contextlib.contextmanager
def _everything_ended() -> Iterator[None]:
    """Adopt all descendants, and end them on exit, including by SIGTERM."""
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    _PRCTL(_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # do not interrupt the cleanup
        # Flow runs first: a worker that ends would not give them time to update the catalogue. Once more at the end, as
        # the worker may have started one meanwhile.
        for program in ("prefect.engine", "worker", "server", "prefect.engine"):
            _end(program)
        # The embedded PostgreSQL ends with its last client; one with other clients stays.
        psutil.wait_procs(psutil.Process().children(recursive=True), GRACE_SECONDS)


def _end(program: str) -> None:
    """End the descendants with an argument: SIGTERM, then SIGKILL after a while."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if program in process.cmdline():
                process.terminate()
                found.append(process)
    for process in psutil.wait_procs(found, GRACE_SECONDS)[1]:
        with contextlib.suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    main()
