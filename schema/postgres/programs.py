"""Running PostgreSQL's programs under the server's account, from the wheel or a copy of it."""

import ctypes
import os
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from schema.postgres.plan import MAJOR, ClusterError, ClusterPlan

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Make a new child of `parent` end with it. Call after a change of user, which resets this."""
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # a job that a script puts in the background ignores both
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGQUIT, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent has already ended


def launch(plan: ClusterPlan, arguments: list[str], keep: int, **options: Any) -> subprocess.Popen[bytes]:
    """Start a server program under its account; it inherits the descriptor `keep` and ends with this process."""
    if plan.switches_user:
        options |= {"user": plan.uid, "group": plan.gid, "extra_groups": []}
    try:
        return subprocess.Popen(  # noqa: S603 - our own arguments
            arguments,
            pass_fds=(keep,),
            preexec_fn=partial(die_with_parent, os.getpid()),
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            **{"stdin": subprocess.DEVNULL, **options},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ClusterError(f"{arguments[0]} cannot be run under user id {plan.uid}: {error}") from None


def run(plan: ClusterPlan, arguments: list[str], keep: int, given: bytes = b"") -> tuple[int, str]:
    """Run a server program to its end; return its exit status and output."""
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with launch(plan, arguments, keep, **streams) as program:
        printed, _ = program.communicate(given)
    return program.returncode, printed.decode(errors="replace").strip()


def usable_binaries(plan: ClusterPlan, keep: int) -> Path:
    """Return a folder of binaries that the server's account can run: the wheel's, or a copy, made once per wheel."""
    binaries = Path(plan.binaries)
    if not plan.switches_user or _runs(plan, binaries, keep):
        return binaries
    stamp = int((binaries / "bin" / "postgres").stat().st_mtime)
    folder = Path(plan.base) / f"binaries-{MAJOR}-{stamp}"
    copied = folder / binaries.parent.name / binaries.name
    if not folder.is_dir():
        _copy_binaries(binaries, folder)
    if not _runs(plan, copied, keep):
        _, printed = run(plan, [str(copied / "bin" / "postgres"), "--version"], keep)
        raise ClusterError(f"{copied}/bin/postgres does not run under user id {plan.uid}: {printed}")
    return copied


def _runs(plan: ClusterPlan, binaries: Path, keep: int) -> bool:
    """Return True if the account can run the server and read its files."""
    check = 'test -r "$1/share/postgresql/postgres.bki" && exec "$1/bin/postgres" --version'
    try:
        return run(plan, ["/bin/sh", "-c", check, "sh", str(binaries)], keep)[0] == 0
    except ClusterError:
        return False


def _copy_binaries(binaries: Path, folder: Path) -> None:
    """Copy the files of a server, keeping the libraries' relative paths."""
    for old in folder.parent.glob("binaries-*"):
        shutil.rmtree(old)
    unfinished = folder.with_name("binaries-unfinished")
    package = unfinished / binaries.parent.name
    for part in ("lib", "share"):
        shutil.copytree(
            binaries / part, package / binaries.name / part, ignore=shutil.ignore_patterns("*.a", "pgxs")
        )
    (package / binaries.name / "bin").mkdir()
    for program in ("initdb", "postgres"):
        shutil.copy(binaries / "bin" / program, package / binaries.name / "bin")
    libraries = binaries.parent.parent / f"{binaries.parent.name}.libs"
    if libraries.is_dir():
        shutil.copytree(libraries, unfinished / libraries.name)
    for path in [unfinished, *unfinished.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755)
    unfinished.rename(folder)
