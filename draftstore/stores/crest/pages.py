"""The pages of an LMDB file that lead to others: LMDB follows them unchecked, out of the file if they are damaged."""

import struct
from pathlib import Path

import lmdb
import numpy as np
from numpy.typing import NDArray

META = struct.Struct("=10xH4xII16xI44x4xHHQQ16xQQ")
"""Page flags; magic, version; page size; flags, depth, branch and leaf pages and root of the tree; last page."""
MAGIC, VERSION, NO_PAGE = 0xBEEFC0DE, 1, 2**64 - 1
BRANCH, LEAF, META_PAGE = 1, 2, 8


def check_pages(path: Path) -> None:
    """Raise lmdb.CorruptedError if a meta page, the root or a branch page is damaged; LMDB refuses other formats."""
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
        if root != NO_PAGE or depth:
            levels = [np.array([min(root, len(pages))])]
            for _ in range(1, depth):
                levels.append(_below(pages[: last + 1], levels[-1], BRANCH))
            if depth == 1:
                _below(pages[: last + 1], levels[0], LEAF)
            found = np.unique(np.concatenate(levels))
            _require(len(found) == branches + leaves and len(levels[-1]) == leaves and found[-1] <= last)


def _below(pages: NDArray[np.uint8], numbers: NDArray[np.int64], kind: int) -> NDArray[np.int64]:
    """Check pages of one kind and return the numbers of the pages below branch pages."""
    _require(len(numbers) < len(pages) and numbers.min() >= 2 and numbers.max() < len(pages))
    size = pages.shape[1]
    words = pages[numbers].view(np.uint16).astype(np.int64)
    begin, end = words[:, 6], words[:, 7]  # of the free space, between the places of nodes and the nodes
    _require((words[:, 5] == kind) & (begin >= 22 - 2 * kind) & (begin <= end) & (end <= size))
    rows, columns = np.nonzero(np.arange(8, size // 2) < begin[:, None] // 2)
    nodes = words[rows, columns + 8]
    _require((nodes % 2 == 0) & (nodes >= end[rows]) & (nodes <= size - 8))
    low, high, top, key = (words[rows, nodes // 2 + part] for part in range(4))
    inside = np.where(top & 1, 8, low | high << 16) if kind == LEAF else 0  # bytes of values
    _require(nodes + 8 + key + inside <= size)
    return low | high << 16 | top << 32


def _require(sound: bool | NDArray[np.bool_]) -> None:
    if not np.asarray(sound).all():
        raise lmdb.CorruptedError("a page does not fit the file")
