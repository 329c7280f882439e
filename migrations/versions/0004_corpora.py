"""Collections: named sets of sources, and what was taken down from them.

Revision ID: 0004
Revises: 0002
Create Date: 2026-11-23
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

VIEWS = "b01e92d287b1b744"


def upgrade() -> None:
    """Go to this revision; env.py makes the views again at the newest one."""
    op.create_table(
        "collections",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("name", sa.Text(), nullable=False, comment="what flows and commands ask for: chat"),
        sa.Column(
            "tokenizer",
            sa.Text(),
            nullable=True,
            comment="folder, file or hub name of the tokenizer; NULL: the flow's default",
        ),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("name ~ '^[A-Za-z0-9][A-Za-z0-9._-]*$'", name=op.f("ck_collections_name")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_collections")),
        sa.UniqueConstraint("name", name=op.f("uq_collections_name")),
        comment="named sets of sources: what the next stores are built from",
    )
    op.create_table(
        "collection_removals",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("collection_id", sa.BigInteger(), nullable=False, comment="the collection concerned"),
        sa.Column(
            "rule",
            postgresql.JSONB(),
            nullable=False,
            comment="what is out from now on besides the digests: document (an id), "
            "source and before (unix seconds), or containing (length and hashes of a text, never the text)",
        ),
        sa.Column(
            "digests",
            sa.LargeBinary(),
            nullable=False,
            comment="16 bytes for each removed text, one after the other; see draftstore.text.digests",
        ),
        sa.Column(
            "documents",
            sa.BigInteger(),
            nullable=False,
            comment="how many documents it removed when it was written",
        ),
        sa.Column("reason", sa.Text(), nullable=True, comment="why, for people"),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("octet_length(digests) % 16 = 0", name=op.f("ck_collection_removals_digests")),
        sa.ForeignKeyConstraint(
            ["collection_id"],
            ["collections.id"],
            name=op.f("fk_collection_removals_collection_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_collection_removals")),
        comment="documents taken down from collections, and rules for those that come later",
    )
    op.create_index(
        op.f("ix_collection_removals_collection_id"), "collection_removals", ["collection_id"], unique=False
    )
    op.create_table(
        "collection_sources",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column(
            "collection_id", sa.BigInteger(), nullable=False, comment="the collection that it belongs to"
        ),
        sa.Column(
            "kind",
            sa.Text(),
            nullable=False,
            comment="files: a path or pattern; log: the response log of a worker, with its rotated files; "
            "url: objects, mirrored before they are read",
        ),
        sa.Column("place", sa.Text(), nullable=False, comment="absolute path, pattern of paths, or URL"),
        sa.Column(
            "column_name",
            sa.Text(),
            server_default="text",
            nullable=False,
            comment="key or column of the text in records",
        ),
        sa.Column(
            "globs",
            postgresql.ARRAY(sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="which files of a folder are read; none: text and source files",
        ),
        sa.Column("licence", sa.Text(), nullable=True, comment="what its licence allows, for people"),
        sa.Column(
            "retention",
            sa.Interval(),
            nullable=True,
            comment="documents first seen longer ago are no longer wanted; NULL: no limit",
        ),
        sa.Column(
            "max_bytes",
            sa.BigInteger(),
            nullable=True,
            comment="most bytes of text that are wanted; NULL: no limit",
        ),
        sa.Column(
            "first_out",
            sa.Text(),
            server_default="oldest",
            nullable=False,
            comment="which documents go first above max_bytes: oldest, largest",
        ),
        sa.Column("added_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "first_out IN ('oldest', 'largest')", name=op.f("ck_collection_sources_first_out")
        ),
        sa.CheckConstraint("kind IN ('files', 'log', 'url')", name=op.f("ck_collection_sources_kind")),
        sa.CheckConstraint("retention > interval '0'", name=op.f("ck_collection_sources_retention")),
        sa.CheckConstraint("max_bytes > 0", name=op.f("ck_collection_sources_max_bytes")),
        sa.ForeignKeyConstraint(
            ["collection_id"],
            ["collections.id"],
            name=op.f("fk_collection_sources_collection_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_collection_sources")),
        sa.UniqueConstraint("collection_id", "place", name=op.f("uq_collection_sources_collection_id_place")),
        comment="the sources of collections: files, response logs, objects",
    )


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_table("collection_sources")
    op.drop_index(op.f("ix_collection_removals_collection_id"), table_name="collection_removals")
    op.drop_table("collection_removals")
    op.drop_table("collections")
