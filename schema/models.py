r"""The tables of the catalogue: typed models with comments that `\d+` shows.

Builds, their sources and the releases that point at them: `corpora`, `builds`, `releases`, `release_moves`. Recorded
outputs that gates replay before a release moves, and results of replays: `recordings`, `replays`.
Contents: `ngrams` (the most common), `ngram_spectrum` (all of them, by count), `kept_ngrams` and `trees` (CREST). The
large tables are partitioned by build, so that dropping a build is instant; see `schema.db.partitions`. Views for common
queries: `schema.views`. What stores will be built from: `schema.collections.models`.
"""

from datetime import datetime
from typing import Annotated, Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Text,
    UniqueConstraint,
    func,
)
from sqlalchemy import text as sql
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from draftstore.stores.registry import KINDS as STORE_KINDS

KINDS = ("tokens", "ngrams", *STORE_KINDS)
STATES = ("running", "finished", "failed")
ACTIONS = ("publish", "rollback")
PARTITIONED = ("ngrams", "kept_ngrams", "trees")
RELEASE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Names in tables; those of new releases are shorter, see `draftstore.options.NAME`."""

Id = Annotated[int, mapped_column(BigInteger, Identity(always=True), primary_key=True)]
Bigint = Annotated[int, mapped_column(BigInteger)]
Smallint = Annotated[int, mapped_column(SmallInteger)]
Tokens = Annotated[list[int], mapped_column(ARRAY(Integer))]
BytesText = Annotated[str, mapped_column(Text(collation="C"))]  # byte order: prefix searches can use an index


class Base(DeclarativeBase):
    """Base of all models: maps Python types and constraint names to PostgreSQL's."""

    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads a plain class attribute
        str: Text,
        float: Double,
        bytes: LargeBinary,
        datetime: DateTime(timezone=True),
        list[str]: ARRAY(Text),
        dict[str, Any]: JSONB,
    }


def one_of(column: str, values: tuple[str, ...]) -> CheckConstraint:
    """Return the constraint that a column has one of some values."""
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=column)


class Corpus(Base):
    """A corpus of token ids, the source of stores."""

    __tablename__ = "corpora"

    id: Mapped[Id]
    name: Mapped[str] = mapped_column(comment="name of the first store built from it")
    sources: Mapped[list[str]] = mapped_column(
        server_default=sql("'{}'"), comment="paths or package names that the documents came from"
    )
    fingerprint: Mapped[str] = mapped_column(comment="SHA-256 of the token shards")
    tokenizer: Mapped[str] = mapped_column(comment="name of the tokenizer")
    tokenizer_fingerprint: Mapped[str] = mapped_column(comment="SHA-256 of its vocabulary and merges")
    documents: Mapped[Bigint] = mapped_column(comment="number of documents")
    tokens: Mapped[Bigint] = mapped_column(comment="number of tokens")
    characters: Mapped[Bigint | None] = mapped_column(comment="number of characters of text, where known")
    created_at: Mapped[datetime] = mapped_column(
        server_default=func.now(), comment="when it was first registered"
    )

    __table_args__ = (
        UniqueConstraint("fingerprint", "tokenizer_fingerprint"),
        {"comment": "tokenized corpora, from which stores are built"},
    )


class Build(Base):
    """A build of a store, finished or not."""

    __tablename__ = "builds"

    id: Mapped[Id]
    kind: Mapped[str] = mapped_column(comment="kind of the store: " + ", ".join(KINDS))
    name: Mapped[str] = mapped_column(comment="name of the store; several builds may share it")
    state: Mapped[str] = mapped_column(
        server_default="running", comment="running, finished (all columns are set), or failed (see error)"
    )
    corpus_id: Mapped[int | None] = mapped_column(ForeignKey("corpora.id"), index=True, comment="its corpus")
    source_id: Mapped[int | None] = mapped_column(
        ForeignKey("builds.id", ondelete="SET NULL"),
        index=True,
        comment="build that it was made from: the REST store of n-gram counts or of a CREST store",
    )
    path: Mapped[str] = mapped_column(comment="directory of the store")
    digest: Mapped[str | None] = mapped_column(
        index=True, comment="SHA-256 of manifest.json; NULL until finished"
    )
    backends: Mapped[list[str]] = mapped_column(
        server_default=sql("'{}'"), comment="backends that hold the entries of a CREST store: lmdb, postgres"
    )
    parameters: Mapped[dict[str, Any]] = mapped_column(
        server_default=sql("'{}'"), comment="parameters of the build"
    )
    manifest: Mapped[dict[str, Any] | None] = mapped_column(comment="manifest.json; NULL until finished")
    size_bytes: Mapped[Bigint | None] = mapped_column(comment="bytes of all files; NULL until finished")
    timings: Mapped[dict[str, Any]] = mapped_column(
        server_default=sql("'{}'"), comment="seconds that each step took, by step"
    )
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    finished_at: Mapped[datetime | None] = mapped_column(comment="when it finished or failed")
    error: Mapped[str | None] = mapped_column(comment="why it failed, in one sentence")

    corpus: Mapped[Corpus | None] = relationship()
    source: Mapped["Build | None"] = relationship(remote_side="Build.id", passive_deletes=True)

    __table_args__ = (
        one_of("kind", KINDS),
        one_of("state", STATES),
        CheckConstraint(
            "state <> 'finished' OR (digest IS NOT NULL AND manifest IS NOT NULL "
            "AND size_bytes IS NOT NULL AND finished_at IS NOT NULL)",
            name="finished",
        ),
        CheckConstraint(
            "state <> 'failed' OR (error IS NOT NULL AND finished_at IS NOT NULL)", name="failed"
        ),
        UniqueConstraint("path", "digest"),
        {"comment": "builds of stores: running, finished and failed"},
    )


class Release(Base):
    """A name that points at a build."""

    __tablename__ = "releases"

    name: Mapped[str] = mapped_column(primary_key=True, comment="name that clients use, such as chat-vicuna")
    build_id: Mapped[int] = mapped_column(
        ForeignKey("builds.id"), index=True, comment="the live build: it cannot be dropped"
    )
    moved_at: Mapped[datetime] = mapped_column(server_default=func.now(), comment="time of the last move")

    build: Mapped[Build] = relationship()

    __table_args__ = (
        CheckConstraint(f"name ~ '{RELEASE_NAME}'", name="name"),
        {"comment": "names that clients use, and the live build of each"},
    )


class ReleaseMove(Base):
    """A publication or rollback. Builds are plain numbers, since the history outlives dropped builds."""

    __tablename__ = "release_moves"

    id: Mapped[Id]
    release: Mapped[str] = mapped_column(ForeignKey("releases.name"), comment="release that moved")
    from_build: Mapped[Bigint | None] = mapped_column(comment="id of the build before; NULL for the first")
    to_build: Mapped[Bigint] = mapped_column(comment="id of the build after; it may have been dropped since")
    action: Mapped[str] = mapped_column(comment="publish or rollback")
    lengths: Mapped[dict[str, Any]] = mapped_column(
        server_default=sql("'{}'"),
        comment="accepted length M of the build after, by recording, measured when it was published",
    )
    moved_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        one_of("action", ACTIONS),
        Index(None, "release", "id"),
        {"comment": "all moves of releases, in the order of id"},
    )


class Recording(Base):
    """A file of recorded outputs that is replayed before a release moves, and what a new build must reach."""

    __tablename__ = "recordings"

    name: Mapped[str] = mapped_column(primary_key=True, comment="name, also in the results of checks")
    path: Mapped[str] = mapped_column(
        comment="file of recorded outputs, JSON Lines, on the machine that publishes"
    )
    releases: Mapped[list[str]] = mapped_column(
        comment="releases whose new builds replay it; they need not exist yet"
    )
    model: Mapped[str | None] = mapped_column(comment="only outputs of this model; NULL: all outputs")
    request: Mapped[bool] = mapped_column(comment="whether drafts also come from the request")
    rows: Mapped[int | None] = mapped_column(comment="maximum number of outputs; NULL: all")
    budget: Mapped[int] = mapped_column(comment="maximum number of nodes in a draft")
    tolerance: Mapped[float] = mapped_column(
        comment="share of the live build's accepted length that a new one may lose: 0.02"
    )
    # The check that read it is gone; it is NOT NULL without a default in databases of this revision.
    slowdown: Mapped[float] = mapped_column(default=1.5, comment="not used")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        CheckConstraint("budget > 0 AND rows > 0", name="counts"),
        CheckConstraint("tolerance >= 0 AND tolerance < 1 AND slowdown >= 1", name="tolerances"),
        {
            "comment": "recorded outputs that are replayed before a release moves, and limits for the new build"
        },
    )


class Replay(Base):
    """The result of replaying recorded outputs with a build."""

    __tablename__ = "replays"

    id: Mapped[Id]
    build_id: Mapped[int] = mapped_column(ForeignKey("builds.id", ondelete="CASCADE"), index=True)
    recording: Mapped[str | None] = mapped_column(
        comment="name in recordings if a check replayed it; NULL: by draftstore replay --record"
    )
    recordings: Mapped[str] = mapped_column(comment="file of recorded outputs")
    model: Mapped[str | None] = mapped_column(comment="only outputs of this model; NULL: all outputs")
    strategy: Mapped[str] = mapped_column(comment="how drafts were made: backoff, longest")
    budget: Mapped[int] = mapped_column(comment="maximum number of nodes in a draft")
    rows: Mapped[Bigint] = mapped_column(comment="number of outputs")
    tokens: Mapped[Bigint] = mapped_column(comment="tokens from verification passes")
    passes: Mapped[Bigint] = mapped_column(comment="number of verification passes")
    accepted_length: Mapped[float] = mapped_column(comment="M = tokens / passes; plain decoding is 1.0")
    nodes_mean: Mapped[float] = mapped_column(comment="mean number of nodes in a draft")
    miss_rate: Mapped[float] = mapped_column(comment="share of passes without a draft")
    lookup_p50_us: Mapped[float] = mapped_column(comment="median duration of a lookup, microseconds")
    lookup_p99_us: Mapped[float] = mapped_column(comment="99th percentile of it, microseconds")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    build: Mapped[Build] = relationship()

    __table_args__ = ({"comment": "accepted lengths of builds on recorded outputs"},)


class Ngram(Base):
    """One of the most common n-grams of a corpus."""

    __tablename__ = "ngrams"

    build_id: Mapped[Bigint] = mapped_column(primary_key=True, comment="build of kind ngrams")
    n: Mapped[Smallint] = mapped_column(primary_key=True, comment="number of tokens")
    rank: Mapped[int] = mapped_column(primary_key=True, comment="1 is the most common of this n")
    tokens: Mapped[Tokens] = mapped_column(comment="token ids")
    text: Mapped[BytesText] = mapped_column(comment="text of the tokens; different n-grams may have the same")
    count: Mapped[Bigint] = mapped_column(comment="occurrences in the corpus, exact")

    __table_args__ = (
        Index(None, "count"),
        Index(None, "text"),
        {
            "comment": "most common n-grams of a corpus, with their text; ngram_spectrum counts all n-grams",
            "postgresql_partition_by": "LIST (build_id)",
        },
    )


class NgramSpectrum(Base):
    """The number of distinct n-grams with a given count."""

    __tablename__ = "ngram_spectrum"

    build_id: Mapped[int] = mapped_column(
        ForeignKey("builds.id", ondelete="CASCADE"), primary_key=True, comment="build of kind ngrams"
    )
    n: Mapped[Smallint] = mapped_column(primary_key=True, comment="number of tokens")
    count: Mapped[Bigint] = mapped_column(primary_key=True, comment="occurrences in the corpus")
    ngrams: Mapped[Bigint] = mapped_column(comment="number of distinct n-grams with this count")

    __table_args__ = ({"comment": "number of distinct n-grams for each count, over all n-grams of a corpus"},)


class KeptNgram(Base):
    """An entry of a CREST store: an n-gram and the measures of its draft tree."""

    __tablename__ = "kept_ngrams"

    build_id: Mapped[Bigint] = mapped_column(primary_key=True, comment="build of kind crest")
    rank: Mapped[int] = mapped_column(
        primary_key=True, comment="order of selection over all n; 1 is the first"
    )
    n: Mapped[Smallint] = mapped_column(comment="number of tokens")
    tokens: Mapped[Tokens] = mapped_column(comment="token ids")
    text: Mapped[BytesText] = mapped_column(comment="text of the tokens; different n-grams may have the same")
    count: Mapped[Bigint] = mapped_column(comment="occurrences in the corpus, exact")
    nodes: Mapped[Smallint] = mapped_column(comment="number of nodes in its draft tree")
    raw_bytes: Mapped[int] = mapped_column(comment="bytes of the tree before compression")
    bytes: Mapped[int] = mapped_column(comment="bytes of the tree as stored")

    __table_args__ = (
        Index(None, "text"),
        {
            "comment": "n-grams that a CREST store kept, and sizes of their draft trees",
            "postgresql_partition_by": "LIST (build_id)",
        },
    )


class Tree(Base):
    """An entry of a CREST store as bytes, in the PostgreSQL backend."""

    __tablename__ = "trees"

    build_id: Mapped[Bigint] = mapped_column(primary_key=True, comment="build of kind crest")
    key: Mapped[bytes] = mapped_column(primary_key=True, comment="token ids, big-endian, 2 or 4 bytes each")
    value: Mapped[bytes] = mapped_column(comment="draft tree, compressed: the same bytes as in LMDB")

    __table_args__ = (
        {
            "comment": "draft trees of CREST stores with the backend postgres, by key",
            "postgresql_partition_by": "LIST (build_id)",
        },
    )
