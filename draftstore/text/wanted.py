"""Which documents of a scan are wanted: those not taken down, not expired, and within the cap."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import needs_extra
from draftstore.storage.files import escaped
from draftstore.text.scans import Scan, digest_series, digests_of

with needs_extra("polars"):
    import polars as pl


@dataclasses.dataclass(frozen=True)
class Cap:
    """The maximum bytes of UTF-8 text of a source, and which documents are dropped first."""

    bytes: int
    first_out: Literal["oldest", "largest"] = "oldest"


@dataclasses.dataclass(frozen=True)
class Removal:
    """A take-down: digests of documents, their texts and answers, one after the other, and a rule for later ones.

    It matches the id `document`, and documents of `source` (None: of any, if `before` is set) that were first seen
    before `before`, unix seconds.
    """

    digests: bytes = b""
    document: str | None = None
    source: int | None = None
    before: int | None = None

    @property
    def taken(self) -> pl.Expr:
        """Which rows of a scan match its rule."""
        ruled = [pl.col("source") == self.source] if self.source is not None else []
        ruled += [pl.col("first_seen") < self.before] if self.before is not None else []
        taken = pl.all_horizontal(ruled) if ruled else pl.lit(value=False)
        return taken if self.document is None else taken | (pl.col("id") == escaped(self.document))

    def rows(self, scan: Scan) -> NDArray[np.bool_]:
        """Return which rows of a scan match its rule, bool [n]."""
        return scan.frame.select(pl.col("digest").is_not_null() & self.taken).to_series().to_numpy()


def removed_rows(scan: Scan, removals: Sequence[Removal]) -> NDArray[np.bool_]:
    """Return which rows of a scan are taken down, bool [n]: all with a removed document or text, or that begin so."""
    ruled = scan.frame.filter(pl.any_horizontal("refused", *(removal.taken for removal in removals)))
    known = [ruled["digest"], ruled["text"], *(digest_series(removal.digests) for removal in removals)]
    return rows_with(scan, pl.concat([each.alias("digest") for each in known]).drop_nulls().unique())


def rows_with(scan: Scan, digests: pl.Series) -> NDArray[np.bool_]:
    """Return which rows of a scan are a document or text with one of these digests, or begin so, bool [n]."""
    known = digests.implode()
    taken = [pl.col(name).is_in(known).fill_null(value=False) for name in ("digest", "text")]
    begins = pl.col("beginnings").list.eval(pl.element().is_in(known)).list.any()
    return scan.frame.select(pl.any_horizontal(*taken, begins)).to_series().to_numpy()


def wanted_digests(
    scan: Scan,
    removals: Sequence[Removal] = (),
    *,
    now: float,
    retention: Mapping[int, float] | None = None,
    caps: Mapping[int, Cap] | None = None,
) -> NDArray[np.uint8]:
    """Return the digests of the documents that stores may hold, uint8 [n, 16], unique, in the order of the scan.

    A text in several sources is wanted if any of them keeps it. A removal applies to all of them. `retention` are the
    seconds after which a document expires, by source.
    """
    rows = scan.frame.with_row_index("row").filter(~removed_rows(scan, removals))
    for source, seconds in (retention or {}).items():
        rows = rows.filter((pl.col("source") != source) | (pl.col("first_seen") > now - seconds))
    for source, cap in (caps or {}).items():
        own = pl.col("source") == source
        rows = pl.concat([rows.filter(~own), _within(rows.filter(own), cap)])
    return digests_of(rows.sort("row").unique("digest", keep="first", maintain_order=True))


def _within(rows: pl.DataFrame, cap: Cap) -> pl.DataFrame:
    """Return the rows of a source that stay within a cap; among equals, those read last are kept."""
    oldest = cap.first_out == "oldest"
    ordered = rows.unique("digest", keep="first", maintain_order=True).sort(
        "first_seen" if oldest else "bytes", "row", descending=[oldest, True]
    )
    return ordered.filter(pl.col("bytes").cum_sum() <= cap.bytes)
