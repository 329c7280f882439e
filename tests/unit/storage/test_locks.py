"""Locks of stores: readers share them, and nobody removes a store being read."""

import errno
import fcntl
import time
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from draftstore.errors import StoreError
from draftstore.storage.locks import exclusive, lease, lock


def test_readers_share_a_store_and_a_removal_has_it_alone(tmp_path: Path) -> None:
    with lease(tmp_path), lease(tmp_path), exclusive(tmp_path) as free:
        assert not free
    with exclusive(tmp_path) as free:
        assert free
        with pytest.raises(StoreError, match="is being removed: publish another build, or build it again"):
            lease(tmp_path)
    absent = tmp_path / "absent"
    with lease(absent), exclusive(absent) as free:
        assert free


def test_a_lock_waits_for_its_holder(tmp_path: Path) -> None:
    held, begin = lock(tmp_path), time.monotonic()
    with pytest.raises(BlockingIOError):
        lock(tmp_path, seconds=0.05)
    assert 0.05 <= time.monotonic() - begin < 10
    for seconds in (60.0, float("inf")):
        Timer(0.05, held.close).start()
        held = lock(tmp_path, seconds=seconds)
    held.close()
    held.close()


def test_a_file_system_without_locks_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(number: int) -> Any:
        def flock(*_: Any) -> None:
            raise OSError(number, "no")

        return flock

    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    with exclusive(tmp_path) as free:
        assert free
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    with pytest.raises(OSError, match="no"):
        lock(tmp_path)
