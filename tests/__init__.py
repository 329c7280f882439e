"""Tests of draftstore: `unit` mirrors the rooms, `process` runs real processes, `journey` runs user workflows."""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The checkout."""

# Tests run side by side: the threads of one test's matrix products would wait for those of another's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
