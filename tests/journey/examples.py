"""The command lines and Python examples of README and docs, by what they need to run."""

import io
import shlex
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from draftstore.cli import main
from tests.journey.pages import PAGES, read_page

ELSEWHERE = ("docs/team/frames.md", "docs/tutorials/", "docs/rollouts.md")
"""Their examples are run by test_frames_doc.py in tests/unit/remote, test_tutorials.py and test_rollouts.py here."""
MODEL = "data/model"
"""What the commands that decode call their model."""
READ = [read_page(name) for name in PAGES if not name.startswith(ELSEWHERE)]
COMMANDS = [
    command.replace("--max-bytes 10MB", "--max-bytes 1MB") for page in READ for command in page.commands
]
"""In their order. The store of limited size is smaller here, as the one that it is made from is."""
BLOCKS = [(page.name, code) for page in READ for code in page.blocks]
REMOTE = {name: code for name, code in BLOCKS if "RemoteStore" in code}
DECODING = {name: code for name, code in BLOCKS if "speculative_generate" in code}
LOCAL = {name: code for name, code in BLOCKS if code not in (*REMOTE.values(), *DECODING.values())}


def run(arguments: list[str], folder: Path) -> str:
    """Run the command line in a folder and return what it prints.

    It runs in this process: starts of interpreters and imports would take most of the time.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, chdir(folder), redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["draftstore", *arguments])
        try:
            main()
        except SystemExit as stop:
            pytest.fail(f"draftstore {shlex.join(arguments)}: {stop.code}: {_written(err)}")
    return _written(out)


def _written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    stream.seek(0)
    return stream.read()
