"""The embedded server, real everywhere: who shares it, how it ends, what it survives, where it lies.

As root every test of its life runs twice: as root, where another account runs the server, and as an ordinary user.
"""

import fcntl
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from site import getsitepackages
from typing import Any
from urllib.parse import unquote

import psycopg
import pytest

from draftstore.errors import MissingExtraError
from schema import embedded
from schema.embedded import acquire, keep, stop
from schema.errors import EmbeddedServerError
from schema.postgres import placement
from schema.postgres import supervisor as supervisor_module
from schema.postgres.placement import find_binaries, find_place, make_place
from schema.postgres.plan import LOG, SERVER_LOCK, ClusterPlan
from schema.postgres.state import ServerState, server_state, try_lock
from tests.fakes.waiting import SECONDS, in_threads, is_alive, until

ROOT = os.geteuid() == 0
USERS = ["root", "nobody"] if ROOT else ["user"]
MEMORY = Path("/dev/shm")  # much faster to fill and to empty than a disk that others use
LONG = "long-" * 18
needs_root = pytest.mark.skipif(not ROOT, reason="only root runs the server under another account")

ACQUIRE = (
    "import sys; from pathlib import Path; from schema.embedded import acquire; acquire(Path(sys.argv[1]))"
)
CLIENT = """
import sys, psycopg
from pathlib import Path
from schema.embedded import acquire
lease = acquire(Path(sys.argv[1]))
print("ready", lease.url, flush=True)
for line in sys.stdin:
    with psycopg.connect(lease.ensure(), autocommit=True) as connection:
        cursor = connection.execute(line)
        print(cursor.fetchone()[0] if cursor.description else None, flush=True)
"""
SECOND_LONGER = """
import os, sys, time, psycopg
from pathlib import Path
from schema.embedded import acquire
lease = acquire(Path(sys.argv[1]))
if os.fork():
    print("ready", lease.url, flush=True)
    sys.exit()
while not Path(sys.argv[1], "go").exists():
    time.sleep(0.01)
with psycopg.connect(lease.url) as connection:
    Path(sys.argv[1], "seen").write_text(str(connection.execute("SELECT 7").fetchone()[0]))
"""
IN_AND_OUT = """
import random, sys, time, psycopg
from pathlib import Path
from schema.embedded import acquire
for turn in range(6):
    with acquire(Path(sys.argv[1])) as lease, psycopg.connect(lease.url) as connection:
        connection.execute("INSERT INTO visits VALUES (1)")
    time.sleep(random.random() * 0.3)
print("ready", flush=True)
"""


LAUNCH = """
import os, signal, sys
from schema.postgres.plan import ClusterPlan
from schema.postgres.programs import launch
signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # as a shell does for what a script puts in the background
plan = ClusterPlan("/", "/", "", os.geteuid(), os.getegid(), 0)
program = launch(plan, ["/bin/sleep", "600"], 0)
print(program.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@dataclass
class Home:
    """A data folder, and the user whose processes share its server."""

    path: Path
    user: str
    python: "Python"
    stack: ExitStack

    @property
    def base(self) -> Path:
        return self.path / "postgres"

    @property
    def state(self) -> ServerState:
        return server_state(self.base)

    def spawn(self, code: str) -> subprocess.Popen[str]:
        """Start a process of the user."""
        options = as_account("nobody") if self.user == "nobody" else {}
        process = subprocess.Popen(
            [self.python.path, "-c", code, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**self.python.environment, "PYTHONWARNINGS": "error"},
            **options,
        )
        self.stack.enter_context(process)
        self.stack.callback(process.kill)
        return process

    def client(self) -> "Client":
        return Client(self.spawn(CLIENT))

    def wait_end(self, *pids: int | None) -> None:
        """Wait until these processes have ended, and every other one of the server too."""
        until(lambda: not any(is_alive(pid) for pid in pids if pid))
        until(lambda: is_free(self.base / SERVER_LOCK))
        assert self.state.status == "stopped"


class Client:
    """A process that holds a lease and runs the SQL that it is given."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    @property
    def url(self) -> str:
        """Wait until it holds its lease, and return the URL."""
        assert self.process.stdout
        ready, _, url = self.process.stdout.readline().partition(" ")
        assert ready == "ready"
        return url.strip()

    def ask(self, sql: str) -> str:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(sql + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self, how: str = "return") -> None:
        if how == "return":
            assert self.process.stdin
            self.process.stdin.close()
            assert self.process.wait(SECONDS) == 0
        else:
            self.process.send_signal(signal.Signals[how])
            self.process.wait(SECONDS)


@dataclass(frozen=True)
class Python:
    """An interpreter that a user can run, and the environment in which it finds our packages."""

    path: str
    environment: dict[str, str]

    def runs_as(self, name: str) -> bool:
        try:
            done = subprocess.run(
                [self.path, "-c", "import schema.embedded, psycopg"],
                env=self.environment, cwd="/", check=False, capture_output=True, **as_account(name),
            )  # fmt: skip
        except OSError:
            return False
        return done.returncode == 0

    def fails_as(self, account: dict[str, Any], code: str, argument: object) -> str:
        """Run code that fails, and return what it says."""
        done = subprocess.run(
            [self.path, "-c", code, str(argument)],
            env=self.environment, cwd="/", check=False, capture_output=True, text=True, **account,
        )  # fmt: skip
        assert done.returncode == 1
        return str(done.stderr)


NO_LINGER = {"DRAFTSTORE_POSTGRES_LINGER": "0"}
OURS = Python(sys.executable, {**os.environ, **NO_LINGER, "PYTHONDONTWRITEBYTECODE": "1"})


def as_account(name: str) -> dict[str, Any]:
    """Return the options with which root starts a process as another user."""
    account = pwd.getpwnam(name)
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


@pytest.fixture(scope="session")
def python_for_all() -> Iterator[Python]:
    """Return an interpreter that every account can run: ours, or a copy of it that is made of links."""
    if not ROOT:
        pytest.skip("only root can be another user")
    if OURS.runs_as("nobody"):
        yield OURS
        return
    with tempfile.TemporaryDirectory(prefix="draftstore-python-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        library = Path(folder) / "lib"
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        source = Path(sys.base_prefix) / "lib"
        unneeded = shutil.ignore_patterns("site-packages", "test", "idlelib", "tkinter", "config-*")
        shutil.copytree(source / name, library / name, copy_function=link_or_copy, ignore=unneeded)
        for shared in source.glob("libpython*.so*"):
            link_or_copy(shared, library / shared.name)
        (Path(folder) / "bin").mkdir()
        link_or_copy(Path(sys.executable).resolve(), Path(folder) / "bin" / name)
        packages = os.pathsep.join([str(Path(embedded.__file__).parents[1]), *map(str, getsitepackages())])
        environment = {**OURS.environment, "PYTHONPATH": packages, "LD_LIBRARY_PATH": str(library)}
        copied = Python(f"{folder}/bin/{name}", environment)
        if not copied.runs_as("nobody"):
            pytest.skip("the account nobody can run neither this Python nor a copy of it")
        yield copied


def link_or_copy(source: str | Path, target: str | Path) -> str | Path:
    try:
        os.link(Path(source).resolve(), target)
    except OSError:
        shutil.copy(source, target)
    return target


def is_free(lock: Path) -> bool:
    if (held := try_lock(lock, fcntl.LOCK_SH)) is None:
        return False
    os.close(held)
    return True


def ask(url: str, sql: str) -> Any:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(sql).fetchone()
        return row and row[0]


def permissions(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Return mode and owner of everything in a folder, and of the folders above it."""
    found = {path: path.lstat() for path in (folder, *folder.parents, *folder.rglob("*"))}
    return {path: (stat.st_mode, stat.st_uid, stat.st_gid) for path, stat in found.items()}


@pytest.fixture(autouse=True)
def _no_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NO_LINGER.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return an empty folder, in memory where there is room, whose servers are stopped at the end."""
    with reachable_folder(memory_folder()) as path:
        yield path


@pytest.fixture
def disk_folder() -> Iterator[Path]:
    """Return an empty folder from which programs can be run, whose servers are stopped at the end."""
    with reachable_folder(None) as path:
        yield path


def memory_folder() -> Path | None:
    """Return a folder that is kept in memory, if there is one with room for a few clusters."""
    usable = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2 << 30
    return MEMORY if usable else None


@contextmanager
def reachable_folder(parent: Path | None) -> Iterator[Path]:
    """Make a folder that every account can reach."""
    path = Path(tempfile.mkdtemp(prefix="draftstore-test-", dir=parent))
    path.chmod(0o755)
    yield path
    for state in path.rglob("server.json"):
        if (supervisor := server_state(state.parent).supervisor) is not None:
            with suppress(ProcessLookupError):  # it was about to end
                os.kill(supervisor, signal.SIGTERM)
            until(lambda pid=supervisor: not is_alive(pid))  # type: ignore[misc]
    rmtree(path)


@pytest.fixture(params=USERS)
def home(request: pytest.FixtureRequest, folder: Path) -> Iterator[Home]:
    user = request.param
    python = OURS
    if user == "nobody":
        python = request.getfixturevalue("python_for_all")
        os.chown(folder, *pwd.getpwnam("nobody")[2:4])
    with ExitStack() as stack:
        yield Home(folder, user, python, stack)


# Sharing and ending


def test_two_processes_from_nothing_share_one_server_that_ends_with_the_last(home: Home) -> None:
    first, second = home.client(), home.client()
    assert first.url == second.url
    state = home.state
    assert state.status == "ready"
    assert first.ask("CREATE TABLE notes AS SELECT 42 AS number") == "None"
    assert second.ask("SELECT number FROM notes") == "42"
    expected = "postgres" if home.user == "root" else home.user
    if home.user != "user":
        assert Path(f"/proc/{state.server}").owner() == expected
    assert second.ask("SELECT current_user") == "draftstore"
    first.end()
    time.sleep(0.3)
    assert home.state == state
    second.end()
    home.wait_end(state.server, state.supervisor)


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_the_server_ends_with_a_client_that_is_killed_and_keeps_what_was_committed(
    home: Home, how: str
) -> None:
    client = home.client()
    assert client.url
    client.ask("CREATE TABLE notes AS SELECT 42 AS number")
    state = home.state
    client.end(how)
    home.wait_end(state.server, state.supervisor)
    again = home.client()
    assert again.url
    assert again.ask("SELECT number FROM notes") == "42"


def test_a_killed_supervisor_takes_the_server_with_it_and_the_client_starts_another(home: Home) -> None:
    client = home.client()
    url = client.url
    client.ask("CREATE TABLE notes AS SELECT 42 AS number")
    state = home.state
    assert state.supervisor
    os.kill(state.supervisor, signal.SIGKILL)
    home.wait_end(state.server, state.supervisor)
    assert client.ask("SELECT number FROM notes") == "42"
    assert home.state.url == url
    assert home.state.supervisor != state.supervisor


def test_a_killed_server_is_started_again_for_the_clients_that_are_there(home: Home) -> None:
    client = home.client()
    assert client.url
    client.ask("CREATE TABLE notes AS SELECT 42 AS number")
    state = home.state
    assert state.server
    os.kill(state.server, signal.SIGKILL)
    until(lambda: home.state.server not in (None, state.server))
    assert home.state.supervisor == state.supervisor
    assert client.ask("SELECT number FROM notes") == "42"


def test_a_program_of_a_job_in_the_background_ends_with_its_parent(home: Home) -> None:
    """Before a server is so far that it handles signals itself."""
    launching = home.spawn(LAUNCH)
    assert launching.stdout
    program = int(launching.stdout.readline())
    try:
        until(lambda: not is_alive(program))
    finally:
        with suppress(ProcessLookupError):
            os.kill(program, signal.SIGKILL)


def test_a_server_and_supervisor_killed_together_leave_files_that_the_next_start_sees_through(
    home: Home,
) -> None:
    client = home.client()
    assert client.url
    client.ask("CREATE TABLE notes AS SELECT 42 AS number")
    state = home.state
    assert state.server
    assert state.supervisor
    os.kill(state.supervisor, signal.SIGSTOP)  # it neither ends the server in order nor starts it again
    client.end("SIGKILL")
    os.kill(state.server, signal.SIGKILL)
    os.kill(state.supervisor, signal.SIGKILL)
    home.wait_end(state.server, state.supervisor)
    # The machine has started anew, and the server's process id belongs to something else of the same account.
    other = home.spawn("input()")
    pid_file = home.base / "data" / "postmaster.pid"
    pid_file.write_text(pid_file.read_text().replace(str(state.server), str(other.pid), 1))
    again = home.client()
    assert again.url
    assert again.ask("SELECT number FROM notes") == "42"


def test_a_half_made_cluster_is_made_anew(home: Home) -> None:
    unfinished, whole = home.base / "data.unfinished", home.base / "data"
    for _ in range(20):  # where this process is held up, the cluster may be whole before the signal comes
        client = home.client()
        until(lambda: (unfinished / "global").exists() or whole.exists())
        supervisor = home.state.supervisor
        assert supervisor
        os.kill(supervisor, signal.SIGSTOP)  # the client sees no end, and starts no other
        client.end("SIGKILL")
        os.kill(supervisor, signal.SIGKILL)
        until(lambda: is_free(home.base / SERVER_LOCK))
        if not whole.exists():
            break
        rmtree(home.base)
    assert unfinished.exists()
    again = home.client()
    assert again.url
    assert again.ask("SELECT 1") == "1"
    assert not unfinished.exists()


@pytest.mark.slow
def test_clients_that_come_and_go_at_once_always_find_a_server(home: Home) -> None:
    client = home.client()
    assert client.url
    client.ask("CREATE TABLE visits (one int)")
    client.end()
    visitors = [home.spawn(IN_AND_OUT) for _ in range(4)]
    assert [visitor.wait(SECONDS) for visitor in visitors] == [0] * 4
    home.wait_end()
    last = home.client()
    assert last.url
    assert last.ask("SELECT count(*) FROM visits") == "24"


def test_a_forked_process_holds_the_server_after_its_parent_has_ended(home: Home) -> None:
    parent = home.spawn(SECOND_LONGER)
    assert parent.wait(SECONDS) == 0
    state = home.state
    assert state.status == "ready"
    (home.path / "go").touch()
    seen = home.path / "seen"
    until(lambda: seen.exists() and seen.read_text() == "7")
    home.wait_end(state.server, state.supervisor)


def test_threads_share_one_lock_and_the_last_release_lets_go(folder: Path) -> None:
    leases = []
    in_threads([lambda: leases.append(acquire(folder))] * 8)
    assert len({lease.url for lease in leases}) == 1
    state = server_state(folder / "postgres")
    for lease in leases[1:]:
        lease.release()
        lease.release()
    time.sleep(0.3)
    assert server_state(folder / "postgres") == state
    leases[0].release()
    until(lambda: server_state(folder / "postgres").status == "stopped")
    with pytest.raises(EmbeddedServerError, match="acquire another"):
        leases[0].ensure()


def test_commands_in_a_row_find_the_server_lingering(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSTORE_POSTGRES_LINGER", "600")
    with acquire(folder):
        state = server_state(folder / "postgres")
    time.sleep(0.3)
    with acquire(folder):
        assert server_state(folder / "postgres") == state
    time.sleep(0.3)
    assert server_state(folder / "postgres") == state
    assert stop(folder)
    monkeypatch.setenv("DRAFTSTORE_POSTGRES_LINGER", "0.3")
    acquire(folder).release()
    until(lambda: server_state(folder / "postgres").status == "stopped")
    monkeypatch.setenv("DRAFTSTORE_POSTGRES_LINGER", "soon")
    with pytest.raises(
        EmbeddedServerError, match=r"DRAFTSTORE_POSTGRES_LINGER='soon' is not a number of seconds"
    ):
        acquire(folder)


def test_a_kept_server_stays_without_clients_until_it_is_stopped(folder: Path) -> None:
    assert not stop(folder)
    state = keep(folder)
    assert state.kept
    time.sleep(0.4)
    assert keep(folder) == state == server_state(state.base)
    assert state.url
    assert ask(state.url, "SELECT 1") == 1
    assert stop(folder)
    assert server_state(state.base).status == "stopped"
    assert not stop(folder)


def test_a_server_that_is_stopped_under_its_client_starts_again(folder: Path) -> None:
    with acquire(folder) as lease:
        assert stop(folder)
        assert ask(lease.ensure(), "SELECT 1") == 1


def test_a_server_ends_when_its_folder_is_removed(folder: Path) -> None:
    with acquire(folder):
        state = server_state(folder / "postgres")
        (folder / "postgres").rename(folder / "removed")
        rmtree(folder / "removed", ignore_errors=True)
        assert state.supervisor
        assert state.server
        until(lambda: not is_alive(state.supervisor or 0) and not is_alive(state.server or 0))
        with acquire(folder) as another:
            assert ask(another.url, "SELECT 1") == 1


# What kind of server


def test_the_server_is_durable_local_and_speaks_utf8(folder: Path) -> None:
    expected = {
        "fsync": "on",
        "full_page_writes": "on",
        "synchronous_commit": "on",
        "data_checksums": "on",
        "listen_addresses": "",
        "server_encoding": "UTF8",
        "timezone": "UTC",
        "server_version_num": "18",
    }
    with acquire(folder) as lease:
        for name, value in expected.items():
            assert ask(lease.url, f"SHOW {name}").startswith(value), name
        provider = "SELECT datlocprovider::text || datlocale FROM pg_database WHERE datname = 'draftstore'"
        assert ask(lease.url, provider) == "bC.UTF-8"
        log = folder / "postgres" / LOG
        assert "ready to accept connections" in log.read_text()
        assert log.stat().st_mode & 0o77 == 0


def test_the_ports_and_hosts_of_the_environment_do_not_lead_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PGPORT": "1", "PGHOST": "nowhere", "PGDATABASE": "x", "PGUSER": "y"}.items():
        monkeypatch.setenv(name, value)
    with acquire(folder) as lease:
        assert ask(lease.url, "SELECT current_database()") == "draftstore"


@needs_root
def test_other_users_cannot_connect(folder: Path, python_for_all: Python) -> None:
    code = "import psycopg, sys; psycopg.connect(sys.argv[1])"
    with acquire(folder) as lease:
        assert "Permission denied" in python_for_all.fails_as(as_account("nobody"), code, lease.url)
        assert find_place(folder).uid == pwd.getpwnam("postgres").pw_uid
        assert "Peer authentication failed" in python_for_all.fails_as(
            as_account("postgres"), code, lease.url
        )


def test_the_log_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ClusterPlan(str(folder), "", "", 0, 0, 0.0)
    log = folder / LOG
    log.write_text("old\n")
    supervisor = supervisor_module.ServerSupervisor(plan)
    supervisor.bound_log()
    assert log.read_text() == "old\n"
    monkeypatch.setattr(supervisor_module, "LOG_BYTES", 3)
    supervisor.bound_log()
    assert log.read_text() == ""
    assert log.with_suffix(".log.old").read_text() == "old\n"
    os.close(supervisor.clients)


# Where it lies


@pytest.mark.parametrize("name", [f"{LONG}/{LONG}", "odd, 'name' ü%41/\udcff"], ids=["long", "odd"])
def test_a_long_or_odd_path_gets_a_short_private_socket(home: Home, name: str) -> None:
    home.path = home.path / name
    if home.user == "nobody":
        home.path.parent.mkdir()
        os.chown(home.path.parent, *pwd.getpwnam("nobody")[2:4])
    client = home.client()
    url = client.url
    assert client.ask("SELECT 1") == "1"
    sockets = Path(unquote(url.partition("host=")[2].partition("&")[0]))
    assert len(str(sockets)) < 40
    assert sockets.stat().st_mode & 0o777 == 0o700
    client.end()
    home.wait_end()
    assert not sockets.exists()


@needs_root
def test_root_keeps_its_cluster_aside_where_the_account_cannot_reach_the_home(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "ROOT_FALLBACK", folder / "aside")
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    (closed / "home").mkdir()
    before = permissions(closed)
    accounts = Path("/etc/passwd").read_bytes()
    with acquire(closed / "home") as lease:
        assert f"{folder}/aside/" in lease.url
        with psycopg.connect(lease.url) as connection:
            connection.execute("CREATE TABLE notes AS SELECT 42 AS number")
    assert permissions(closed) == before
    assert Path("/etc/passwd").read_bytes() == accounts
    assert (folder / "aside").stat().st_mode & 0o777 == 0o755
    closed.chmod(0o755)
    with acquire(closed / "home") as lease:
        assert ask(lease.url, "SELECT number FROM notes") == 42


@pytest.mark.slow
@needs_root
def test_root_copies_the_programs_once_where_the_account_cannot_reach_the_wheel(
    disk_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = find_binaries()
    closed = disk_folder / "closed"
    closed.mkdir(mode=0o700)
    for source in (wheel, wheel.parent.with_name(f"{wheel.parent.name}.libs")):
        target = closed / source.relative_to(wheel.parent.parent)
        subprocess.run(["cp", "-r", str(source), str(target)] if target.parent.exists() else
                       ["sh", "-c", f"mkdir -p {target.parent} && cp -r {source} {target}"], check=True)  # fmt: skip
    before = permissions(closed)
    monkeypatch.setattr(embedded, "make_place", Elsewhere(closed / wheel.relative_to(wheel.parent.parent)))
    times = []
    for _ in range(2):
        with acquire(disk_folder) as lease:
            assert ask(lease.url, "SELECT to_regprocedure('plpgsql_call_handler()') IS NOT NULL")
            [copy] = (disk_folder / "postgres").glob("binaries-*")
            times.append(copy.stat().st_mtime_ns)
            server = server_state(disk_folder / "postgres").server
            assert str(copy) in str(Path(f"/proc/{server}/exe").readlink())
        until(lambda: server_state(disk_folder / "postgres").status == "stopped")
    assert times[0] == times[1]
    assert permissions(closed) == before


class Elsewhere:
    """`make_place` of a machine whose wheel is installed elsewhere."""

    def __init__(self, binaries: Path) -> None:
        self.binaries = binaries

    def __call__(self, home: Path) -> Any:
        place = make_place(home)
        binaries = str(self.binaries)

        class Place:
            base = place.base

            def plan(self, linger: float) -> ClusterPlan:
                return ClusterPlan(**{**json.loads(place.plan(linger).to_json()), "binaries": binaries})

        return Place()


@needs_root
def test_the_folder_of_another_user_is_refused(folder: Path, python_for_all: Python) -> None:
    nobody = pwd.getpwnam("nobody")
    (folder / "postgres").mkdir()
    os.chown(folder / "postgres", nobody.pw_uid, nobody.pw_gid)
    with pytest.raises(EmbeddedServerError, match=f"belongs to user id {nobody.pw_uid}, not to this user"):
        acquire(folder)
    (folder / "of-root" / "postgres").mkdir(parents=True)
    said = python_for_all.fails_as(as_account("nobody"), ACQUIRE, folder / "of-root")
    assert "belongs to user id 0, not to this user" in said


@needs_root
def test_a_user_without_a_name_gets_a_sentence(folder: Path, python_for_all: Python) -> None:
    os.chown(folder, 54_321, 54_321)
    said = python_for_all.fails_as({"user": 54_321, "group": 54_321, "extra_groups": []}, ACQUIRE, folder)
    assert "the user id 54321 has no name here" in said


@needs_root
def test_root_without_an_account_gets_a_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "ACCOUNTS", ("no-such-account",))
    with pytest.raises(EmbeddedServerError, match="no account 'no-such-account' exists here"):
        acquire(folder)


def test_a_cluster_of_another_version_is_refused(folder: Path) -> None:
    place = make_place(folder)
    (place.base / "data").mkdir()
    os.chown(place.base / "data", place.uid, place.gid)
    (place.base / "data" / "PG_VERSION").write_text("17\n")
    with pytest.raises(EmbeddedServerError, match=r"was made by PostgreSQL 17, and this is PostgreSQL 18"):
        acquire(folder)
    assert (place.base / "data" / "PG_VERSION").read_text() == "17\n"


def test_a_server_that_cannot_start_says_why(folder: Path) -> None:
    with acquire(folder):
        pass
    until(lambda: server_state(folder / "postgres").status == "stopped")
    (folder / "postgres" / "data" / "global" / "pg_control").unlink()
    with pytest.raises(
        EmbeddedServerError, match=r"could not (find the database system|open file).*server\.log"
    ):
        acquire(folder)


def test_a_missing_wheel_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "WHEEL", "no_such_wheel")
    with pytest.raises(MissingExtraError, match=r"draftstore\[schema\]"):
        acquire(folder)


def test_looking_for_the_place_makes_nothing(folder: Path) -> None:
    assert find_place(folder / "new").base == folder / "new" / "postgres"
    assert server_state(folder / "new" / "postgres") == ServerState(folder / "new" / "postgres")
    assert list(folder.iterdir()) == []
