from pathlib import Path

import pytest

from tests.fakes.llama_cpp import read_cache
from tests.unit.cli.test_commands import Runner, run

__all__ = ["run"]  # a fixture

pytestmark = pytest.mark.usefixtures("no_fsync")


def test_a_cache_for_llama_cpp(run: Runner, small_store: Path, tmp_path: Path) -> None:
    out = tmp_path / "cache.bin"
    found = run("export", "llama-cpp", small_store, "--out", out, "--max-bytes", "2kB", "--json").json()
    assert (found["path"], found["bytes"], found["ngrams"]) == (
        str(out),
        out.stat().st_size,
        len(read_cache(out)),
    )
    assert found["ngrams"] == 2000 // 28
    assert found["left_out"] > 0
    assert "exists" in run("export", "llama-cpp", small_store, "--out", out).error()
    ran = run("export", "llama-cpp", small_store, "--out", out, "--overwrite", "--min-count", 3)
    assert (ran.status, ran.out) == (0, f"{out}\n")
    assert f"{len(read_cache(out)):,} pairs" in ran.err
