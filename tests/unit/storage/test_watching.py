"""Truncated files of an open store, and missing plugins."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from draftstore.errors import MissingPluginError
from draftstore.storage.manifest import WatchedFiles, load_manifest
from draftstore.storage.plugins import load_plugin


def test_a_file_that_is_cut_is_noticed(small_store: Path, tmp_path: Path) -> None:
    store, manifest = shutil.copytree(small_store, tmp_path / "copy"), load_manifest(small_store)
    keys = store / "keys.bin"
    with closing(WatchedFiles(store, manifest)) as files:
        assert files.check() is None
        (store / "tokenizer" / "tokenizer.json").write_bytes(b"")  # nobody maps it
        with keys.open("ab") as file:
            file.write(b"longer")
        assert files.check() is None
        keys.write_bytes(b"cut")
        assert (
            files.check()
            == files.damage
            == (f"{keys} was truncated: stores are replaced, never written to; build it again")
        )
    assert files.damage is not None
    keys.unlink()
    with pytest.raises(OSError, match="No such file"):
        WatchedFiles(store, manifest)


def test_a_plugin_that_is_not_installed_is_named() -> None:
    with pytest.raises(MissingPluginError, match="the stone is not installed here: install draftstore-serv"):
        load_plugin("draftstore.backends", "stone", "the stone")
    assert callable(load_plugin("draftstore.backends", "postgres", "PostgreSQL"))
