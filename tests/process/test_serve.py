import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from numpy.typing import NDArray
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from draftstore.errors import LookupServiceError, WireError
from draftstore.remote import wire
from draftstore.remote.client import RemoteStore
from draftstore.storage.manifest import manifest_digest
from draftstore.stores.registry import open_store
from draftstore.trees.batch import Draft
from schema import catalogue
from schema.database import URL_VARIABLE, migrate
from services.common.addresses import ListenAddress
from services.common.sockets import open_tcp, port_of
from services.lookup.processes.sockets import UnixListener
from services.lookup.settings import LookupSettings
from tests.fakes.certificates import Certificate, make_certificate, needs_openssl
from tests.fakes.databases import new_engine, publish, rollback
from tests.fakes.dense_stores import MODEL, make_dense_store, make_projection, make_states
from tests.fakes.lookups import Caller, contexts_of, failure
from tests.fakes.served import Service, launch, refusal, served, short_folder, wait_for_worker
from tests.fakes.servers import free_port, postgres_server
from tests.fakes.waiting import SECONDS, is_alive, until


def run_tokens(*arguments: object) -> str:
    """Call `draftstore tokens`, and return what it prints."""
    command = [sys.executable, "-m", "draftstore", "tokens", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def as_bytes(drafts: Sequence[Draft]) -> list[tuple[bytes, int, int]]:
    return [(draft.tree.to_bytes(), draft.match_length, draft.match_count) for draft in drafts]


def drafts_of(store: Path, contexts: NDArray[np.int32]) -> list[tuple[bytes, int, int]]:
    """Return what a store drafts in this process."""
    local = open_store(store)
    try:
        return as_bytes(local.drafter().draft(contexts))
    finally:
        local.close()


def answers(service: Service, store: Path) -> None:
    """Check that a service drafts as the store itself does."""
    contexts = contexts_of(store, 9)
    with service.caller() as caller:
        assert as_bytes(caller.draft("small", contexts).drafts) == drafts_of(store, contexts)


# --- settings and sockets ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("localhost", ("localhost", 7781)),
        (":9", ("0.0.0.0", 9)),
        ("[::1]:9", ("::1", 9)),
        ("[::1]", ("::1", 7781)),
        ("::1", ("::1", 7781)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
    ],
)
def test_places_to_listen_at(text: str, expected: tuple[str, int]) -> None:
    assert ListenAddress.parse(text, 7781) == expected


@pytest.mark.parametrize(
    "text", ["127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "http://localhost:80", "a:-1"]
)
def test_what_is_no_place_to_listen_at(text: str) -> None:
    with pytest.raises(LookupServiceError, match="expected HOST:PORT"):
        ListenAddress.parse(text, 7781)


def test_places_are_shown_as_programs_name_them() -> None:
    assert str(ListenAddress("::1", 80)) == "[::1]:80"
    assert str(ListenAddress("0.0.0.0", 80).reached_as) == "127.0.0.1:80"
    assert ListenAddress("127.9.9.9", 1).is_loopback()
    assert not ListenAddress("0.0.0.0", 1).is_loopback()
    with pytest.raises(LookupServiceError, match=r"no-such-host\.invalid:1 is unknown"):
        ListenAddress("no-such-host.invalid", 1).is_loopback()


def test_strangers_need_tokens_or_a_word_that_they_do_not() -> None:
    open_wide = LookupSettings(Path("s"), listen=ListenAddress("0.0.0.0", 0))
    with pytest.raises(LookupServiceError, match=r"--listen 0\.0\.0\.0:0 can be reached from other machines"):
        open_wide.check()
    with pytest.raises(LookupServiceError, match=r"--http 0\.0\.0\.0:0 can be reached"):
        LookupSettings(Path("s"), http=ListenAddress("0.0.0.0", 0)).check()
    LookupSettings(Path("s"), listen=ListenAddress("0.0.0.0", 0), tokens=Path("t")).check()
    LookupSettings(Path("s"), listen=ListenAddress("0.0.0.0", 0), anonymous=True).check()
    LookupSettings(Path("s"), listen=ListenAddress("127.0.0.1", 0)).check()
    with pytest.raises(LookupServiceError, match="contradict"):
        LookupSettings(Path("s"), tokens=Path("t"), anonymous=True).check()


@pytest.mark.parametrize(
    ("given", "budgets"),
    [({}, (4096, 256)), ({"socket_mode": 0o660}, (256, 256)), ({"max_budget": 64}, (64, 64))],
)
def test_long_drafts_are_for_sockets_of_one_user(given: dict[str, Any], budgets: tuple[int, int]) -> None:
    limits = LookupSettings(Path("s"), **given).all_limits
    assert (limits.budget, limits.shared_budget) == budgets


def test_a_socket_is_for_this_user_alone() -> None:
    with short_folder() as folder:
        listener = UnixListener(folder / "new" / "s")
        assert (folder / "new").stat().st_mode & 0o777 == 0o700
        assert listener.path.stat().st_mode & 0o777 == 0o600
        listener.close()
        assert list((folder / "new").iterdir()) == []
        wider = UnixListener(folder / "s", 0o666)
        assert wider.path.stat().st_mode & 0o777 == 0o666
        wider.close()


def test_a_stale_socket_gives_way_and_a_living_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.lookup.processes.sockets.RELEASE_SECONDS", 0.1)
    with short_folder() as folder:
        path = folder / "s"
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
        listener = UnixListener(path)  # nobody answers there
        with pytest.raises(LookupServiceError, match="another lookup service listens"):
            UnixListener(path)
        listener.close()
        with socket.socket(socket.AF_UNIX) as foreign:
            foreign.bind(str(path))
            foreign.listen()
            with pytest.raises(LookupServiceError, match="another lookup service listens"):
                UnixListener(path)
        path.unlink()
        path.write_text("mine")
        with pytest.raises(LookupServiceError, match="is not a socket"):
            UnixListener(path)
        assert path.read_text() == "mine"


def test_a_socket_that_was_taken_over_is_not_removed() -> None:
    with short_folder() as folder:
        listener = UnixListener(folder / "s")
        listener.path.unlink()
        listener.path.write_text("another")
        listener.close()
        assert (folder / "s").read_text() == "another"


def test_sockets_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(LookupServiceError, match="too long"):
        UnixListener(tmp_path / ("x" * 120))
    (tmp_path / "file").write_text("")
    with pytest.raises(LookupServiceError, match="folder of the socket"):
        UnixListener(tmp_path / "file" / "s")


def test_tcp_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.common.sockets.RELEASE_SECONDS", 0.1)
    opened = open_tcp(ListenAddress("localhost", 0), "--http")
    taken = ListenAddress("127.0.0.1", port_of(opened))
    with pytest.raises(LookupServiceError, match=rf"port {taken.port} of 127\.0\.0\.1 is in use.*--http"):
        open_tcp(taken, "--http")
    for listening in opened:
        listening.close()
    with pytest.raises(LookupServiceError, match="address of this machine"):
        open_tcp(ListenAddress("192.0.2.1", 0), "--listen")


# --- the command ---


def test_it_serves_and_stops(small_store: Path, small_crest: Path) -> None:
    stores = ("--store", f"small={small_store}", "--store", f"crest={small_crest}")
    whole = ("--partition", "1/1")
    with served(
        *stores, *whole, "--listen", "127.0.0.1:0", "--workers", "2", "--log-format", "json"
    ) as service:
        started = service.started
        assert [release["partition"] for release in started["releases"]] == [None, "1/1"], (
            "CREST has no parts"
        )
        assert [release["name"] for release in started["releases"]] == ["crest", "small"]
        assert started["releases"][1]["build"] == manifest_digest(small_store)[:16]
        assert len(set(service.pids)) == 3
        assert started["pid"] == service.process.pid
        assert started["needs_token"] is False
        answers(service, small_store)
        host, _, port = started["listen"].rpartition(":")
        contexts = contexts_of(small_store, 2)
        with Caller((host, int(port))) as remote, service.caller() as local:
            assert remote.draft("crest", contexts).build == local.draft("crest", contexts).build
        assert service.request("GET", "/healthz")[0] == 200
        assert service.get("/readyz")["releases"] == ["crest", "small"]
        assert [release["name"] for release in service.get("/v1/releases")["releases"]] == ["crest", "small"]
        status, body = service.request("POST", "/v1/draft", {"release": "small", "text": "The quick brown"})
        assert (status, json.loads(body)["build"]) == (200, manifest_digest(small_store)[:16])
        assert service.request("GET", "/")[0] == 200
        assert service.stop() == 0
        assert not any(map(is_alive, service.pids))
        assert list(service.folder.glob("s*")) == []
        lines = [json.loads(line) for line in service.log.splitlines()]
        assert {"draining", "process ready", "process ended"} <= {line["event"] for line in lines}
        assert {"time", "level", "event"} <= set(lines[0])
        assert not [line for line in lines if line["level"] in ("error", "warning")]


def test_it_prints_what_it_serves_and_where(small_store: Path) -> None:
    with short_folder() as folder:
        process = launch("--store", small_store, "--http", f"127.0.0.1:{free_port()}", folder=folder)
        assert process.stdout is not None
        json.loads(process.stdout.readline())
        process.terminate()
        assert process.wait(SECONDS) == 0
        process.stdout.close()
        assert isinstance(process.args, list)
        command = [str(word) for word in process.args if word != "--json"]
        with (folder / "log").open("a") as log:
            plain = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert plain.stdout is not None
        said = [plain.stdout.readline() for _ in range(3)]
        plain.send_signal(signal.SIGINT)
        assert plain.wait(SECONDS) == 0
        plain.stdout.close()
        name = small_store.name
        assert re.match(
            rf"serving {name}: rest build [0-9a-f]{{16}} for small-bpe, [0-9,]+ entries\n", said[0]
        )
        assert said[1] == f"drafts  unix:{folder}/s\n"
        assert re.match(r"page    http://127\.0\.0\.1:\d+/\n", said[2])


def test_a_dense_store_that_another_one_replaces(tmp_path: Path) -> None:
    documents = [np.random.default_rng(seed).integers(0, 9, 30).tolist() for seed in range(9)]
    first, second = make_projection(), make_projection(seed=1)
    for name, projection in (("chat", first), ("next", second)):
        make_dense_store(tmp_path / name, documents, make_states(documents), projection=projection)
    [state] = make_states(documents[:1])

    def drafts(drafter: Any) -> bool:
        """Begin a text; tell whether there is a draft."""
        session = drafter.session(documents[0][:9], hidden=drafter.projection.apply(state[7]))
        session.observe([documents[0][9]], hidden=session.projection.apply(state[8]))
        return len(session.propose()) > 0

    with (
        served("--store", tmp_path / "chat", "--workers", 2, "--poll-seconds", 0.05) as service,
        RemoteStore(service.socket, "chat", deadline=SECONDS, target_model=MODEL) as remote,
    ):
        [release] = service.started["releases"]
        assert (release["kind"], release["target_model"]) == ("dresd", MODEL)
        assert remote.check()["projection"]["digest"] == first.digest
        drafter: Any = remote.drafter()
        assert drafts(drafter)
        status, body = service.request("POST", "/v1/draft", {"release": "chat", "text": "hi"})
        assert (status, b"hidden states" in body) == (409, True)
        (tmp_path / "chat").rename(tmp_path / "before")
        (tmp_path / "next").rename(tmp_path / "chat")
        until(lambda: drafts(drafter) and drafter.projection.digest == second.digest)
        assert remote.counters["other_projection"] > 0
        assert remote.counters["internal"] == remote.counters["opened"] == 0


def test_without_http(small_store: Path) -> None:
    with served("--store", f"small={small_store}", "--http", "none") as service:
        assert service.started["url"] is None
        assert service.started["web"] is None
        answers(service, small_store)
        assert service.stop() == 0


def test_http_on_a_unix_socket(small_store: Path) -> None:
    with short_folder() as folder:
        http = ("--http", f"unix:{folder}/http.sock")
        with served("--store", f"small={small_store}", *http, folder=folder) as service:
            path = Path(service.started["http_socket"])
            assert service.started["url"] is None
            assert path.stat().st_mode & 0o777 == 0o600
            ask_by_socket(path)
            os.kill(service.started["web"], signal.SIGKILL)
            until(lambda: service.log.count("process ready child=web") == 2)
            ask_by_socket(path)
            assert "another lookup service listens" in refusal(
                "--store", small_store, *http, "--socket", folder / "t", folder=folder
            )
            assert service.stop() == 0
            assert not path.exists()


def ask_by_socket(path: Path) -> None:
    """Ask over HTTP on a Unix socket."""
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), timeout=SECONDS) as client:
        assert client.get("http://localhost/readyz").json()["releases"] == ["small"]
        question = {"release": "small", "text": "The quick brown"}
        assert client.post("http://localhost/v1/draft", json=question).status_code == 200
        assert client.get("http://evil.example/v1/releases").status_code == 400


def test_a_drain_loses_no_answer(small_store: Path) -> None:
    with served("--store", f"small={small_store}") as service, service.caller() as caller:
        contexts = contexts_of(small_store, 4)
        caller.draft("small", contexts)
        service.signal(signal.SIGTERM)
        flags, answered = 0, time.monotonic()
        while (
            not flags & wire.CLOSING
        ):  # a busy connection is told to go elsewhere, and answered until it does
            try:
                frame = caller.draft_frame("small", contexts)
            except (AssertionError, OSError):
                assert (
                    time.monotonic() - answered > 0.2
                )  # this process was held up: nobody else would be so quiet
                break
            assert frame.header.status == wire.Status.OK
            flags, answered = frame.header.flags, time.monotonic()
        caller.close()
        assert service.process.wait(SECONDS) == 0


def test_in_a_hurry_a_second_signal_ends_it_at_once(small_store: Path) -> None:
    arguments = ("--store", f"small={small_store}", "--drain-seconds", 60)
    with served(*arguments) as service, service.caller() as caller:
        request = wire.encode_request(1, "small", contexts_of(small_store, 64), 64)
        caller.socket.setblocking(False)
        with suppress(BlockingIOError):  # a client that asks and does not read, which is waited for
            while True:
                caller.send(request)
        service.signal(signal.SIGINT)
        until(lambda: "draining" in service.log)
        service.signal(signal.SIGINT)
        assert service.process.wait(SECONDS) == 1
        assert not any(map(is_alive, service.pids))


def test_a_killed_worker_comes_back_with_its_totals(small_store: Path) -> None:
    with served("--store", f"small={small_store}", "--workers", "2") as service:
        contexts = contexts_of(small_store, 3)
        callers = [service.caller() for _ in range(8)]
        for caller in callers:
            caller.draft("small", contexts)
        before = 8
        until(
            lambda: service.metric("draftstore_queries_total", release="small") == before
        )  # after the answer
        victim = service.workers[0]
        os.kill(victim, signal.SIGKILL)
        until(lambda: not is_alive(victim))
        lost = 0
        for caller in callers:
            try:
                caller.draft("small", contexts)
            except (AssertionError, ConnectionError):
                lost += 1  # it was connected to that one
        answers(service, small_store)  # who connects anew is served, by the other one or by the new one
        until(
            lambda: service.metric("draftstore_worker_restarts_total", worker="0") == 1,
            "it is not started again",
        )
        wait_for_worker(service)
        expected = before + (len(callers) - lost) + 1
        until(lambda: service.metric("draftstore_queries_total", release="small") == expected)
        assert service.metric("draftstore_ready", release="small") == 1
        for caller in callers:
            caller.close()
        assert "process died child=worker-0" in service.log
        assert service.stop() == 0


def test_workers_share_the_connections(small_store: Path) -> None:
    with served("--store", f"small={small_store}", "--workers", "2") as service:
        contexts = contexts_of(small_store, 1)
        callers = [service.caller() for _ in range(6)]

        def shared() -> bool:
            """Go on as clients do: who is told to go, or is cut off, connects anew."""
            for place, caller in enumerate(callers):
                try:
                    flags = caller.draft_frame("small", contexts).header.flags
                except (AssertionError, ConnectionError):
                    flags = wire.CLOSING
                if flags & wire.CLOSING:
                    caller.close()
                    callers[place] = service.caller()
            return [service.metric("draftstore_connections", worker=worker) for worker in "01"] == [3, 3]

        until(shared, "one worker has more than the other")
        os.kill(service.workers[1], signal.SIGKILL)
        until(lambda: service.metric("draftstore_worker_restarts_total", worker="1") == 1)
        until(shared, "the new worker gets no connections")
        for caller in callers:
            caller.close()
        assert service.stop() == 0


def test_the_only_worker_comes_back(small_store: Path) -> None:
    ready = r"child=worker-0 pid=(\d+) seconds"
    with served("--store", f"small={small_store}") as service:
        for deaths in (1, 2):
            until(lambda: len(re.findall(ready, service.log)) == deaths)  # noqa: B023
            os.kill(int(re.findall(ready, service.log)[-1]), signal.SIGKILL)
            until(lambda: service.metric("draftstore_worker_restarts_total", worker="0") == deaths)  # noqa: B023
            answers(service, small_store)  # who connects in between waits
            # counts follow the answer: a worker that dies in between takes one with it
            until(lambda: service.metric("draftstore_queries_total", release="small") == deaths)  # noqa: B023


def test_a_killed_http_side_comes_back(small_store: Path) -> None:
    with served("--store", f"small={small_store}") as service:
        os.kill(service.started["web"], signal.SIGKILL)
        until(lambda: "process died child=web" in service.log)
        assert (
            service.get("/readyz")["status"] == "ready"
        )  # the supervisor keeps the port: it waits in the queue


def test_a_stopped_http_side_is_replaced(small_store: Path) -> None:
    with served("--store", f"small={small_store}", "--hang-seconds", "15") as service:
        os.kill(service.started["web"], signal.SIGSTOP)
        until(lambda: "process hangs, it is ended child=web" in service.log, "nobody notices")
        assert service.get("/readyz")["status"] == "ready"
        assert service.stop() == 0


def test_load_balancers_hear_of_the_end_before_it_comes(small_store: Path) -> None:
    with served("--store", f"small={small_store}", "--notice-seconds", "3600") as service:
        service.signal(signal.SIGTERM)
        until(lambda: service.request("GET", "/readyz")[0] == 503)
        assert json.loads(service.request("GET", "/readyz")[1])["problems"] == [
            "the service is about to stop"
        ]
        answers(service, small_store)  # nothing is refused yet
        question = {"release": "small", "text": "The quick brown"}
        assert service.request("POST", "/v1/draft", question)[0] == 200
        assert "draining" not in service.log
        service.signal(signal.SIGTERM)
        assert service.process.wait(SECONDS) == 1


def test_a_hanging_worker_is_replaced(small_store: Path) -> None:
    with served("--store", f"small={small_store}", "--workers", "2", "--hang-seconds", "15") as service:
        os.kill(service.workers[1], signal.SIGSTOP)
        until(lambda: "process hangs" in service.log, "nobody notices")
        until(lambda: service.metric("draftstore_worker_restarts_total", worker="1") == 1)
        wait_for_worker(service, 1)
        answers(service, small_store)


def test_a_service_that_was_paused_goes_on_as_it_was(small_store: Path) -> None:
    with served("--store", f"small={small_store}", "--hang-seconds", "6") as service:
        supervisor, children = service.process.pid, service.pids
        for pid in (supervisor, *children):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(7)
        os.kill(supervisor, signal.SIGCONT)
        time.sleep(1)  # it looks for hanging processes before they show that they live
        for pid in children:
            os.kill(pid, signal.SIGCONT)
        answers(service, small_store)
        assert "process hangs" not in service.log
        assert service.stop() == 0


def test_no_process_outlives_a_killed_supervisor(small_store: Path) -> None:
    with short_folder() as folder:
        with served("--store", f"small={small_store}", "--workers", "2", folder=folder) as service:
            service.process.kill()
            service.process.wait(SECONDS)
            until(lambda: not any(map(is_alive, service.pids)), "processes are left")
            assert (folder / "s").exists()  # nobody was left to remove it
        with served("--store", f"small={small_store}", folder=folder) as service:
            answers(service, small_store)
            assert service.stop() == 0


def test_a_second_service_is_refused(small_store: Path) -> None:
    with short_folder() as folder, served("--store", f"small={small_store}", folder=folder) as service:
        store = ("--store", small_store)
        assert f"another lookup service listens at {folder}/s" in refusal(*store, folder=folder)
        port = service.started["url"].rstrip("/").rpartition(":")[2]
        other = ("--socket", folder / "t")
        said = refusal(*store, *other, "--http", f"127.0.0.1:{port}", folder=folder)
        assert f"port {port} of 127.0.0.1 is in use" in said
        assert not (folder / "t").exists()
        answers(service, small_store)


def test_strangers_are_refused(small_store: Path) -> None:
    with short_folder() as folder:
        said = refusal("--store", small_store, "--listen", "0.0.0.0:0", folder=folder)
        assert "--listen 0.0.0.0:0 can be reached from other machines" in said
        with served(
            "--store", f"small={small_store}", "--listen", "0.0.0.0:0", "--anonymous", folder=folder
        ) as service:
            answers(service, small_store)


def test_pages_that_call_this_machine_by_a_name_of_theirs_are_refused(small_store: Path) -> None:
    """As they do once their own name leads here; the token that they lack would keep them out as well."""
    arguments = (
        "--store",
        f"small={small_store}",
        "--http",
        "0.0.0.0:0",
        "--anonymous",
        "--allow-host",
        "Box",
    )
    with short_folder() as folder, served(*arguments, folder=folder) as service:
        for host, status in (("evil.example", 400), ("box:7780", 200), ("localhost", 200), ("10.1.2.3", 200)):
            for path in ("/v1/releases", "/metrics", "/healthz"):
                assert service.request("GET", path, headers={"Host": host})[0] == status, (host, path)
            question = {"release": "small", "text": "for item in"}
            assert service.request("POST", "/v1/draft", question, {"Host": host})[0] == status


def test_what_cannot_be_served_stops_the_start(small_store: Path, tmp_path: Path) -> None:
    shutil.copytree(small_store, tmp_path / "cut")
    with (tmp_path / "cut" / "tokens.bin").open("r+b") as file:
        file.truncate(100)
    with short_folder() as folder:
        said = refusal("--store", small_store, "--store", tmp_path / "cut", "--workers", "2", folder=folder)
        assert "'cut' cannot be served: " in said
        assert "tokens.bin" in said
        assert "'gone' cannot be served" in refusal("--store", tmp_path / "gone", folder=folder)
        part = ("--store", small_store, "--partition")
        assert "segments for 999 partitions" in refusal(*part, "1/999", folder=folder)
        assert "'3/2' is not a partition" in refusal(*part, "3/2", folder=folder)
        for pair in (("--store", "a=/y"), ("--release", "a")):
            assert "two stores or releases have the same name" in refusal(
                "--store", "a=/x", *pair, folder=folder
            )
        assert "'7780' is not an address to listen at" in refusal(
            "--store", "/x", "--http", "7780", folder=folder
        )
        assert "there is no file of tokens" in refusal(
            "--store", small_store, "--tokens", "/nowhere", folder=folder
        )
        assert "expected HOST:PORT" in refusal("--store", small_store, "--http", "nonsense:x", folder=folder)
        assert "--socket-mode 9 is not a mode" in refusal(
            "--store", small_store, "--socket-mode", "9", folder=folder
        )
        assert list(folder.glob("s*")) == []


def test_tokens_are_read_again(small_store: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    first = run_tokens("new", "first", "--release", "small", "--file", tokens)
    contexts = np.zeros((1, 4), np.int32)
    with served("--store", f"small={small_store}", "--tokens", tokens, "--workers", "2") as service:
        assert service.started["needs_token"] is True

        def greeted(token: str) -> bool:
            with service.caller() as caller:
                return caller.hello(token).header.status == wire.Status.OK

        def http(token: str) -> int:
            bearer = {"Authorization": f"Bearer {token}"}
            return service.request("POST", "/v1/draft", {"release": "small", "text": "x"}, bearer)[0]

        with service.caller() as stranger:
            assert failure(stranger.draft_frame("small", contexts)).status == wire.Status.UNAUTHORIZED
        assert greeted(first)
        assert http(first) == 200
        assert http("wrong") == 401
        second = run_tokens("new", "second", "--release", "small", "--file", tokens)
        run_tokens("remove", "first", "--file", tokens)
        assert not greeted(second)
        service.signal(signal.SIGHUP)
        until(lambda: service.log.count("read again") == 4)  # by supervisor, workers and web
        assert all(greeted(second) and not greeted(first) for _ in range(8))
        assert http(second) == 200
        assert http(first) == 401
        tokens.write_text("nonsense")
        service.signal(signal.SIGHUP)
        until(lambda: "the earlier one stays valid" in service.log)
        os.kill(service.workers[0], signal.SIGKILL)  # its successor knows the tokens all the same
        until(lambda: service.log.count("child=worker-0") >= 3)
        assert all(greeted(second) for _ in range(8))
        assert http(second) == 200
        assert service.stop() == 0


@needs_openssl
def test_encrypted_frames(small_store: Path, tmp_path: Path) -> None:
    first, second = (make_certificate(tmp_path, name) for name in ("first", "second"))
    used = Certificate(tmp_path / "used.pem", tmp_path / "used.key")

    def use(certificate: Certificate) -> None:
        for source, target in zip(certificate, used, strict=True):
            shutil.copyfile(source, target)

    def trusts(certificate: Certificate) -> bool:
        try:
            with RemoteStore(address, "small", tls=certificate.file) as store:
                store.check(seconds=SECONDS)
        except LookupServiceError:
            return False
        return True

    use(first)
    tls = ("--tls-cert", used.file, "--tls-key", used.key)
    store = ("--store", f"small={small_store}")
    with (
        short_folder() as folder,
        served(*store, "--listen", "127.0.0.1:0", *tls, "--workers", 2, folder=folder) as service,
    ):
        address = f"tcp://{service.started['listen']}"
        assert service.started["tls"] is True
        assert trusts(first)
        answers(service, small_store)  # the Unix socket is as it was
        host, _, port = service.started["listen"].rpartition(":")
        with Caller((host, int(port))) as plain:
            plain.send(wire.frame(wire.Operation.RELEASES, 1) * 20)
            with suppress(ConnectionError, WireError):  # an alert of TLS, which is no frame
                plain.receive()
        use(second)
        service.signal(signal.SIGHUP)
        until(lambda: service.log.count("read again") == 4)  # by supervisor, workers and web
        assert all(trusts(second) for _ in range(4))
        used.key.write_text("nothing")
        service.signal(signal.SIGHUP)
        until(lambda: "the earlier one stays valid" in service.log)
        assert trusts(second)
        assert "Traceback" not in service.log
        for arguments, words in (
            (("--listen", "127.0.0.1:0", *tls), "cannot be used"),
            (tls, "--tls-cert and --tls-key encrypt --listen"),
            (("--listen", "127.0.0.1:0", *tls[2:]), "--tls-cert and --tls-key encrypt --listen"),
        ):
            assert words in refusal(*store, "--socket", folder / "t", *arguments, folder=folder)
        assert service.stop() == 0


def test_a_directory_that_is_built_anew_is_swapped(
    small_store: Path, small_crest: Path, tmp_path: Path
) -> None:
    place = tmp_path / "store"
    shutil.copytree(small_store, place)
    with served("--store", f"small={place}", "--poll-seconds", "0.05") as service, service.caller() as caller:
        contexts = contexts_of(small_store, 2)
        before = caller.draft("small", contexts).build
        shutil.copytree(small_crest, tmp_path / "new")
        place.rename(tmp_path / "old")
        (tmp_path / "new").rename(place)
        until(lambda: caller.draft("small", contexts).build != before, "the new build is not served")
        assert caller.draft("small", contexts).build == wire.short_hash(manifest_digest(small_crest))
        until(lambda: service.metric("draftstore_swaps_total", release="small") == 1)
        labels = [dict(labels) for name, labels in service.samples() if name == "draftstore_release_info"]
        assert [(label["kind"], label["build"]) for label in labels] == [
            ("crest", manifest_digest(small_crest)[:16])
        ]


def test_releases_move_under_load(small_store: Path, small_crest: Path, engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        builds = [catalogue.add_build(session, path) for path in (small_store, small_crest)]
        ids = [build.id for build in builds]
        publish(session, "small", ids[0])
    contexts = contexts_of(small_store, 6)
    expected = {
        wire.short_hash(manifest_digest(path)): drafts_of(path, contexts)
        for path in (small_store, small_crest)
    }
    rest, crest = expected
    with served("--release", "small", "--workers", "2") as service:
        seen: list[int] = []
        stopping = threading.Event()
        with ThreadPoolExecutor(4) as threads:

            def ask() -> int:
                """Ask until told to stop; every answer is whole, from one build."""
                asked = 0
                with service.caller() as caller:
                    while not stopping.is_set():
                        answer = caller.draft("small", contexts)
                        assert as_bytes(answer.drafts) == expected[answer.build]
                        seen.append(answer.build)
                        asked += 1
                return asked

            asking = [threads.submit(ask) for _ in range(4)]
            for swaps, move, build in (
                (2, partial(publish, build_id=ids[1], force=["kind"]), crest),
                (4, rollback, rest),
            ):
                with Session(engine) as session, session.begin():
                    move(session, "small")
                until(lambda: service.metric("draftstore_swaps_total", release="small") == swaps)  # noqa: B023
                until(lambda: set(seen[-50:]) == {build})  # noqa: B023
            stopping.set()
            asked = sum(future.result(SECONDS) for future in asking)
        for worker in range(2):
            until(lambda: service.metric("draftstore_worker_up", worker=str(worker)) == 1)  # noqa: B023
        until(lambda: service.metric("draftstore_queries_total", release="small") == asked)
        assert service.metric("draftstore_swaps_total", release="small") == 4
        assert (
            sum(v for (name, _), v in service.samples().items() if name == "draftstore_failures_total") == 0
        )
        status, body = service.request("POST", "/v1/draft", {"release": "small", "text": "The quick"})
        assert (status, json.loads(body)["build"]) == (200, manifest_digest(small_store)[:16])
        assert service.stop() == 0


def test_it_waits_for_a_first_release(database: str) -> None:
    with short_folder() as folder:
        assert "there is nothing to serve" in refusal(folder=folder)
        assert "the catalogue has no release 'chat'" in refusal("--release", "chat", folder=folder)
        with served("--wait", folder=folder) as service:
            assert service.started["releases"] == []
            assert service.request("GET", "/readyz")[0] == 503
            assert service.request("GET", "/healthz")[0] == 200
            assert service.stop() == 0


def test_with_the_database_away_workers_and_whole_services_come_back(
    small_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with postgres_server() as server, short_folder() as folder:
        monkeypatch.setenv(URL_VARIABLE, server.url)
        publish_in(server.url, "small", small_store)
        arguments = ("--release", "small", "--workers", "2")
        with served(*arguments, folder=folder) as service:
            server.stop()
            until(lambda: service.log.count("the catalogue cannot be read") == 3)
            for worker, kept in enumerate((True, False)):
                if not kept:
                    (folder / "s.releases").unlink()
                os.kill(service.workers[worker], signal.SIGKILL)
                until(lambda: service.log.count("the catalogue cannot be read") == 4 + worker)  # noqa: B023
                if kept:
                    wait_for_worker(service, worker)
                for _ in range(4):
                    answers(service, small_store)
                assert service.get("/readyz")["releases"] == ["small"]
            # Without the file the new one leaves clients to the other.
            assert service.metric("draftstore_worker_up", worker="1") == 0
            server.start()
            wait_for_worker(service, 1)
            server.stop()
            assert service.stop() == 0
        with served(*arguments, folder=folder) as service:  # nothing has answered for the database since
            answers(service, small_store)
            assert "serving the releases as of" in service.log
            status, _ = service.request("POST", "/v1/draft", {"release": "small", "text": "The quick brown"})
            assert status == 200


def publish_in(url: str, name: str, store: Path) -> None:
    """Publish a store in a new database."""
    migrate()
    engine = new_engine(url)
    with Session(engine) as session, session.begin():
        publish(session, name, catalogue.add_build(session, store).id)
    engine.dispose()


def test_a_database_that_is_away_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSTORE_DATABASE_URL", f"postgresql://nobody:x@127.0.0.1:{free_port()}/none")
    with short_folder() as folder:
        assert "the catalogue cannot be read" in refusal(folder=folder)
