"""Which documents of a scan are wanted: those not taken down, not expired, and within the cap."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from draftstore.text.digests import DIGEST_BYTES, digest_keys
from draftstore.text.scans import Scan


@dataclasses.dataclass(frozen=True)
class Cap:
    """The most text of a source.

    Attributes:
        bytes: maximum bytes of text in UTF-8.
        first_out: which documents go first, `oldest` or `largest`.
    """

    bytes: int
    first_out: Literal["oldest", "largest"] = "oldest"


@dataclasses.dataclass(frozen=True)
class Removal:
    """A take-down: the digests that it found, and a rule for documents that come later.

    Attributes:
        digests: uint8 [n, 16], texts that are out, whatever holds them.
        document: this id is out, too; None: no such rule.
        source: documents of this source are out; None: of any, if there is `before`.
        before: unix seconds; documents first seen before it are out.
    """

    digests: NDArray[np.uint8] = dataclasses.field(
        default_factory=lambda: np.empty((0, DIGEST_BYTES), np.uint8)
    )
    document: str | None = None
    source: int | None = None
    before: int | None = None

    def rows(self, scan: Scan) -> NDArray[np.bool_]:
        """Return which rows of a scan it takes, bool [n]."""
        out: NDArray[np.bool_] = np.isin(scan.keys, digest_keys(self.digests))
        if self.document is not None:
            out |= np.array([found == self.document for found in scan.ids()], np.bool_)
        if self.source is not None or self.before is not None:
            ruled = np.ones(len(scan), np.bool_)
            if self.source is not None:
                ruled &= scan.column("source") == self.source
            if self.before is not None:
                ruled &= scan.column("first_seen") < self.before
            out |= ruled
        return out


def removed_rows(scan: Scan, removals: Sequence[Removal]) -> NDArray[np.bool_]:
    """Return which rows of a scan are taken down, bool [n]: all with the text of one that is."""
    out = scan.column("refused").astype(np.bool_)
    for removal in removals:
        out |= removal.rows(scan)
    keys = scan.keys
    found: NDArray[np.bool_] = np.isin(keys, keys[out])
    return found


def wanted_digests(
    scan: Scan,
    removals: Sequence[Removal] = (),
    *,
    now: float,
    retention: Mapping[int, float] | None = None,
    caps: Mapping[int, Cap] | None = None,
) -> NDArray[np.uint8]:
    """Return the digests of the documents that stores may hold, uint8 [n, 16], each once, in the order of the scan.

    A text that several sources hold is wanted if one of them wants it. A removal is for all of them.

    Args:
        scan: the scan.
        removals: take-downs.
        now: unix seconds.
        retention: by source, the seconds after which a document expires.
        caps: by source, the most text.
    """
    keys, numbers = scan.keys, scan.column("source")
    kept = ~removed_rows(scan, removals)
    for source, seconds in (retention or {}).items():
        kept &= (numbers != source) | (scan.column("first_seen") > now - seconds)
    for source, cap in (caps or {}).items():
        rows = _first_rows(keys, np.flatnonzero(kept & (numbers == source)))
        within = rows[_within(scan, rows, cap)]
        kept &= numbers != source
        kept[within] = True
    rows = _first_rows(keys, np.flatnonzero(kept))
    digests: NDArray[np.uint8] = scan.digests[rows]
    return digests


def _first_rows(keys: NDArray[np.bytes_], rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return those of ascending rows that are the first with their key."""
    return np.sort(rows[np.unique(keys[rows], return_index=True)[1]])


def _within(scan: Scan, rows: NDArray[np.intp], cap: Cap) -> NDArray[np.intp]:
    """Return the places in `rows` of what stays within a cap; of equal ones those that were read last stay."""
    sizes = scan.column("bytes")[rows]
    order = np.lexsort((-rows, -scan.column("first_seen")[rows] if cap.first_out == "oldest" else sizes))
    return order[np.cumsum(sizes[order]) <= cap.bytes]
