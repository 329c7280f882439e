"""What must not be left behind: folders, tables and rows that no build needs, and processes."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from schema.database import connect
from schema.home import HOME_VARIABLE
from schema.partitions import PARTITION_NAME

LOCK = re.compile(r"\..+\.lock")


def orphans_of_builds(home: Path) -> dict[str, list[str]]:
    """Return folders that are no finished build, tables of no build, and builds that still run; for after a pruning."""
    with connect() as connection:
        builds = connection.execute("SELECT id, path, state FROM builds").fetchall()
        names = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
        ).fetchall()
    finished = {path for _, path, state in builds if state == "finished"}
    ids = {str(id_) for id_, *_ in builds}
    stores = (home / "stores").resolve()
    found = [
        path for path in stores.glob("*/*") if str(path) not in finished and not LOCK.fullmatch(path.name)
    ]
    return {
        "folders": sorted(str(path.relative_to(stores)) for path in found),
        "finished builds without files": sorted(path for path in finished if not Path(path).is_dir()),
        "tables": sorted(
            name for (name,) in names if PARTITION_NAME.fullmatch(name) and name.rpartition("_")[2] not in ids
        ),
        "running builds": [str(id_) for id_, _, state in builds if state == "running"],
    }


def orphaned_processes(home: Path, known: Sequence[int] = ()) -> list[str]:
    """Return the command lines of processes that work with a data folder, besides this one and known ones."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid in (os.getpid(), *known) or process.status() == psutil.STATUS_ZOMBIE:
                continue
            command = " ".join(process.cmdline())
            if process.environ().get(HOME_VARIABLE) == str(home) or str(home) in command:
                found.append(f"{process.pid}: {command[:200]}")
    return found
