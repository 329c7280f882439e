"""Where the catalogue and what the flows build live: `DRAFTSTORE_HOME`."""

import os
from pathlib import Path

HOME_VARIABLE = "DRAFTSTORE_HOME"
ROOT_HOME = Path("/var/lib/draftstore")


def data_home() -> Path:
    """Return the data folder, which need not exist yet.

    It is `DRAFTSTORE_HOME`; where that is unset, /var/lib/draftstore for root, and for others draftstore under
    `XDG_DATA_HOME` (by default ~/.local/share).
    """
    if named := os.environ.get(HOME_VARIABLE):
        return Path(named).expanduser().resolve()
    if os.geteuid() == 0:
        return ROOT_HOME
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return (Path(data).expanduser() / "draftstore").resolve()
