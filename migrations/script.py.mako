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

VIEWS = "${__import__("schema.views").views.fingerprint()}"


def upgrade() -> None:
    """Upgrade to this revision; env.py recreates the views at the newest one."""
    for statement in views.drop_statements():
        op.execute(statement)
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """Downgrade to the previous revision."""
    for statement in views.drop_statements():
        op.execute(statement)
    ${downgrades if downgrades else "pass"}
