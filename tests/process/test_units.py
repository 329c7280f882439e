"""The systemd units: they parse, and their commands start."""

import configparser
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click
import pytest

from pipelines import serving
from services.cli.serve import serve
from services.cli.worker import worker
from services.lookup.releases.warming import load_kernels
from tests import ROOT
from tests.fakes.served import short_folder
from tests.fakes.servers import free_port
from tests.fakes.waiting import SECONDS, until

UNITS = {path.stem: path for path in sorted((ROOT / "packaging" / "systemd").iterdir())}
COMMANDS = {
    "draftstore-lookup@": serve,
    "draftstore-worker": worker,
    "draftstore-flows": serving.main,
}
PORTS = {"draftstore-lookup@": "%i", "draftstore-worker": "8000"}
PROGRAMS = "/opt/draftstore/bin/"


def read(name: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=True, interpolation=None, delimiters="=", comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNITS[name])
    assert parser.sections() == ["Unit", "Service", "Install"]
    return parser["Service"]


@pytest.mark.parametrize("name", COMMANDS)
def test_units_name_commands_and_options_that_exist(name: str) -> None:
    assert UNITS.keys() == COMMANDS.keys()
    service, command = read(name), COMMANDS[name]
    words = shlex.split(service["ExecStart"])
    assert words[0].startswith(PROGRAMS)
    begin = words.index("pipelines.serving" if command is serving.main else str(command.name)) + 1
    with suppress(click.exceptions.Exit):
        command.make_context(str(command.name), words[begin:])
    # What a unit may write is what it says that it keeps.
    assert {service[key] for key in ("StateDirectory", "CacheDirectory")} == {"draftstore"}
    assert service["ProtectSystem"] == "strict"
    for pair in service["Environment"].split():
        assert pair.partition("=")[2].startswith(("/var/lib/draftstore", "/var/cache/draftstore"))


@contextmanager
def started(name: str, log: Path, changes: dict[str, str]) -> Iterator[str]:
    """Run the ExecStart of a unit with other places, and yield the URL of its HTTP server."""
    service, port = read(name), str(free_port())
    line = service["ExecStart"].replace(PORTS[name], port)
    for old, new in changes.items():
        line = line.replace(old, new)
    words = [word.replace(PROGRAMS, f"{Path(sys.executable).parent}/") for word in shlex.split(line)]
    with log.open("w") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output)
    try:
        until(lambda: process.poll() is not None or is_healthy(f"http://127.0.0.1:{port}"))
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        assert process.wait(SECONDS) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def is_healthy(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/healthz", timeout=5):
        return True
    return False


def test_the_services_start(data: Path, database: str) -> None:
    load_kernels()  # on disk then: to compile them there may take longer than the test waits
    with short_folder() as folder:
        places = {
            "/run/draftstore/": f"{folder}/",
            "/srv/models/chat": str(data / "models" / "stories260K"),
            # Nothing is published, so the worker drafts from what it sees alone.
            f"--lookup unix:{folder}/lookup-*.sock --release chat --wait": "",
        }
        lookup = started("draftstore-lookup@", folder / "lookup.log", places)
        with lookup, started("draftstore-worker", folder / "worker.log", places):
            pass
