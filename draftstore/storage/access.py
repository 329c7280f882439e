"""Permissions of a store: none that any of its sources denies."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

_READABLE = ((stat.S_IRGRP, stat.S_IRWXG), (stat.S_IROTH, stat.S_IRWXO))


def denied_bits(sources: Iterable[Path]) -> int:
    """Return the group and other permissions that any source denies, as mode bits.

    A file whose group differs from this process's also denies the group, unless others may read it. A missing file,
    such as a deleted log segment, denies everything.
    """
    bits = 0
    for path in sources:
        try:
            found = path.stat()
        except FileNotFoundError:
            return stat.S_IRWXG | stat.S_IRWXO
        for readable, whole in _READABLE:
            if not found.st_mode & readable:
                bits |= whole
        if bits & stat.S_IRWXO and found.st_gid != os.getegid():
            bits |= stat.S_IRWXG
    return bits


def deny(directory: Path, bits: int) -> None:
    """Remove permissions from a directory and everything in it."""
    for path in [directory, *directory.rglob("*")]:
        mode = path.stat().st_mode
        if mode & bits:
            path.chmod(stat.S_IMODE(mode) & ~bits)
