"""Tests of draftstore: `unit` mirrors the rooms, `process` runs real processes, `journey` what users do."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The checkout."""
