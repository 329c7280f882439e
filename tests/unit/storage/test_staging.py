"""Steps that are done once, and files that are published as stores are."""

import json
from pathlib import Path

import pytest

from draftstore.errors import BuildError, CorpusError
from draftstore.storage.files import locked_directory
from draftstore.storage.staging import once, staged


class Step:
    """A step that counts how often it is done."""

    def __init__(self, value: object = None) -> None:
        self.value = value
        self.done = 0

    def __call__(self) -> object:
        self.done += 1
        return self.value


@pytest.mark.parametrize("value", [None, 3, 0.1 + 0.2, {"sizes": [1, 2]}, "", []])
def test_a_step_is_done_once(tmp_path: Path, value: object) -> None:
    step = Step(value)
    for _ in range(3):
        assert once(tmp_path / "marker", step) == value
    assert step.done == 1


def test_an_empty_file_is_a_marker(tmp_path: Path) -> None:
    (tmp_path / "marker").touch()
    step = Step(7)
    assert once(tmp_path / "marker", step) is None
    assert step.done == 0


def test_a_step_that_fails_is_not_marked(tmp_path: Path) -> None:
    def fail() -> None:
        raise CorpusError("no")

    with pytest.raises(CorpusError):
        once(tmp_path / "marker", fail)
    assert list(tmp_path.iterdir()) == []


def test_a_step_whose_result_is_gone_is_done_again(tmp_path: Path) -> None:
    marker, made = tmp_path / "marker", tmp_path / "made"

    def make() -> int:
        assert not marker.exists(), "a crash here must not leave the old marker"
        made.write_text("x" * 5)
        return 5

    def still(size: int) -> bool:
        return made.exists() and made.stat().st_size == size

    assert once(marker, make, still) == 5
    made.write_text("cut")
    assert once(marker, make, still) == 5
    assert made.read_text() == "xxxxx"
    assert json.loads(marker.read_text()) == 5


def build_file(out: Path, text: str, *, fail: bool = False) -> str:
    """Publish a file of one text, or return the text that is there."""

    def find() -> str | None:
        return out.read_text() if out.exists() and out.read_text() == text else None

    def make(partial: Path) -> str:
        once(partial / "begun", lambda: None)
        if fail:
            raise CorpusError("no")
        (partial / out.name).write_text(text)
        return "made " + text

    return staged(out, out.name, find, make, ("begun",) if text == "kept" else ())


def test_a_file_is_published(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "answers.jsonl"
    assert build_file(out, "one") == "made one"
    assert build_file(out, "one") == "one"
    assert build_file(out, "two") == "made two"
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_a_failed_attempt_keeps_what_is_worth_it(tmp_path: Path) -> None:
    out, partial = tmp_path / "a", tmp_path / ".a.partial"
    for text, kept in (("lost", False), ("kept", True)):
        with pytest.raises(CorpusError):
            build_file(out, text, fail=True)
        assert (partial / "begun").exists() == kept
    assert build_file(out, "kept") == "made kept"
    assert not partial.exists()


def test_one_build_at_a_time(tmp_path: Path) -> None:
    with (
        locked_directory(tmp_path / ".a.partial"),
        pytest.raises(BuildError, match="another build is running"),
    ):
        build_file(tmp_path / "a", "text")
