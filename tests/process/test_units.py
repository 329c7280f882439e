"""The systemd units name commands and options that exist."""

import re
import shlex
from contextlib import suppress

import click
import pytest

from pipelines import serving
from services.cli.serve import serve
from services.cli.worker import worker
from tests import ROOT

COMMANDS = {
    "lookup@": ("serve", serve),
    "worker": ("worker", worker),
    "flows": ("pipelines.serving", serving.main),
}


@pytest.mark.parametrize("unit", COMMANDS)
def test_units_name_commands_and_options_that_exist(unit: str) -> None:
    text = (ROOT / "packaging" / "systemd" / f"draftstore-{unit}.service").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ExecStart=(.+)$", text, re.MULTILINE)
    words, (name, command) = shlex.split(line), COMMANDS[unit]
    with suppress(click.exceptions.Exit):
        command.make_context(name, words[words.index(name) + 1 :])
