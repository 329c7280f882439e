"""The pages of an LMDB file that lead to others: LMDB follows them unchecked, out of the file if they are damaged.

These are the meta pages, the root and the branch pages: few, since the others are leaves.
"""

import struct
import sys
from pathlib import Path

import lmdb
import numpy as np
from numpy.typing import NDArray

META = struct.Struct("=10xH4xII16xI44x4xHHQQ16xQQ")
"""Page flags; magic, version; page size; flags, depth, branch and leaf pages and root of the tree; last page."""
MAGIC, VERSION, NO_PAGE = 0xBEEFC0DE, 1, 2**64 - 1
BRANCH, LEAF, META_PAGE, BIG = 1, 2, 8, 1


def check_pages(path: Path) -> None:
    """Raise lmdb.CorruptedError if one of these pages is damaged; LMDB itself refuses other formats."""
    head = np.fromfile(path, np.uint8, META.size).tobytes()
    if len(head) < META.size or META.unpack(head)[1:3] != (MAGIC, VERSION):
        return
    size = META.unpack(head)[3]
    data = np.memmap(path, np.uint8, "r")
    _require(512 <= size <= 1 << 15 and 2 * size <= len(data))
    pages = data[: len(data) // size * size].reshape(-1, size)
    for page in pages[:2]:
        *kind, depth, branches, leaves, root, last = META.unpack(page[: META.size])
        _require(kind == [META_PAGE, MAGIC, VERSION, size, 0] and last < len(pages))
        level, above = np.array([min(root, len(pages))]), 0
        for _ in range(depth - 1):
            above += len(level)
            level = _children(pages[: last + 1], level, BRANCH)
        if depth == 1:
            _children(pages[: last + 1], level, LEAF)
        _require((above, len(level)) == (branches, leaves) if depth else root == NO_PAGE)
        _require(not depth or level.max() <= last)


def _children(pages: NDArray[np.uint8], numbers: NDArray[np.int64], kind: int) -> NDArray[np.int64]:
    """Check pages of one kind and return the numbers of those below; none are below leaf pages."""
    _require(len(numbers) < len(pages) and numbers.min() >= 2 and numbers.max() < len(pages))
    size = pages.shape[1]
    words = pages[numbers].view(np.uint16).astype(np.int64)
    begin, end = words[:, 6], words[:, 7]  # of the free space between nodes' places and nodes
    _require(
        (words[:, 5] == kind) & (begin >= (20 if kind == BRANCH else 18)) & (begin <= end) & (end <= size)
    )
    rows, columns = np.nonzero(np.arange(8, size // 2) < begin[:, None] // 2)
    nodes = words[rows, columns + 8]
    _require((nodes % 2 == 0) & (nodes >= end[rows]) & (nodes <= size - 8))
    low, high, top, key = (words[rows, nodes // 2 + part] for part in range(4))
    data = nodes + 8 + key
    if kind == BRANCH:
        _require(data <= size)
        return low | high << 16 | top << 32
    length, big = low | high << 16, top == BIG
    _require((big | (top == 0)) & (data + np.where(big, 8, length) <= size))
    for place, needed in zip(data[big], length[big], strict=True):  # on pages of their own
        first = int.from_bytes(pages[numbers[0], place : place + 8].tobytes(), sys.byteorder)
        _require(first >= 2 and first + (needed + 15) // size < len(pages))
    return numbers


def _require(sound: bool | NDArray[np.bool_]) -> None:
    if not np.asarray(sound).all():
        raise lmdb.CorruptedError("a page does not fit the file")
