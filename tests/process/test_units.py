"""The systemd units name commands and options that exist."""

import configparser
import shlex
from contextlib import suppress

import click
import pytest

from pipelines import serving
from services.cli.serve import serve
from services.cli.worker import worker
from tests import ROOT

UNITS = {path.stem: path for path in sorted((ROOT / "packaging" / "systemd").iterdir())}
COMMANDS = {
    "draftstore-lookup@": serve,
    "draftstore-worker": worker,
    "draftstore-flows": serving.main,
}
PROGRAMS = "/opt/draftstore/bin/"


@pytest.mark.parametrize("name", COMMANDS)
def test_units_name_commands_and_options_that_exist(name: str) -> None:
    assert UNITS.keys() == COMMANDS.keys()
    parser = configparser.ConfigParser(strict=True, interpolation=None, delimiters="=", comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNITS[name])
    assert parser.sections() == ["Unit", "Service", "Install"]
    service, command = parser["Service"], COMMANDS[name]
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
