"""The catalogue: all tables.

Revision ID: 0001
Revises: nothing
Create Date: 2026-11-20
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from schema import views

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

VIEWS = "98d70d55d97cab5b"


def upgrade() -> None:
    """Go to this revision; env.py makes the views again at the newest one."""
    for statement in views.drop_statements():
        op.execute(statement)
    op.create_table(
        "corpora",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column(
            "name", sa.Text(), nullable=False, comment="for people: the name of the first store built from it"
        ),
        sa.Column(
            "sources",
            postgresql.ARRAY(sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="paths or package names that the documents came from",
        ),
        sa.Column("fingerprint", sa.Text(), nullable=False, comment="SHA-256 over the token shards"),
        sa.Column("tokenizer", sa.Text(), nullable=False, comment="name of the tokenizer"),
        sa.Column(
            "tokenizer_fingerprint", sa.Text(), nullable=False, comment="SHA-256 of its vocabulary and merges"
        ),
        sa.Column("documents", sa.BigInteger(), nullable=False, comment="number of documents"),
        sa.Column("tokens", sa.BigInteger(), nullable=False, comment="number of tokens"),
        sa.Column(
            "characters", sa.BigInteger(), nullable=True, comment="number of characters of text, where known"
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="first seen",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_corpora")),
        sa.UniqueConstraint(
            "fingerprint", "tokenizer_fingerprint", name=op.f("uq_corpora_fingerprint_tokenizer_fingerprint")
        ),
        comment="corpora as token ids: what stores are built from",
    )
    op.create_table(
        "kept_ngrams",
        sa.Column("build_id", sa.BigInteger(), nullable=False, comment="the build of kind crest"),
        sa.Column("rank", sa.Integer(), nullable=False, comment="1 was selected first, over all n"),
        sa.Column("n", sa.SmallInteger(), nullable=False, comment="number of tokens"),
        sa.Column("tokens", postgresql.ARRAY(sa.Integer()), nullable=False, comment="token ids"),
        sa.Column(
            "text",
            sa.Text(collation="C"),
            nullable=False,
            comment="the tokens as text; different n-grams may share it",
        ),
        sa.Column("count", sa.BigInteger(), nullable=False, comment="occurrences in the corpus, exact"),
        sa.Column("nodes", sa.SmallInteger(), nullable=False, comment="nodes of its draft tree"),
        sa.Column("raw_bytes", sa.Integer(), nullable=False, comment="bytes of the tree before compression"),
        sa.Column("bytes", sa.Integer(), nullable=False, comment="bytes of the tree as stored"),
        sa.Column("tree", sa.Text(), nullable=True, comment="the tree as text; only of the first selected"),
        sa.PrimaryKeyConstraint("build_id", "rank", name=op.f("pk_kept_ngrams")),
        comment="the entries of a CREST store: which n-grams it kept, and the size of their trees",
        postgresql_partition_by="LIST (build_id)",
    )
    op.create_index(op.f("ix_kept_ngrams_text"), "kept_ngrams", ["text"], unique=False)
    op.create_table(
        "ngrams",
        sa.Column("build_id", sa.BigInteger(), nullable=False, comment="the build of kind ngrams"),
        sa.Column("n", sa.SmallInteger(), nullable=False, comment="number of tokens"),
        sa.Column("rank", sa.Integer(), nullable=False, comment="1 is the most common of this n"),
        sa.Column("tokens", postgresql.ARRAY(sa.Integer()), nullable=False, comment="token ids"),
        sa.Column(
            "text",
            sa.Text(collation="C"),
            nullable=False,
            comment="the tokens as text; different n-grams may share it",
        ),
        sa.Column("count", sa.BigInteger(), nullable=False, comment="occurrences in the corpus, exact"),
        sa.PrimaryKeyConstraint("build_id", "n", "rank", name=op.f("pk_ngrams")),
        comment="the most common n-grams of a corpus, with text; all of them are in ngram_spectrum by count",
        postgresql_partition_by="LIST (build_id)",
    )
    op.create_index(op.f("ix_ngrams_count"), "ngrams", ["count"], unique=False)
    op.create_index(op.f("ix_ngrams_text"), "ngrams", ["text"], unique=False)
    op.create_table(
        "trees",
        sa.Column("build_id", sa.BigInteger(), nullable=False, comment="the build of kind crest"),
        sa.Column(
            "key", sa.LargeBinary(), nullable=False, comment="token ids, big-endian, 2 or 4 bytes each"
        ),
        sa.Column(
            "value",
            sa.LargeBinary(),
            nullable=False,
            comment="the draft tree, compressed: the same bytes as in LMDB",
        ),
        sa.PrimaryKeyConstraint("build_id", "key", name=op.f("pk_trees")),
        comment="draft trees of CREST stores that lie in PostgreSQL, to look up by key",
        postgresql_partition_by="LIST (build_id)",
    )
    op.create_table(
        "builds",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column(
            "kind",
            sa.Text(),
            nullable=False,
            comment="what is made: tokens, ngrams, rest, crest, dresd, recycling",
        ),
        sa.Column("name", sa.Text(), nullable=False, comment="for people; several builds may share it"),
        sa.Column(
            "state",
            sa.Text(),
            server_default="running",
            nullable=False,
            comment="running; finished: all columns hold; failed: error says why",
        ),
        sa.Column("corpus_id", sa.BigInteger(), nullable=True, comment="the corpus that it holds"),
        sa.Column(
            "source_id",
            sa.BigInteger(),
            nullable=True,
            comment="the build that it was made from (the REST store of n-gram counts and of CREST)",
        ),
        sa.Column("path", sa.Text(), nullable=False, comment="directory of the store"),
        sa.Column(
            "digest", sa.Text(), nullable=True, comment="SHA-256 of manifest.json; NULL until finished"
        ),
        sa.Column(
            "backends",
            postgresql.ARRAY(sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="where the entries of a CREST store lie: lmdb, postgres",
        ),
        sa.Column(
            "parameters",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="parameters of the build",
        ),
        sa.Column(
            "manifest",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=True,
            comment="manifest.json; NULL until finished",
        ),
        sa.Column(
            "size_bytes", sa.BigInteger(), nullable=True, comment="bytes of all files; NULL until finished"
        ),
        sa.Column(
            "timings",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="seconds that each step took, by step",
        ),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column(
            "finished_at", sa.DateTime(timezone=True), nullable=True, comment="when it finished or failed"
        ),
        sa.Column("error", sa.Text(), nullable=True, comment="why it failed, in one sentence"),
        sa.CheckConstraint(
            "kind IN ('tokens', 'ngrams', 'rest', 'crest', 'dresd', 'recycling')", name=op.f("ck_builds_kind")
        ),
        sa.CheckConstraint(
            "state <> 'failed' OR (error IS NOT NULL AND finished_at IS NOT NULL)",
            name=op.f("ck_builds_failed"),
        ),
        sa.CheckConstraint(
            "state <> 'finished' OR (digest IS NOT NULL AND manifest IS NOT NULL "
            "AND size_bytes IS NOT NULL AND finished_at IS NOT NULL)",
            name=op.f("ck_builds_finished"),
        ),
        sa.CheckConstraint("state IN ('running', 'finished', 'failed')", name=op.f("ck_builds_state")),
        sa.ForeignKeyConstraint(["corpus_id"], ["corpora.id"], name=op.f("fk_builds_corpus_id")),
        sa.ForeignKeyConstraint(
            ["source_id"], ["builds.id"], name=op.f("fk_builds_source_id"), ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_builds")),
        sa.UniqueConstraint("path", "digest", name=op.f("uq_builds_path_digest")),
        comment="every making of a store, finished or not",
    )
    op.create_index(op.f("ix_builds_corpus_id"), "builds", ["corpus_id"], unique=False)
    op.create_index(op.f("ix_builds_digest"), "builds", ["digest"], unique=False)
    op.create_index(op.f("ix_builds_source_id"), "builds", ["source_id"], unique=False)
    op.create_table(
        "ngram_spectrum",
        sa.Column("build_id", sa.BigInteger(), nullable=False, comment="the build of kind ngrams"),
        sa.Column("n", sa.SmallInteger(), nullable=False, comment="number of tokens"),
        sa.Column("count", sa.BigInteger(), nullable=False, comment="occurrences in the corpus"),
        sa.Column(
            "ngrams", sa.BigInteger(), nullable=False, comment="how many distinct n-grams occur so often"
        ),
        sa.ForeignKeyConstraint(
            ["build_id"], ["builds.id"], name=op.f("fk_ngram_spectrum_build_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("build_id", "n", "count", name=op.f("pk_ngram_spectrum")),
        comment="frequency spectrum: of how many n-grams the count is so high; complete",
    )
    op.create_table(
        "releases",
        sa.Column("name", sa.Text(), nullable=False, comment="what users ask for: chat-vicuna"),
        sa.Column(
            "build_id", sa.BigInteger(), nullable=False, comment="the live build: it cannot be dropped"
        ),
        sa.Column(
            "moved_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="time of the last move",
        ),
        sa.CheckConstraint("name ~ '^[A-Za-z0-9][A-Za-z0-9._-]*$'", name=op.f("ck_releases_name")),
        sa.ForeignKeyConstraint(["build_id"], ["builds.id"], name=op.f("fk_releases_build_id")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_releases")),
        comment="names that users ask for, and the build that each points at",
    )
    op.create_index(op.f("ix_releases_build_id"), "releases", ["build_id"], unique=False)
    op.create_table(
        "replays",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("build_id", sa.BigInteger(), nullable=False),
        sa.Column("recordings", sa.Text(), nullable=False, comment="file of recorded outputs"),
        sa.Column("model", sa.Text(), nullable=True, comment="only the outputs of this model; NULL: of all"),
        sa.Column("strategy", sa.Text(), nullable=False, comment="how drafts were made: backoff, longest"),
        sa.Column("budget", sa.Integer(), nullable=False, comment="most nodes of a draft"),
        sa.Column("rows", sa.BigInteger(), nullable=False, comment="outputs replayed"),
        sa.Column(
            "tokens", sa.BigInteger(), nullable=False, comment="tokens that verification passes yielded"
        ),
        sa.Column("passes", sa.BigInteger(), nullable=False, comment="verification passes"),
        sa.Column(
            "accepted_length",
            sa.Double(),
            nullable=False,
            comment="M = tokens / passes; plain decoding is 1.0",
        ),
        sa.Column("nodes_mean", sa.Double(), nullable=False, comment="mean nodes of a draft"),
        sa.Column("miss_rate", sa.Double(), nullable=False, comment="share of passes without a draft"),
        sa.Column(
            "lookup_p50_us", sa.Double(), nullable=False, comment="median duration of a lookup, microseconds"
        ),
        sa.Column("lookup_p99_us", sa.Double(), nullable=False, comment="99th percentile of the same"),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["build_id"], ["builds.id"], name=op.f("fk_replays_build_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replays")),
        comment="accepted lengths of builds on recorded outputs",
    )
    op.create_index(op.f("ix_replays_build_id"), "replays", ["build_id"], unique=False)
    op.create_table(
        "release_moves",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("release", sa.Text(), nullable=False, comment="which release moved"),
        sa.Column(
            "from_build", sa.BigInteger(), nullable=True, comment="id of the build before; NULL for the first"
        ),
        sa.Column(
            "to_build",
            sa.BigInteger(),
            nullable=False,
            comment="id of the build after (it may have been dropped since)",
        ),
        sa.Column("action", sa.Text(), nullable=False, comment="publish, or rollback"),
        sa.Column("moved_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("action IN ('publish', 'rollback')", name=op.f("ck_release_moves_action")),
        sa.ForeignKeyConstraint(["release"], ["releases.name"], name=op.f("fk_release_moves_release")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_release_moves")),
        comment="every move of a release, in the order of id",
    )
    op.create_index(op.f("ix_release_moves_release_id"), "release_moves", ["release", "id"], unique=False)


def downgrade() -> None:
    """Go back to the revision before."""
    for statement in views.drop_statements():
        op.execute(statement)
    op.drop_table("release_moves")
    op.drop_table("replays")
    op.drop_table("releases")
    op.drop_table("ngram_spectrum")
    op.drop_table("builds")
    op.drop_table("trees")
    op.drop_table("ngrams")
    op.drop_table("kept_ngrams")
    op.drop_table("corpora")
