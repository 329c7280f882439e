"""The catalogue: all tables. Replaces earlier revisions, which belonged to versions before 0.1.0.

Revision ID: 0004
Revises: nothing
Create Date: 2026-11-24
"""

from alembic import op

from schema import views

revision = "0004"
down_revision = None
branch_labels = None
depends_on = None

VIEWS = "b01e92d287b1b744"

TABLES = r"""
CREATE TABLE corpora (
    id bigint GENERATED ALWAYS AS IDENTITY,
    name text NOT NULL,
    sources text[] DEFAULT '{}' NOT NULL,
    fingerprint text NOT NULL,
    tokenizer text NOT NULL,
    tokenizer_fingerprint text NOT NULL,
    documents bigint NOT NULL,
    tokens bigint NOT NULL,
    characters bigint,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT pk_corpora PRIMARY KEY (id),
    CONSTRAINT uq_corpora_fingerprint_tokenizer_fingerprint UNIQUE (fingerprint, tokenizer_fingerprint)
);

CREATE TABLE builds (
    id bigint GENERATED ALWAYS AS IDENTITY,
    kind text NOT NULL,
    name text NOT NULL,
    state text DEFAULT 'running' NOT NULL,
    corpus_id bigint CONSTRAINT fk_builds_corpus_id REFERENCES corpora (id),
    source_id bigint,
    path text NOT NULL,
    digest text,
    backends text[] DEFAULT '{}' NOT NULL,
    parameters jsonb DEFAULT '{}' NOT NULL,
    manifest jsonb,
    size_bytes bigint,
    timings jsonb DEFAULT '{}' NOT NULL,
    started_at timestamptz DEFAULT now() NOT NULL,
    finished_at timestamptz,
    error text,
    CONSTRAINT pk_builds PRIMARY KEY (id),
    CONSTRAINT uq_builds_path_digest UNIQUE (path, digest),
    CONSTRAINT fk_builds_source_id FOREIGN KEY (source_id) REFERENCES builds (id) ON DELETE SET NULL,
    CONSTRAINT ck_builds_kind CHECK (kind IN ('tokens', 'ngrams', 'rest', 'crest', 'dresd', 'recycling')),
    CONSTRAINT ck_builds_state CHECK (state IN ('running', 'finished', 'failed')),
    CONSTRAINT ck_builds_finished CHECK (state <> 'finished' OR (digest IS NOT NULL AND manifest IS NOT NULL
        AND size_bytes IS NOT NULL AND finished_at IS NOT NULL)),
    CONSTRAINT ck_builds_failed CHECK (state <> 'failed' OR (error IS NOT NULL AND finished_at IS NOT NULL))
);
CREATE INDEX ix_builds_corpus_id ON builds (corpus_id);
CREATE INDEX ix_builds_digest ON builds (digest);
CREATE INDEX ix_builds_source_id ON builds (source_id);

CREATE TABLE releases (
    name text NOT NULL,
    build_id bigint NOT NULL CONSTRAINT fk_releases_build_id REFERENCES builds (id),
    moved_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT pk_releases PRIMARY KEY (name),
    CONSTRAINT ck_releases_name CHECK (name ~ '^[A-Za-z0-9][A-Za-z0-9._-]*$')
);
CREATE INDEX ix_releases_build_id ON releases (build_id);

CREATE TABLE release_moves (
    id bigint GENERATED ALWAYS AS IDENTITY,
    release text NOT NULL CONSTRAINT fk_release_moves_release REFERENCES releases (name),
    from_build bigint,
    to_build bigint NOT NULL,
    action text NOT NULL,
    moved_at timestamptz DEFAULT now() NOT NULL,
    lengths jsonb DEFAULT '{}' NOT NULL,
    CONSTRAINT pk_release_moves PRIMARY KEY (id),
    CONSTRAINT ck_release_moves_action CHECK (action IN ('publish', 'rollback'))
);
CREATE INDEX ix_release_moves_release_id ON release_moves (release, id);

CREATE TABLE recordings (
    name text NOT NULL,
    path text NOT NULL,
    releases text[] NOT NULL,
    model text,
    request boolean NOT NULL,
    rows integer,
    budget integer NOT NULL,
    tolerance double precision NOT NULL,
    slowdown double precision NOT NULL,
    max_bytes bigint,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT pk_recordings PRIMARY KEY (name),
    CONSTRAINT ck_recordings_counts CHECK (budget > 0 AND rows > 0 AND max_bytes > 0),
    CONSTRAINT ck_recordings_tolerances CHECK (tolerance >= 0 AND tolerance < 1 AND slowdown >= 1)
);

CREATE TABLE replays (
    id bigint GENERATED ALWAYS AS IDENTITY,
    build_id bigint NOT NULL CONSTRAINT fk_replays_build_id REFERENCES builds (id) ON DELETE CASCADE,
    recordings text NOT NULL,
    model text,
    strategy text NOT NULL,
    budget integer NOT NULL,
    rows bigint NOT NULL,
    tokens bigint NOT NULL,
    passes bigint NOT NULL,
    accepted_length double precision NOT NULL,
    nodes_mean double precision NOT NULL,
    miss_rate double precision NOT NULL,
    lookup_p50_us double precision NOT NULL,
    lookup_p99_us double precision NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    recording text,
    CONSTRAINT pk_replays PRIMARY KEY (id)
);
CREATE INDEX ix_replays_build_id ON replays (build_id);

CREATE TABLE ngrams (
    build_id bigint NOT NULL,
    n smallint NOT NULL,
    rank integer NOT NULL,
    tokens integer[] NOT NULL,
    text text COLLATE "C" NOT NULL,
    count bigint NOT NULL,
    CONSTRAINT pk_ngrams PRIMARY KEY (build_id, n, rank)
) PARTITION BY LIST (build_id);
CREATE INDEX ix_ngrams_count ON ngrams (count);
CREATE INDEX ix_ngrams_text ON ngrams (text);

CREATE TABLE ngram_spectrum (
    build_id bigint NOT NULL CONSTRAINT fk_ngram_spectrum_build_id REFERENCES builds (id) ON DELETE CASCADE,
    n smallint NOT NULL,
    count bigint NOT NULL,
    ngrams bigint NOT NULL,
    CONSTRAINT pk_ngram_spectrum PRIMARY KEY (build_id, n, count)
);

CREATE TABLE kept_ngrams (
    build_id bigint NOT NULL,
    rank integer NOT NULL,
    n smallint NOT NULL,
    tokens integer[] NOT NULL,
    text text COLLATE "C" NOT NULL,
    count bigint NOT NULL,
    nodes smallint NOT NULL,
    raw_bytes integer NOT NULL,
    bytes integer NOT NULL,
    tree text,
    CONSTRAINT pk_kept_ngrams PRIMARY KEY (build_id, rank)
) PARTITION BY LIST (build_id);
CREATE INDEX ix_kept_ngrams_text ON kept_ngrams (text);

CREATE TABLE trees (
    build_id bigint NOT NULL,
    key bytea NOT NULL,
    value bytea NOT NULL,
    CONSTRAINT pk_trees PRIMARY KEY (build_id, key)
) PARTITION BY LIST (build_id);

CREATE TABLE collections (
    id bigint GENERATED ALWAYS AS IDENTITY,
    name text NOT NULL,
    tokenizer text,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT pk_collections PRIMARY KEY (id),
    CONSTRAINT uq_collections_name UNIQUE (name),
    CONSTRAINT ck_collections_name CHECK (name ~ '^[A-Za-z0-9][A-Za-z0-9._-]*$')
);

CREATE TABLE collection_sources (
    id bigint GENERATED ALWAYS AS IDENTITY,
    collection_id bigint NOT NULL
        CONSTRAINT fk_collection_sources_collection_id REFERENCES collections (id) ON DELETE CASCADE,
    kind text NOT NULL,
    place text NOT NULL,
    column_name text DEFAULT 'text' NOT NULL,
    globs text[] DEFAULT '{}' NOT NULL,
    licence text,
    retention interval,
    max_bytes bigint,
    first_out text DEFAULT 'oldest' NOT NULL,
    added_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT pk_collection_sources PRIMARY KEY (id),
    CONSTRAINT uq_collection_sources_collection_id_place UNIQUE (collection_id, place),
    CONSTRAINT ck_collection_sources_kind CHECK (kind IN ('files', 'log', 'url')),
    CONSTRAINT ck_collection_sources_first_out CHECK (first_out IN ('oldest', 'largest')),
    CONSTRAINT ck_collection_sources_max_bytes CHECK (max_bytes > 0),
    CONSTRAINT ck_collection_sources_retention CHECK (retention > interval '0')
);

CREATE TABLE collection_removals (
    id bigint GENERATED ALWAYS AS IDENTITY,
    collection_id bigint NOT NULL
        CONSTRAINT fk_collection_removals_collection_id REFERENCES collections (id) ON DELETE CASCADE,
    rule jsonb NOT NULL,
    digests bytea NOT NULL,
    documents bigint NOT NULL,
    reason text,
    created_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT pk_collection_removals PRIMARY KEY (id),
    CONSTRAINT ck_collection_removals_digests CHECK (octet_length(digests) % 16 = 0)
);
CREATE INDEX ix_collection_removals_collection_id ON collection_removals (collection_id);
"""


def upgrade() -> None:
    """Create all tables; env.py creates views and comments at the newest revision."""
    op.execute(TABLES)


def downgrade() -> None:
    """Drop all tables with their content."""
    for statement in views.drop_statements():
        op.execute(statement)
    op.execute(
        "DROP TABLE collection_removals, collection_sources, collections, trees, kept_ngrams, ngram_spectrum, ngrams, "
        "replays, recordings, release_moves, releases, builds, corpora"
    )
