"""Serves the flows until Ctrl-C or SIGTERM: `python -m pipelines.serving`, or `make prefect`.

If PREFECT_API_URL names no Prefect server, one is started, which ends with this program. Flow runs are its child
processes and end with it too; unfinished work resumes when their flow runs again.
"""

import contextlib
import os
import secrets
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import click

from draftstore.errors import BuildRunningError, DraftstoreError
from draftstore.processes import end_with_parent
from draftstore.storage.files import locked_directory
from draftstore.storage.locks import hold
from schema.db.embedded import data_home

URL = "PREFECT_API_URL"
START_SECONDS, FIND_SECONDS, STOP_SECONDS, POLL_SECONDS = 180.0, 10.0, 10.0, 0.2

AUTH_FILE = "auth"
"""Name of the file in the server's state folder."""
BYTES = 32
WELCOME = """
Prefect is at http://{host}:{port}. In another terminal:

  export PREFECT_API_URL=http://{host}:{port}/api
  export PREFECT_API_AUTH_STRING="$(cat {auth})"
  {prefect} deployment run build-crest/default --watch

The page asks for what `cat {auth}` prints. Ctrl-C stops everything."""

Server = subprocess.Popen[bytes]


def auth_string(state: Path) -> str:
    """Return the server's `USER:PASSWORD` from its state folder, in a file of its owner; make one if there is none.

    Who may use the server's API can run flows. Programs find it in the environment, never on a command line.
    """
    path = state / AUTH_FILE
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "r+", encoding="utf-8") as file:
        hold(file.fileno())  # of several that start together, one generates it
        found, text = os.fstat(file.fileno()), file.read().strip()
        if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid != os.geteuid():
            raise DraftstoreError(f"others can read the password in {path}: remove the file to get a new one")
        if not text:
            text = f"draftstore:{secrets.token_hex(BYTES)}"
            file.write(f"{text}\n")
    return text


def prefect_environment(state: Path, url: str) -> dict[str, str]:
    """Return the environment of a server with its data in `state`, and of its clients."""
    port, auth = urlsplit(url).port, auth_string(state)
    return {
        # Pages of other sites cannot read answers; the server's own page has both of these names.
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"{url.removesuffix('/api')},http://localhost:{port}",
        # In files: after a restart of the server, runs still hold the slot that others of their deployment wait for.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        # `--watch` shows the log of its run.
        "PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED": "true",
        "PREFECT_SERVER_LOGS_STREAM_PUBLISHING_ENABLED": "true",
        **os.environ,
        "PREFECT_SERVER_API_AUTH_STRING": auth,
        "PREFECT_API_AUTH_STRING": auth,
        "PREFECT_HOME": str(state.resolve()),
        URL: url,
    }


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address that the server listens on.")
@click.option(
    "--port", default=4200, show_default=True, type=click.IntRange(1, 65_535), help="Port of the server."
)
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False, resolve_path=True),
    help="Folder of the server's database, password and log. [default: prefect in DRAFTSTORE_HOME]",
)
def main(host: str, port: int, state: Path | None) -> None:
    """Serve the flows until Ctrl-C, on the server in PREFECT_API_URL or a new one.

    \b
    Example:
      python -m pipelines.serving --port 4300
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if url := os.environ.get(URL):
            click.echo(f"looking for the Prefect server of {URL}, {url} ...")
            _wait_healthy(url, None)
            serve(url, f"The flows are served on {url}. Ctrl-C stops everything.")
            return
        state = state or data_home() / "prefect"
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked_directory(state), started_server(host, port, state) as server:
            auth, prefect = shlex.quote(f"{state}/{AUTH_FILE}"), Path(sys.executable).with_name("prefect")
            welcome = WELCOME.format(host=host, port=port, auth=auth, prefect=prefect)
            serve(os.environ[URL], welcome, server)
    except BuildRunningError:
        raise click.ClickException(
            f"another `make prefect` is using {state}: choose another --state"
        ) from None
    except DraftstoreError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        click.echo("Everything is stopped; an unfinished build resumes when its flow runs again.")


@contextlib.contextmanager
def started_server(host: str, port: int, state: Path) -> Iterator[Server]:
    """Start a server and make this process use it; stop it at the end of the block."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        why = f"cannot listen on {host}:{port} ({error.strerror}): choose another --port"
        raise click.ClickException(why) from None
    os.environ.update(prefect_environment(state, f"http://{host}:{port}/api"))
    log = state / "server.log"
    click.echo(f"starting the server (its log: {log}) ...")
    with log.open("ab") as output:
        server = subprocess.Popen(  # noqa: S603 - our own arguments
            [sys.executable, "-m", "prefect", "server", "start", "--host", host, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C goes only to this program
            preexec_fn=end_with_parent,
        )
    try:
        yield server
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(STOP_SECONDS)
        server.kill()
        server.wait()


def serve(url: str, welcome: str, server: Server | None = None) -> None:
    """Serve the flows on a server until Ctrl-C or until either ends; print `welcome` once runs can start."""
    from pipelines.deployments import FlowRunner  # Prefect reads the environment when it is imported

    runner = FlowRunner()
    _wait_healthy(url, server)
    runner.start()
    try:
        while runner.is_alive() and (server is None or server.poll() is None):
            if welcome and runner.is_ready():
                click.echo(welcome)
                welcome = ""
            time.sleep(POLL_SECONDS)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # do not interrupt the cleanup
        runner.stop()
    raise click.ClickException("the server or the flow runner ended unexpectedly: the log says why")


def _wait_healthy(url: str, server: Server | None) -> None:
    end = time.monotonic() + (START_SECONDS if server else FIND_SECONDS)
    while time.monotonic() < end and (server is None or server.poll() is None):
        with contextlib.suppress(Exception), urllib.request.urlopen(f"{url}/health", timeout=2):  # noqa: S310
            return
        time.sleep(POLL_SECONDS)
    why = "its log says why" if server else f"without {URL}, one is started here"
    raise click.ClickException(f"no Prefect server answers at {url}: {why}")


if __name__ == "__mp_main__":  # this process is a run, which ends with its runner
    end_with_parent()

if __name__ == "__main__":
    main()
