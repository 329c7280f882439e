"""The backup of the catalogue as in docs/operations.md: written by pg_dump, restored into an empty database."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.fakes.databases import write_store
from tests.fakes.servers import reachable_folder


def shell(script: str, folder: Path, home: Path) -> str:
    """Run commands in a folder, with the programs of draftstore and not those of PostgreSQL."""
    programs = [str(Path(sys.executable).parent), os.environ["PATH"]]
    variables = {"PATH": os.pathsep.join(programs), "DRAFTSTORE_HOME": str(home)}
    ran = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_the_catalogue_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DRAFTSTORE_DATABASE_URL", "DRAFTSTORE_READER_URL"):
        monkeypatch.delenv(variable, raising=False)
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = page.partition("### Backup")[2].partition("### Upgrade")[0]
    write, restore = re.findall(r"^```sh\n(.+?)^```", section, re.MULTILINE | re.DOTALL)
    store = write_store(tmp_path / "store")
    shown = "draftstore releases list --json; draftstore sql --json 'SELECT * FROM live_releases'"
    newer = f"draftstore corpus remove docs --document a --yes; ({shown}) > before"
    with reachable_folder() as folder:
        old, new = folder / "old", folder / "restored"
        (folder / "texts.jsonl").write_text('{"id": "a", "text": "one"}\n{"id": "b", "text": "two"}\n')
        shell(f"draftstore releases publish chat {store}", folder, old)
        shell("draftstore corpus add docs texts.jsonl; draftstore corpus scan docs", folder, old)
        shell(f"umask 022\n{write}\n{newer}\n{restore}", folder, old)  # in one shell, as a reader pastes them
        assert (folder / "catalogue.dump").stat().st_mode & 0o777 == 0o600
        assert new.stat().st_mode & 0o777 == 0o755
        assert shell(shown, folder, new) == (folder / "before").read_text()
        # The dump is older than the removal, which stays in force.
        assert "2 documents, 1 active" in shell("draftstore corpus scan docs", folder, new)
