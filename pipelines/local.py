"""Prefect on this machine: a server, a work pool, the deployments of prefect.yaml and a worker, until Ctrl-C.

    python -m pipelines.local up        all of it (`make prefect`)
    python -m pipelines.local deploy    only work pool, deployments and notices, on the server in PREFECT_API_URL
    python -m pipelines.local worker    only a worker, which must be the only one

The next run resumes what a flow run had not finished.
"""

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import click

from draftstore.errors import BuildRunningError, DraftstoreError
from draftstore.storage.files import locked_directory
from pipelines import QUIET
from pipelines.secret import AUTH_FILE, auth_string
from pipelines.supervision import (
    CHECKOUT,
    LocalError,
    Service,
    end_left_over,
    everything_ended,
    keep_running,
    prefect_command,
)
from schema.home import data_home

POOL = "draftstore"
POOL_TEMPLATE = "pipelines/pool.json"
"""The base job template of the work pool: runs can set none of its variables, such as the command of their process."""
PREFECT_FILE = next(
    path for path in (CHECKOUT / "prefect.yaml", Path(__file__).with_name("prefect.yaml")) if path.exists()
)
"""The deployments: in a checkout, or as the wheel has them."""
STATE = (CHECKOUT / "data" if PREFECT_FILE.parent == CHECKOUT else data_home()) / "prefect"
START_SECONDS = 90.0
POLL_SECONDS = 0.2
WORKER = ("worker", "start", "--pool", POOL, "--type", "process")

WELCOME = """
Prefect is at http://{host}:{port} (its log: {log}). In another terminal:

  export PREFECT_API_URL=http://{host}:{port}/api
  export PREFECT_API_AUTH_STRING="$(cat {auth})"
  {prefect} deployment run build-crest/default --watch

The page asks for what `cat {auth}` prints. Ctrl-C stops everything.
"""


def prefect_environment(state: Path, url: str) -> dict[str, str]:
    """Return the environment of the server, the worker and every flow run."""
    port, auth = urlsplit(url).port, auth_string(state)
    return {
        "PREFECT_WORKER_QUERY_SECONDS": "1",  # runs start in a second
        # Pages of other sites can read no answer; the page of the server has both of these names.
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"{url.removesuffix('/api')},http://localhost:{port}",
        # Files: after a restart of the server, runs still hold the place that keeps others of their deployment waiting.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
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
    default=STATE,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of Prefect's own database and logs. [default: data/prefect in a checkout, else prefect in "
    "DRAFTSTORE_HOME]",
)
def up(host: str, port: int, state: Path) -> None:
    """Start everything and keep it running until Ctrl-C.

    \b
    Example:
      python -m pipelines.local up --port 4300
    """
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        environment = prefect_environment(state, f"http://{host}:{port}/api")
        with locked_directory(state):
            end_left_over(state)
            _require_free(host, port)
            with everything_ended():
                _run_all(host, port, environment, state)
    except BuildRunningError:
        raise LocalError(
            f"another `make prefect` works in {state}: stop it, or choose another --state"
        ) from None
    except DraftstoreError as error:
        raise LocalError(str(error)) from None
    except KeyboardInterrupt:
        click.echo("Everything is stopped; an unfinished build resumes when its flow runs again.")


def _run_all(host: str, port: int, environment: dict[str, str], state: Path) -> None:
    """Start the server, tell it what it should know, start a worker, and keep both running."""
    log = state / "server.log"
    click.echo("starting the server ...")
    server = Service("server", environment, "server", "start", "--host", host, "--port", str(port), log=log)
    _wait_healthy(server, environment["PREFECT_API_URL"])
    click.echo("making the work pool and the deployments ...")
    deploy(environment, "--cut-off")
    worker = Service("worker", environment, *WORKER)
    prefect = Path(sys.executable).with_name("prefect")
    auth = shlex.quote(str((state / AUTH_FILE).resolve()))
    click.echo(WELCOME.format(host=host, port=port, log=log, auth=auth, prefect=prefect))
    keep_running(server, worker)


@main.command("deploy")
def deploy_command() -> None:
    """Make the work pool and the deployments of prefect.yaml, on the server that PREFECT_API_URL names."""
    deploy({**os.environ, **QUIET, "PREFECT_CLI_PROMPT": "false"})


@main.command("worker")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker_command(arguments: tuple[str, ...]) -> None:
    """Become a worker of the server that PREFECT_API_URL names; ARGUMENTS are those of `prefect worker start`.

    It must be the only worker: runs at work when it starts are marked as ended.

    \b
    Example:
      python -m pipelines.local worker -- --with-healthcheck
    """
    environment = {**os.environ, **QUIET}
    _run(environment, sys.executable, "-m", "pipelines.upkeep", "--cut-off")
    command = prefect_command(*WORKER, *arguments)
    os.execve(command[0], command, environment)  # noqa: S606 - our own arguments


def deploy(environment: dict[str, str], *upkeep: str) -> None:
    """Create or update the work pool, every deployment of prefect.yaml, and the notices."""
    pool = ("work-pool", "create", POOL, "--type", "process", "--base-job-template", POOL_TEMPLATE)
    _run(environment, *prefect_command("--no-prompt", *pool, "--overwrite"))
    _run(environment, *prefect_command("--no-prompt", "deploy", "--all", "--prefect-file", str(PREFECT_FILE)))
    click.echo(_run(environment, sys.executable, "-m", "pipelines.upkeep", *upkeep), nl=False)


def _run(environment: dict[str, str], *command: str) -> str:
    """Run a program to its end in the checkout; return its output."""
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
        raise LocalError(f"{' '.join(command[1:])} failed:\n{ran.stdout}{ran.stderr}")
    return ran.stdout


def _require_free(host: str, port: int) -> None:
    """Refuse a port in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise LocalError(
                f"cannot listen on {host}:{port} ({error.strerror}): choose another --port "
                "(make prefect ARGS='--port 4300')"
            ) from None


def _wait_healthy(server: Service, url: str) -> None:
    """Wait until the server answers."""
    process, end = server.process, time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):  # noqa: S310
            return
        time.sleep(POLL_SECONDS)
    how = "did not answer in time" if process.poll() is None else f"ended with status {process.poll()}"
    raise LocalError("\n".join([f"the server at {url} {how}", *server.last_lines()]))


if __name__ == "__main__":
    main()
