"""Directories of the flows' builds: one for each content, never that of a live store.

    DRAFTSTORE_HOME/corpora/                      the demonstration corpus
    DRAFTSTORE_HOME/stores/NAME/KIND-FINGERPRINT  a store; the fingerprint is of its inputs and parameters

So the same request finds what an earlier run finished, or resumes it; another corpus, option or version of draftstore
gets its own directory beside the old one, which `draftstore catalogue prune` removes once it is no longer needed.
"""

import hashlib
import json
from pathlib import Path

import draftstore
from draftstore.storage.manifest import FORMAT_VERSION

DIGITS = 16


def store_path(home: Path, kind: str, name: str, **made_of: object) -> Path:
    """Return the directory of a store under `home`; `made_of` determines its content, JSON values."""
    ingredients = [kind, FORMAT_VERSION, draftstore.__version__, made_of]
    digest = hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()
    return home / "stores" / name / f"{kind}-{digest[:DIGITS]}"
