"""Documents are known by their source records: removals store all their digests, and can be taken back.

Revision ID: 0006
Revises: 0005
Create Date: 2026-11-26
"""

from alembic import op

from schema import views

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

VIEWS = "b01e92d287b1b744"

COLUMNS = {
    "collections": ("identity integer DEFAULT 1 NOT NULL", "vouched jsonb DEFAULT '{}' NOT NULL"),
    "collection_removals": (
        "texts bytea DEFAULT '' NOT NULL",
        "answers bytea DEFAULT '' NOT NULL",
        "restores text",
    ),
}


def upgrade() -> None:
    """Upgrade to this revision; env.py recreates views and comments at the newest one."""
    for statement in views.drop_statements():
        op.execute(statement)
    for table, columns in COLUMNS.items():
        op.execute(f"ALTER TABLE {table} " + ", ".join(f"ADD COLUMN {column}" for column in columns))


def downgrade() -> None:
    """Downgrade to the previous revision, without the digests of collections made since."""
    for statement in views.drop_statements():
        op.execute(statement)
    op.execute("DELETE FROM collections WHERE identity > 1")
    for table, columns in COLUMNS.items():
        op.execute(
            f"ALTER TABLE {table} " + ", ".join(f"DROP COLUMN {column.split()[0]}" for column in columns)
        )
