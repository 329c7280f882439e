"""The stores to serve: directories with or without a name, and releases of the catalogue."""

from pathlib import Path

import pytest

from draftstore.errors import DraftstoreError
from schema.catalogue.releases import LiveRelease
from services.lookup.targets import Target, catalogue_targets, parse_store


def test_a_directory_goes_by_its_name_or_a_given_one(tmp_path: Path) -> None:
    folder = tmp_path / "chat-1.0"
    assert parse_store(str(folder)) == Target("chat-1.0", folder)
    assert parse_store(f"chat={folder}") == Target("chat", folder)
    assert parse_store(f"{tmp_path}/a=b/store") == Target("store", tmp_path / "a=b" / "store")
    assert parse_store(f"chat={tmp_path}/a=b") == Target("chat", tmp_path / "a=b")
    assert parse_store(".").path == Path.cwd()


@pytest.mark.parametrize("argument", ["a b=/store", "/", "-a=/store", "ü=/store", f"{'x' * 256}=/store"])
def test_names_that_nobody_could_ask_for(argument: str) -> None:
    with pytest.raises(DraftstoreError, match=r"cannot be the name of a store.*--store NAME="):
        parse_store(argument)


def test_releases_are_chosen_by_name_and_read_where_they_lie() -> None:
    live = [
        LiveRelease("chat", 1, "crest", "/chat", "1" * 64, ["lmdb", "postgres"]),
        LiveRelease("code", 2, "rest", "/code", "2" * 64, []),
    ]
    chat, code = Target("chat", Path("/chat"), "1" * 64), Target("code", Path("/code"), "2" * 64)
    assert catalogue_targets(live) == [chat, code]
    assert catalogue_targets(live, ["code", "none"]) == [code]
    assert [target.backend for target in catalogue_targets(live, (), "postgres")] == ["postgres", None]
