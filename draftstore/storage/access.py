"""Permissions of a store: none that a source of the store denies."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

_READABLE = ((stat.S_IRGRP, stat.S_IRWXG), (stat.S_IROTH, stat.S_IRWXO))


def denied_bits(sources: Iterable[Path]) -> int:
    """Return the permissions of group and others that some source denies, as bits of a mode.

    A file of another group than that of this process's files denies the group, too, unless others may read it. One
    that is gone, as segments of logs may be, denies all.
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
    """Take permissions away from a directory and everything in it."""
    for path in [directory, *directory.rglob("*")]:
        mode = path.stat().st_mode
        if mode & bits:
            path.chmod(stat.S_IMODE(mode) & ~bits)
