"""The catalogue as `migrations/env.py` creates it from the models. Earlier revisions belonged to versions before 0.1.0.

Revision ID: 0006
Revises: nothing
Create Date: 2026-11-26
"""

revision = "0006"
down_revision = None
branch_labels = None
depends_on = None

DEFINITIONS = "6746e58e9bae3c91"
