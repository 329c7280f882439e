"""The reader: tables stay as they are; `schema.database.migrate` makes the role and lets it read them.

Revision ID: 0002
Revises: 0001
Create Date: 2026-11-22
"""

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

VIEWS = "98d70d55d97cab5b"


def upgrade() -> None:
    """Go to this revision; env.py makes the views again at the newest one."""


def downgrade() -> None:
    """Go back to the revision before."""
