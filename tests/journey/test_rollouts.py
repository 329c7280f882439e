"""The trainer's loop of docs/rollouts.md is run with a small trained model."""

from pathlib import Path
from typing import Any

import pytest

from tests.journey.pages import read_page


@pytest.mark.data
def test_rollouts_draft_from_those_of_earlier_versions(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/model").symlink_to(data / "models" / "stories260K")
    [loop] = read_page("docs/rollouts.md").blocks
    names: dict[str, Any] = {}
    exec(loop, names)
    prompt = names["inputs"].input_ids[0].numpy()
    session = names["recall"].session([*prompt, names["answers"][0][0]])
    following = [answer[1].item() for answer in names["answers"] if answer[0] == names["answers"][0][0]]
    assert set(following) <= set(session.propose(16).tokens.tolist())
