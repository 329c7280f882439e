"""Location of the catalogue and of the flows' builds: `DRAFTSTORE_HOME`."""

import os
from pathlib import Path

from draftstore.errors import DraftstoreError

HOME_VARIABLE = "DRAFTSTORE_HOME"
ROOT_HOME = Path("/var/lib/draftstore")


def data_home() -> Path:
    """Return the data folder, which need not exist yet: `DRAFTSTORE_HOME`, or the default.

    The default is /var/lib/draftstore for root, and draftstore under `XDG_DATA_HOME` (~/.local/share) for other users.
    """
    if named := os.environ.get(HOME_VARIABLE):
        home = Path(named).expanduser().resolve()
        if home.exists() and not home.is_dir():
            raise DraftstoreError(f"{HOME_VARIABLE}={named} is not a folder: name a folder, or unset it")
        return home
    if os.geteuid() == 0:
        return ROOT_HOME
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return (Path(data).expanduser() / "draftstore").resolve()
