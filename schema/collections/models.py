"""The tables of collections: named sets of sources that stores are made from, and what was taken down from them.

While `corpora` names the token ids that a store was built from, a collection names the texts that the next one will be
built from. These tables contain no text.
"""

import hashlib
import json
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Interval, UniqueConstraint, func
from sqlalchemy import text as sql
from sqlalchemy.orm import Mapped, mapped_column, relationship

from schema.models import RELEASE_NAME, Base, Bigint, Id, one_of

SOURCE_KINDS = ("files", "live", "log", "url")
FIRST_OUT = ("oldest", "largest")
DIGESTS = ("digests", "texts", "answers")
"""Columns of a removal with digests."""


class Collection(Base):
    """A named set of sources."""

    __tablename__ = "collections"

    id: Mapped[Id]
    name: Mapped[str] = mapped_column(comment="name that flows and commands use, such as chat")
    tokenizer: Mapped[str | None] = mapped_column(
        comment="folder, file or hub name of the tokenizer; NULL: the flow's default"
    )
    identity: Mapped[int] = mapped_column(
        server_default=sql("1"), comment="version of its documents' digests; see draftstore.text.digests"
    )
    vouched: Mapped[dict[str, Any]] = mapped_column(
        server_default=sql("'{}'"),
        comment="builds and live logs that somebody vouched for: id or folder, and the time in ISO form",
    )
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    sources: Mapped[list["CollectionSource"]] = relationship(
        order_by="CollectionSource.id", cascade="all, delete-orphan", passive_deletes=True,
        back_populates="collection", lazy="selectin",
    )  # fmt: skip
    removals: Mapped[list["CollectionRemoval"]] = relationship(
        order_by="CollectionRemoval.id", cascade="all, delete-orphan", passive_deletes=True, lazy="selectin"
    )

    __table_args__ = (
        UniqueConstraint("name"),
        CheckConstraint(f"name ~ '{RELEASE_NAME}'", name="name"),
        {"comment": "named sets of sources from which stores are built"},
    )

    @property
    def in_force(self) -> list["CollectionRemoval"]:
        """The removals that were not taken back."""
        restored = {row.restores for row in self.removals}
        return [row for row in self.removals if row.restores is None and row.key not in restored]

    def vouched_for(self, thing: object) -> str | None:
        """Return when somebody vouched for a build (id) or live log (folder); None: not since the last removal."""
        said = self.vouched.get(str(thing))
        valid = said and all(row.created_at <= datetime.fromisoformat(said) for row in self.in_force)
        return said if valid else None


class CollectionSource(Base):
    """A source of a collection."""

    __tablename__ = "collection_sources"

    id: Mapped[Id]
    collection_id: Mapped[int] = mapped_column(
        ForeignKey("collections.id", ondelete="CASCADE"), comment="its collection"
    )
    kind: Mapped[str] = mapped_column(
        comment="files: a path or pattern; live: the log of a live store; log: the response log of a worker, with its "
        "rotated files; url: objects, mirrored before they are read"
    )
    place: Mapped[str] = mapped_column(comment="absolute path, pattern of paths, or URL")
    column_name: Mapped[str] = mapped_column(
        server_default="text", comment="key or column of the text in records"
    )
    fields: Mapped[str | None] = mapped_column(
        comment="keys of a prompt and its output that are read together, prompt=KEY,output=KEY; NULL: the text alone"
    )
    condition: Mapped[str | None] = mapped_column(
        comment="SQL expression over the keys of the records that are read; NULL: all"
    )
    globs: Mapped[list[str]] = mapped_column(
        server_default=sql("'{}'"),
        comment="patterns of the files of a folder that are read; none: text and source files",
    )
    licence: Mapped[str | None] = mapped_column(comment="what its licence allows, as a note")
    retention: Mapped[timedelta | None] = mapped_column(
        Interval, comment="documents first seen longer ago are excluded; NULL: no limit"
    )
    max_bytes: Mapped[Bigint | None] = mapped_column(comment="maximum bytes of text; NULL: no limit")
    first_out: Mapped[str] = mapped_column(
        server_default="oldest", comment="documents to exclude first above max_bytes: oldest, largest"
    )
    added_at: Mapped[datetime] = mapped_column(server_default=func.now())

    collection: Mapped[Collection] = relationship(back_populates="sources")

    __table_args__ = (
        UniqueConstraint("collection_id", "place"),
        one_of("kind", SOURCE_KINDS),
        one_of("first_out", FIRST_OUT),
        CheckConstraint("max_bytes > 0", name="max_bytes"),
        CheckConstraint("retention > interval '0'", name="retention"),
        {"comment": "sources of collections: files, logs, objects"},
    )


class CollectionRemoval(Base):
    """A take-down of documents from a collection, or the end of one."""

    __tablename__ = "collection_removals"

    id: Mapped[Id]
    collection_id: Mapped[int] = mapped_column(
        ForeignKey("collections.id", ondelete="CASCADE"), index=True, comment="its collection"
    )
    rule: Mapped[dict[str, Any]] = mapped_column(
        comment="excludes later documents: document (an id), source and before (unix seconds), "
        "or containing (length and hashes of a text, never the text)"
    )
    digests: Mapped[bytes] = mapped_column(
        comment="16 bytes for each removed document, one after the other; see draftstore.text.digests"
    )
    texts: Mapped[bytes] = mapped_column(
        server_default=sql("''"), comment="the same for their texts without roles"
    )
    answers: Mapped[bytes] = mapped_column(
        server_default=sql("''"), comment="the same for their last answers, compared only with live logs"
    )
    restores: Mapped[str | None] = mapped_column(
        comment="file name of the removal that this one takes back; NULL: it removes documents"
    )
    documents: Mapped[Bigint] = mapped_column(comment="number of documents that it removed or took back")
    reason: Mapped[str | None] = mapped_column(comment="reason, as a note")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        CheckConstraint("octet_length(digests) % 16 = 0", name="digests"),
        {"comment": "removals of documents from collections, and rules for later documents"},
    )

    @property
    def key(self) -> str:
        """Name of its file without the suffix: its time and the start of a hash of its content."""
        when = self.created_at.astimezone(UTC).strftime("%Y%m%dT%H%M%S%f")
        digests = b"".join(getattr(self, name) for name in DIGESTS)
        content = digests + json.dumps(self.rule, sort_keys=True).encode() + (self.restores or "").encode()
        return f"{when}-{hashlib.sha256(content).hexdigest()[:8]}"
