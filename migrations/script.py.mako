"""${message}.

Revision ID: ${up_revision}
Revises: ${down_revision | comma,n}
Create Date: ${create_date}
"""

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
from schema import views

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None

DEFINITIONS = ""  # tests/unit/schema/test_migrations.py says which


def upgrade() -> None:
    """Upgrade to this revision; env.py recreates the views at the newest one."""
    for statement in views.drop_statements():
        op.execute(statement)
    ${upgrades if upgrades else "pass"}
