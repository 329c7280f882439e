import re
from pathlib import Path

import pytest

from draftstore.storage.manifest import load_manifest
from draftstore.stores.dresd.store import DresdStore
from tests.unit.cli.test_commands import Ran, Runner, run
from tests.unit.hf.test_loading import model_folder
from tests.unit.stores.rest.test_build import names

__all__ = ["model_folder", "run"]  # fixtures


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "stores").mkdir()
    return tmp_path / "stores" / "dresd"


def build(run: Runner, model: Path, corpus: Path, out: Path, *more: object) -> Ran:
    return run("build", "dresd", "--model", model, "--corpus", corpus, "--out", out, "--dims", 8, *more)


def test_build_reports_the_store(run: Runner, model_folder: Path, small_corpus: Path, out: Path) -> None:
    found = build(run, model_folder, small_corpus, out, "--json").json()
    manifest = load_manifest(out)
    assert (found["path"], found["name"], found["reused"]) == (str(out), "dresd", False)
    assert (found["counts"], found["bytes"]) == (manifest.counts, manifest.size)
    assert manifest.target_model == "small-model"
    assert found["counts"]["entries"] == manifest.counts["tokens"] - 2 * 60 - manifest.counts["repeated"]
    # Batches decide bits too, but who ran out of memory must be able to go on.
    again = build(run, model_folder, small_corpus, out, "--batch-tokens", 64, "--json")
    assert again.json()["reused"] is True
    ran = build(run, model_folder, small_corpus, out)
    assert (ran.status, ran.out) == (0, f"{out}\n")
    assert "already built" in ran.err
    assert re.search(r"entries +[\d,]+", ran.err)
    assert names(out.parent) == ["dresd"]
    assert DresdStore.open(out, target_model="small-model").projection.dims == 8
    assert run("verify", out).status == 0
    assert "dresd" in run("info", out).out
