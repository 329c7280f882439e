"""The backup of the catalogue as in docs/operations.md: written by pg_dump, restored into an empty database."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from schema.db.home import find_programs
from tests import ROOT
from tests.fakes.databases import write_store
from tests.fakes.servers import reachable_folder

HOME = "/srv/draftstore"
"""The data folder of the page that is restored into."""


def shell(script: str, folder: Path, home: Path) -> str:
    """Run commands in a folder, with the programs of draftstore and of PostgreSQL."""
    programs = [str(Path(sys.executable).parent), str(find_programs()), os.environ["PATH"]]
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
    write, restore = re.findall(r"^```sh\n(.+?)^```", page, re.MULTILINE | re.DOTALL)
    store = write_store(tmp_path / "store")
    shown = "draftstore releases list --json; draftstore sql --json 'SELECT * FROM live_releases'"
    with reachable_folder() as folder:
        shell(f"draftstore releases publish chat {store}", tmp_path, folder / "old")
        (tmp_path / "texts.jsonl").write_text('{"id": "a", "text": "one"}\n{"id": "b", "text": "two"}\n')
        shell("draftstore corpus add docs texts.jsonl; draftstore corpus scan docs", tmp_path, folder / "old")
        shell(write, tmp_path, folder / "old")
        assert (tmp_path / "catalogue.dump").stat().st_mode & 0o777 == 0o600
        shell("draftstore corpus remove docs --document a --yes", tmp_path, folder / "old")
        before = shell(shown, tmp_path, folder / "old")
        shell(restore.replace(HOME, str(folder / "new")), tmp_path, folder / "old")
        assert shell(shown, tmp_path, folder / "new") == before
        # The dump is older than the removal, which stays in force.
        assert "2 documents, 1 active" in shell("draftstore corpus scan docs", tmp_path, folder / "new")
