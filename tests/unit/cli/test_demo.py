"""`draftstore demo`: ten answers with drafts, the same as without, and fewer passes if a prediction is given."""

from pathlib import Path

import pytest

from tests.unit.cli.test_commands import Runner, run

__all__ = ["run"]  # a fixture


@pytest.mark.data
def test_ten_answers_are_compared(
    run: Runner, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ["demo", "--model", data / "models" / "stories260K", "--max-tokens", 12]
    found = run(*arguments, "--json").json()
    answers = found["answers"]
    assert [row["kind"] for row in answers] == ["edit"] * 5 + ["question"] * 5
    for row in answers:
        assert row["same_text"]
        assert row["passes"] <= row["plain_passes"] == row["tokens"] - 1
        assert row["gain"] == pytest.approx(row["plain_seconds"] / row["seconds"], rel=0.5)
    assert found["median_gain"].keys() == {"edit", "question"}
    assert list(tmp_path.iterdir()) == []  # neither a model nor a curve is left
