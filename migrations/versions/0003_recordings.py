"""Recordings that are replayed before a release moves, and the accepted lengths of each move.

Revision ID: 0003
Revises: 0002
Create Date: 2026-11-23
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from schema import views

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

VIEWS = "b01e92d287b1b744"


def upgrade() -> None:
    """Go to this revision; env.py makes the views again at the newest one."""
    for statement in views.drop_statements():
        op.execute(statement)
    op.create_table(
        "recordings",
        sa.Column("name", sa.Text(), nullable=False, comment="for people, and in verdicts"),
        sa.Column(
            "path",
            sa.Text(),
            nullable=False,
            comment="file of recorded outputs, JSON Lines, on the machine that publishes",
        ),
        sa.Column(
            "releases",
            postgresql.ARRAY(sa.Text()),
            nullable=False,
            comment="releases that it is replayed for, existing or not",
        ),
        sa.Column("model", sa.Text(), nullable=True, comment="only the outputs of this model; NULL: of all"),
        sa.Column(
            "request", sa.Boolean(), nullable=False, comment="whether the request drafts beside the store"
        ),
        sa.Column("rows", sa.Integer(), nullable=True, comment="at most so many outputs; NULL: all"),
        sa.Column("budget", sa.Integer(), nullable=False, comment="most nodes of a draft"),
        sa.Column(
            "tolerance",
            sa.Double(),
            nullable=False,
            comment="share of the live build's accepted length that a new one may lose: 0.02",
        ),
        sa.Column(
            "slowdown",
            sa.Double(),
            nullable=False,
            comment="so many times the live build's p99 of a lookup may a new one's be: 1.5",
        ),
        sa.Column("max_bytes", sa.BigInteger(), nullable=True, comment="most bytes of a store; NULL: any"),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("budget > 0 AND rows > 0 AND max_bytes > 0", name=op.f("ck_recordings_counts")),
        sa.CheckConstraint(
            "tolerance >= 0 AND tolerance < 1 AND slowdown >= 1", name=op.f("ck_recordings_tolerances")
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_recordings")),
        comment="recorded outputs that are replayed before a release moves, and what is asked of a new build",
    )
    op.add_column(
        "replays",
        sa.Column(
            "recording",
            sa.Text(),
            nullable=True,
            comment="name in recordings, where a gate replayed it; NULL: draftstore replay --record",
        ),
    )
    op.add_column(
        "release_moves",
        sa.Column(
            "lengths",
            postgresql.JSONB(),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="accepted length M of the build after, by registered recording, as measured when it was published",
        ),
    )


def downgrade() -> None:
    """Go back to the revision before."""
    for statement in views.drop_statements():
        op.execute(statement)
    op.drop_column("release_moves", "lengths")
    op.drop_column("replays", "recording")
    op.drop_table("recordings")
