"""Live logs are sources of collections.

Revision ID: 0005
Revises: 0004
Create Date: 2026-11-25
"""

from alembic import op

from schema import views

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

VIEWS = "b01e92d287b1b744"

KINDS = """
ALTER TABLE collection_sources
    DROP CONSTRAINT ck_collection_sources_kind,
    ADD CONSTRAINT ck_collection_sources_kind CHECK (kind IN ({}))
"""


def upgrade() -> None:
    """Upgrade to this revision; env.py recreates views and comments at the newest one."""
    for statement in views.drop_statements():
        op.execute(statement)
    op.execute(KINDS.format("'files', 'live', 'log', 'url'"))


def downgrade() -> None:
    """Downgrade to the previous revision, without such sources."""
    for statement in views.drop_statements():
        op.execute(statement)
    op.execute("DELETE FROM collection_sources WHERE kind = 'live'")
    op.execute(KINDS.format("'files', 'log', 'url'"))
