"""The real embedded server: sharing, shutdown, crashes and location."""

import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from draftstore.errors import MissingExtraError
from schema.db import embedded
from schema.db.embedded import Cluster, find_cluster, join, leave, stop
from schema.db.errors import DatabaseError
from tests.fakes.servers import reachable_folder
from tests.fakes.waiting import SECONDS, is_alive, until

ROOT = os.geteuid() == 0
LONG = "long-" * 18
needs_root = pytest.mark.skipif(not ROOT, reason="only root runs the server under another account")

CLIENT = """
import os, sys, psycopg
from pathlib import Path
from schema.db.embedded import join
join(Path(sys.argv[1]))
if sys.argv[2] == "fork" and os.fork():
    os._exit(0)
print("ready", flush=True)
for line in sys.stdin:
    with psycopg.connect(join(Path(sys.argv[1])).url, autocommit=True) as connection:
        cursor = connection.execute(line)
        answer = cursor.fetchone()[0] if cursor.description else None
    del connection, cursor  # an interrupt while they end might be ignored
    print(answer, flush=True)
"""


HOLDER = """
import sys
from pathlib import Path
from draftstore.storage.locks import lock
with lock(Path(sys.argv[1]) / "postgres" / "turn.lock"):
    print("ready", flush=True)
    sys.stdin.read()
"""


class Client:
    """A process that uses the server and runs the SQL that it is given."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert self.process.stdout
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, sql: str) -> str:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(sql + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(SECONDS) == 0


@dataclass
class Home:
    """A data folder, and processes that share its server."""

    path: Path
    stack: ExitStack

    @property
    def cluster(self) -> Cluster:
        return find_cluster(self.path)

    def spawn(self, code: str, how: str = "") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(self.path), how],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/", start_new_session=True,
        )  # fmt: skip
        self.stack.enter_context(process)
        self.stack.callback(process.kill)
        return process

    def client(self, how: str = "") -> Client:
        return Client(self.spawn(CLIENT, how))


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def as_account(name: str) -> dict[str, Any]:
    """Return the options with which root starts a process as another user."""
    account = pwd.getpwnam(name)
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def ask(cluster: Cluster, sql: str) -> Any:
    with psycopg.connect(cluster.url, autocommit=True) as connection:
        row = connection.execute(sql).fetchone()
        return row and row[0]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return an empty folder whose server is stopped at the end."""
    with reachable_folder() as path:
        yield path
        leave()
        if not ROOT or path.stat().st_uid == 0:
            stop(path)


@pytest.fixture
def own(folder: Path) -> Iterator[Home]:
    """Return an empty data folder, and let processes share it."""
    with ExitStack() as stack:
        yield Home(folder, stack)


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """Return a data folder with a cluster, which no test destroys."""
    with reachable_folder() as path:
        ask(join(path), "SELECT 1")
        leave()
        yield path
        stop(path)


def test_the_location_is_logged_once_before_creation(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        join(folder)
        leave()
    assert [str(find_cluster(folder).base) in record.message for record in caplog.records] == [True]


@pytest.fixture
def shared(made: Path) -> Iterator[Home]:
    """Return that data folder, whose server is down."""
    with ExitStack() as stack:
        yield Home(made, stack)
    leave()
    stop(made)


# Sharing and ending


def test_two_first_processes_share_one_server_that_stops_with_the_last(own: Home) -> None:
    processes = [own.spawn(CLIENT) for _ in range(2)]
    first, second = map(Client, processes)
    state = own.cluster.state()
    assert (state.status, state.used, state.kept) == ("ready", True, False)
    assert first.ask("CREATE TABLE notes AS SELECT 42 AS number") == "None"
    assert second.ask("SELECT number FROM notes") == "42"
    first.end()
    assert own.cluster.state() == state
    second.end()
    assert own.cluster.state().status == "stopped"
    assert not is_alive(state.pid or 0)


def test_a_killed_process_leaves_the_server_to_the_next(shared: Home) -> None:
    client, other = shared.client(), shared.client()
    client.ask("CREATE TABLE IF NOT EXISTS notes AS SELECT 42 AS number")
    os.killpg(client.process.pid, signal.SIGINT)  # at its terminal
    client.process.wait(SECONDS)
    assert other.ask("SELECT number FROM notes") == "42"
    other.process.kill()
    other.process.wait(SECONDS)
    state = shared.cluster.state()
    assert (state.status, state.used) == ("ready", False)
    again = shared.client()
    assert again.ask("SELECT number FROM notes") == "42"
    assert shared.cluster.state().pid == state.pid
    again.end()
    assert shared.cluster.state().status == "stopped"


def test_users_restart_a_killed_server(shared: Home) -> None:
    client = shared.client()
    client.ask("CREATE TABLE IF NOT EXISTS notes AS SELECT 42 AS number")
    pid = shared.cluster.state().pid
    assert pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: shared.cluster.state().status == "stopped")
    # The machine has started anew, and the server's process id belongs to something else of the same account.
    account = as_account("postgres") if ROOT else {}
    with subprocess.Popen(["sleep", "600"], **account) as other:
        pid_file = shared.cluster.base / "data" / "postmaster.pid"
        pid_file.write_text(pid_file.read_text().replace(str(pid), str(other.pid), 1))
        assert client.ask("SELECT number FROM notes") == "42"
        other.kill()


def test_a_forked_process_uses_the_server_after_its_parent_has_ended(shared: Home) -> None:
    client = shared.client("fork")
    assert client.process.wait(SECONDS) == 0
    assert client.ask("SELECT 7") == "7"
    assert client.process.stdin
    client.process.stdin.close()
    until(lambda: shared.cluster.state().status == "stopped")


def test_a_kept_server_stays_until_it_is_stopped_even_if_it_is_used(shared: Home) -> None:
    assert not stop(shared.path)
    pid = join(shared.path, keep=True).state().pid
    leave()
    client = shared.client()
    client.end()
    state = shared.cluster.state()
    assert (state.pid, state.used, state.kept) == (pid, False, True)
    client = shared.client()
    assert stop(shared.path)
    assert shared.cluster.state().status == "stopped"
    assert client.ask("SELECT 1") == "1"


def test_a_living_server_is_used_and_stopped_without_its_lock_files(shared: Home) -> None:
    pid = join(shared.path, keep=True).state().pid
    leave()
    for _ in range(2):
        for name in ("turn.lock", "clients.lock", "server.lock"):
            (shared.cluster.base / name).unlink()
        assert shared.cluster.state().status == "ready"
        client = shared.client()
        assert client.ask("SELECT 1") == "1"
        client.end()
        assert shared.cluster.state().pid == pid
    for name in ("turn.lock", "clients.lock", "server.lock"):
        (shared.cluster.base / name).unlink()
    assert stop(shared.path)
    until(
        lambda: not is_alive(pid or 0)
    )  # it has removed its process id; without the lock nobody sees its end
    assert shared.client().ask("SELECT 1") == "1"


def test_waiting_processes_name_the_lock_holder(
    shared: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(embedded, "NOTICE_SECONDS", 0.2)
    join(shared.path)
    leave()
    holder = shared.spawn(HOLDER)
    assert holder.stdout
    assert holder.stdout.readline() == "ready\n"
    os.kill(holder.pid, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(join, shared.path)
        until(
            lambda: f"waiting for process {holder.pid} ('{sys.executable} -c \\nimport sys\\n" in caplog.text
        )
        assert not joined.done()
        holder.kill()
        assert joined.result(SECONDS).state().status == "ready"


def test_a_killed_creation_is_repeated(own: Home) -> None:
    unfinished = own.path / "postgres" / "data.unfinished"
    (unfinished / "global").mkdir(parents=True)
    assert own.client().ask("SELECT 1") == "1"
    assert not unfinished.exists()


# What kind of server


def test_the_server_is_durable_local_and_speaks_utf8(shared: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PGPORT": "1", "PGHOST": "nowhere", "PGDATABASE": "x", "PGUSER": "y"}.items():
        monkeypatch.setenv(name, value)
    cluster = join(shared.path)
    for name in ("fsync", "full_page_writes", "synchronous_commit", "data_checksums"):
        assert ask(cluster, f"SHOW {name}") == "on", name
    for name, value in {"listen_addresses": "", "server_encoding": "UTF8", "timezone": "UTC"}.items():
        assert ask(cluster, f"SHOW {name}") == value, name
    provider = "SELECT datlocprovider::text || datlocale FROM pg_database WHERE datname = 'draftstore'"
    assert ask(cluster, provider) == "bC.UTF-8"
    assert ask(cluster, "SELECT current_user") == "draftstore"
    assert cluster.sockets.stat().st_mode & 0o777 == 0o700  # other users cannot connect


# Where it lies


@pytest.mark.parametrize("name", [f"{LONG}/{LONG}", "odd, 'name' ü%41$(id)/\udcff"], ids=["long", "odd"])
def test_a_long_or_odd_path_gets_a_short_private_socket(folder: Path, name: str) -> None:
    cluster = join(folder / name)
    assert ask(cluster, "SELECT 1") == 1
    assert len(str(cluster.sockets)) < 40
    assert cluster.sockets.stat().st_mode & 0o777 == 0o700
    leave()
    cluster.sockets.rmdir()
    cluster.sockets.symlink_to(folder)  # somebody else comes first
    with pytest.raises(DatabaseError, match="is not a private folder"):
        join(folder / name)
    cluster.sockets.unlink()


@needs_root
def test_for_root_the_cluster_is_elsewhere_if_the_account_cannot_reach_the_home(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "ROOT_FALLBACK", folder / "aside")
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    with umask(0o077):
        cluster = join(closed / "home")
        other = join(folder / "private")
    for base in (cluster.base, other.base):
        assert base.is_relative_to(folder / "aside")
    assert Path(f"/proc/{cluster.state().pid}").owner() == "postgres"
    assert list((closed / "home").iterdir()) == []
    assert (folder / "private").stat().st_mode & 0o777 == 0o700
    assert closed.stat().st_mode & 0o777 == 0o700
    closed.chmod(0o755)
    assert find_cluster(closed / "home") == cluster
    leave()


@needs_root
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_ordinary_user_runs_the_server_alone(folder: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    child = os.fork()  # since other users may not run this Python
    if child == 0:
        os.setgroups([])
        os.setgid(nobody.pw_gid)
        os.setuid(nobody.pw_uid)
        owner = Path(f"/proc/{join(folder).state().pid}").owner()
        found = ask(find_cluster(folder), "SELECT current_user")
        leave()
        os._exit(
            (owner, found) != ("nobody", "draftstore") or find_cluster(folder).state().status != "stopped"
        )
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(DatabaseError, match=rf"belongs to user id {nobody.pw_uid}, not to this user"):
        join(folder)


def test_unusable_folders_are_refused_and_status_creates_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = find_cluster(folder)
    assert (cluster.base, cluster.state().status) == (folder / "postgres", "stopped")
    assert list(folder.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(embedded, "WHEEL", "no_such_wheel")
        with pytest.raises(MissingExtraError, match=r"draftstore\[schema\]"):
            join(folder)
    if ROOT:
        with monkeypatch.context() as patch:
            patch.setattr(embedded, "ACCOUNTS", ("no-such-account",))
            with pytest.raises(DatabaseError, match="no account no-such-account exists here"):
                join(folder)
    version = cluster.base / "data" / "PG_VERSION"
    version.parent.mkdir()
    version.write_text("17\n")
    with pytest.raises(DatabaseError, match=r"was made by PostgreSQL 17, but this is PostgreSQL 18"):
        join(folder)
    assert version.read_text() == "17\n"


def test_a_failed_start_is_explained(shared: Home) -> None:
    control = shared.cluster.base / "data" / "global" / "pg_control"
    control.rename(control.with_name("aside"))
    with pytest.raises(DatabaseError, match=r"could not (find the database system|open file)"):
        join(shared.path)
    control.with_name("aside").rename(control)
