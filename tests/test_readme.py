"""What the README says is run: every command line and the Python example, on a store of the quickstart's kind."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parent.parent / "README.md"
COMMANDS = re.findall(
    r"^\$ (?:\.venv/bin/)?draftstore (.+)$", README.read_text(encoding="utf-8"), re.MULTILINE
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the quickstart in an empty folder, on the source of this project and its tests."""
    folder = tmp_path_factory.mktemp("readme")
    source = [
        argument for name in ("draftstore", "tests") for argument in ("--source", str(README.parent / name))
    ]
    run(["quickstart", "--out", "data/quickstart", *source], folder)
    return folder


def run(arguments: list[str], folder: Path) -> str:
    """Run the command line in a folder and return what it prints."""
    command = [sys.executable, "-m", "draftstore", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"draftstore {shlex.join(arguments)}: {done.stderr}"
    return done.stdout


def test_readme_names_commands() -> None:
    assert len(COMMANDS) >= 6


@pytest.mark.slow
def test_every_command_of_the_readme_runs(checkout: Path) -> None:
    for command in COMMANDS:
        assert run(shlex.split(command), checkout), f"draftstore {command} printed nothing"


@pytest.mark.slow
def test_the_python_example_runs(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(
        r"^```python\n(.+?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    monkeypatch.chdir(checkout)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["mask"].shape == (len(names["positions"]),) * 2


def test_every_file_that_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README.read_text(encoding="utf-8"))
    missing = [link for link in links if not (README.parent / link).exists()]
    assert not missing
