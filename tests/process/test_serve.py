"""The command `draftstore serve` in a separate process: start, stop, restart, swaps, reloaded files."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from draftstore.errors import LookupServiceError, WireError
from draftstore.remote import wire
from draftstore.remote.client import RemoteStore
from draftstore.storage.manifest import manifest_digest
from draftstore.stores.registry import open_store
from draftstore.trees.batch import Draft
from schema.catalogue.builds import add_build
from schema.db.database import URL_VARIABLE, migrate
from services.cli.tokens import tokens
from services.common.addresses import ListenAddress
from services.lookup.served import load_kernels
from services.lookup.settings import LookupSettings
from tests import ROOT
from tests.fakes.certificates import Certificate, make_certificate, needs_openssl
from tests.fakes.databases import new_engine, publish, rollback
from tests.fakes.lookups import Caller, contexts_of, failure
from tests.fakes.served import Service, refusal, served, short_folder
from tests.fakes.servers import postgres_server
from tests.fakes.waiting import SECONDS, until


def run_tokens(*arguments: object) -> str:
    """Call `draftstore tokens`, and return what it prints."""
    result = CliRunner().invoke(tokens, [str(argument) for argument in arguments], catch_exceptions=False)
    return result.stdout.strip()


def as_bytes(drafts: Sequence[Draft]) -> list[tuple[bytes, int, int]]:
    return [(draft.tree.to_bytes(), draft.match_length, draft.match_count) for draft in drafts]


def drafts_of(store: Path, contexts: NDArray[np.int32]) -> list[tuple[bytes, int, int]]:
    """Return what a store drafts in this process."""
    with closing(open_store(store)) as local:
        return as_bytes(local.drafter().draft(contexts))


def answers(service: Service, store: Path) -> None:
    """Check that a service drafts as the store itself does."""
    contexts = contexts_of(store, 9)
    with service.caller() as caller:
        assert as_bytes(caller.draft("small", contexts).drafts.drafts()) == drafts_of(store, contexts)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Have the kernels on disk: to compile them in a service may take longer than a test waits."""
    load_kernels()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("localhost", ("localhost", 7781)),
        (":9", ("0.0.0.0", 9)),
        ("[::1]:9", ("::1", 9)),
        ("::1", ("::1", 7781)),
    ],
)
def test_places_to_listen_at(text: str, expected: tuple[str, int]) -> None:
    assert ListenAddress.parse(text, 7781) == expected
    for wrong in ("127.0.0.1:", "127.0.0.1:65536", "http://localhost:80", "a:-1", "7780"):
        with pytest.raises(LookupServiceError, match="expected HOST:PORT"):
            ListenAddress.parse(wrong, 7781)


def test_other_machines_need_tokens_or_anonymous() -> None:
    anywhere = ListenAddress("0.0.0.0", 0)
    with pytest.raises(LookupServiceError, match=r"--listen 0\.0\.0\.0:0 can be reached from other machines"):
        LookupSettings(listen=anywhere)
    with pytest.raises(LookupServiceError, match=r"--http 0\.0\.0\.0:0 can be reached"):
        LookupSettings(http=anywhere)
    LookupSettings(listen=anywhere, tokens=Path("t"))
    LookupSettings(listen=anywhere, anonymous=True)
    with pytest.raises(LookupServiceError, match="exclude each other"):
        LookupSettings(tokens=Path("t"), anonymous=True)


@pytest.mark.parametrize(
    ("given", "budgets"),
    [({}, (4096, 256)), ({"socket_mode": "660"}, (256, 256)), ({"max_budget": 64}, (64, 64))],
)
def test_long_drafts_are_for_sockets_of_one_user(given: dict[str, Any], budgets: tuple[int, int]) -> None:
    limits = LookupSettings(**given).all_limits
    assert (limits.budget, limits.shared_budget) == budgets


def test_it_serves_and_stops(small_store: Path, small_crest: Path) -> None:
    stores = ("--store", f"small={small_store}", "--store", f"crest={small_crest}")
    with served(*stores, "--listen", "127.0.0.1:0", "--log-format", "json") as service:
        assert [release["name"] for release in service.started["releases"]] == ["crest", "small"]
        assert service.started["pid"] == service.process.pid
        assert service.started["needs_token"] is False
        answers(service, small_store)
        host, _, port = service.started["listen"].rpartition(":")
        contexts = contexts_of(small_store, 2)
        with Caller((host, int(port))) as remote, service.caller() as local:
            assert remote.draft("crest", contexts).build == local.draft("crest", contexts).build
        assert service.get("/readyz")["releases"] == ["crest", "small"]
        status, body = service.request("POST", "/v1/draft", {"release": "small", "text": "The quick brown"})
        assert (status, json.loads(body)["build"]) == (200, manifest_digest(small_store)[:16])
        assert service.stop() == 0
        assert [path.name for path in service.folder.glob("s*") if not path.name.endswith(".lock")] == []
        lines = [json.loads(line) for line in service.log.splitlines()]
        assert {"ready", "about to stop", "stopped"} <= {line["event"] for line in lines}
        assert not [line for line in lines if line["level"] in ("error", "warning")]


def test_http_on_a_unix_socket(small_store: Path) -> None:
    with short_folder() as folder:
        http = ("--http", f"unix:{folder}/http.sock")
        with served("--store", f"small={small_store}", *http, folder=folder) as service:
            path = Path(service.started["http_socket"])
            assert path.stat().st_mode & 0o777 == 0o600
            with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), timeout=SECONDS) as client:
                assert client.get("http://localhost/readyz").json()["releases"] == ["small"]
                assert client.get("http://evil.example/v1/releases").status_code == 400
            assert service.stop() == 0
            assert not path.exists()


@pytest.mark.slow
def test_load_balancers_see_the_end_before_it_comes(small_store: Path) -> None:
    with served("--store", f"small={small_store}", "--notice-seconds", "3600") as service:
        service.signal(signal.SIGTERM)
        until(lambda: service.request("GET", "/readyz")[0] == 503)
        assert json.loads(service.request("GET", "/readyz")[1])["problems"] == [
            "the service is about to stop"
        ]
        answers(service, small_store)  # nothing is refused yet


@pytest.mark.slow
def test_a_loop_that_is_stuck_ends_the_process(small_store: Path) -> None:
    """Whatever restarts the service goes on from there."""
    program = f"""
import time
from pathlib import Path
from services.common import logs
from services.lookup import drafting, server
from services.lookup.settings import LookupSettings, Target
server.STUCK_SECONDS = 3
drafting.DraftService.allow = lambda *_: time.sleep(600)
logs.configure(logs.LogOptions())
stores = (Target("small", Path({str(small_store)!r})),)
server.run(LookupSettings(socket=Path("s").absolute(), http="none", stores=stores))
"""
    with short_folder() as folder, (folder / "log").open("w") as log:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen([sys.executable, "-c", program], stderr=log, cwd=folder, env=environment)
        until(lambda: "ready" in (folder / "log").read_text())
        with Caller(folder / "s") as caller, suppress(AssertionError, ConnectionError):
            caller.draft("small", contexts_of(small_store, 1))
        assert process.wait(SECONDS) == 1
        assert "Timeout (0:00:03)!" in (folder / "log").read_text()


def test_tokens_are_read_again(small_store: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    first = run_tokens("new", "first", "--release", "small", "--file", file)
    with served("--store", f"small={small_store}", "--tokens", file) as service:
        assert service.started["needs_token"] is True

        def valid(token: str) -> bool:
            bearer = {"Authorization": f"Bearer {token}"}
            status, _ = service.request("POST", "/v1/draft", {"release": "small", "text": "x"}, bearer)
            with service.caller() as caller:
                greeted = caller.hello(token).header.status == wire.Status.OK
            assert greeted == (status == 200)
            return greeted

        with service.caller() as stranger:
            refused = failure(stranger.draft_frame("small", np.zeros((1, 4), np.int32)))
            assert refused.status == wire.Status.UNAUTHORIZED
        assert valid(first)
        second = run_tokens("new", "second", "--release", "small", "--file", file)
        run_tokens("remove", "first", "--file", file)
        assert not valid(second)
        service.signal(signal.SIGHUP)
        until(lambda: valid(second))
        assert not valid(first)
        file.write_text("nonsense")
        service.signal(signal.SIGHUP)
        until(lambda: "the earlier one stays valid" in service.log)
        assert valid(second)


@needs_openssl
def test_encrypted_frames(small_store: Path, tmp_path: Path) -> None:
    first, second = (make_certificate(tmp_path, name) for name in ("first", "second"))
    used = Certificate(tmp_path / "used.pem", tmp_path / "used.key")

    def use(certificate: Certificate) -> None:
        for source, target in zip(certificate, used, strict=True):
            shutil.copyfile(source, target)

    def trusts(certificate: Certificate) -> bool:
        with RemoteStore(address, "small", tls=certificate.file) as store, suppress(LookupServiceError):
            return bool(store.check(seconds=SECONDS))
        return False

    use(first)
    tls = ("--listen", "127.0.0.1:0", "--tls-cert", used.file, "--tls-key", used.key)
    store = ("--store", f"small={small_store}")
    with short_folder() as folder, served(*store, *tls, folder=folder) as service:
        address = f"tcp://{service.started['listen']}"
        assert service.started["tls"] is True
        assert trusts(first)
        answers(service, small_store)  # the Unix socket is as it was
        host, _, port = service.started["listen"].rpartition(":")
        with Caller((host, int(port))) as plain, suppress(ConnectionError, WireError, AssertionError):
            plain.send(wire.frame(wire.Operation.RELEASES, 1) * 20)
            assert plain.receive() is None  # an alert of TLS is no frame
        use(second)
        service.signal(signal.SIGHUP)
        until(lambda: trusts(second))
        used.key.write_text("nothing")
        service.signal(signal.SIGHUP)
        until(lambda: "the earlier one stays valid" in service.log)
        assert trusts(second)
        assert "Traceback" not in service.log
        assert "cannot be used" in refusal(*store, "--socket", folder / "t", *tls, folder=folder)
        assert service.stop() == 0


def test_releases_move_under_load(small_store: Path, small_crest: Path, engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        ids = [add_build(session, path).id for path in (small_store, small_crest)]
        publish(session, "small", ids[0])
    contexts = contexts_of(small_store, 6)
    paths = (small_store, small_crest)
    expected = {wire.short_hash(manifest_digest(path)): drafts_of(path, contexts) for path in paths}
    rest, crest = expected
    with served("--release", "small", "--poll-seconds", "0.1") as service, ThreadPoolExecutor(4) as threads:
        seen: list[int] = []
        stopping = threading.Event()

        def ask() -> int:
            """Ask until the end; every answer is whole, from one build."""
            asked = 0
            with service.caller() as caller:
                while not stopping.is_set():
                    answer = caller.draft("small", contexts)
                    assert as_bytes(answer.drafts.drafts()) == expected[answer.build]
                    seen.append(answer.build)
                    asked += 1
            return asked

        asking = [threads.submit(ask) for _ in range(4)]
        try:
            for number in range(6):
                with Session(engine) as session, session.begin():
                    if number % 2:
                        rollback(session, "small")
                    else:
                        publish(session, "small", ids[1], force=["kind", "strategy"])
                until(lambda: set(seen[-50:]) == {rest if number % 2 else crest})  # noqa: B023
        finally:
            stopping.set()
        asked = sum(future.result(SECONDS) for future in asking)
        until(lambda: service.metric("draftstore_lookup_seconds_count", release="small") == asked)
        assert service.metric("draftstore_swaps_total", release="small") == 6
        samples = service.samples().items()
        assert sum(value for (name, _), value in samples if name == "draftstore_failures_total") == 0
        assert service.stop() == 0


@pytest.mark.slow
def test_kills_garbage_and_a_database_that_is_away(
    small_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = contexts_of(small_store, 3)
    expected = drafts_of(small_store, contexts)
    with postgres_server() as server, short_folder() as folder:
        monkeypatch.setenv(URL_VARIABLE, server.url)
        migrate()
        engine = new_engine(server.url)
        with Session(engine) as session, session.begin():
            publish(session, "small", add_build(session, small_store).id)
        engine.dispose()
        with RemoteStore(folder / "s", "small", deadline=SECONDS) as client:
            drafter = client.drafter()

            def recovers() -> bool:
                found = as_bytes(drafter.draft(contexts))
                assert found == expected or all(match == (found[0][0], 0, 0) for match in found)
                return found == expected

            with served("--release", "small", folder=folder) as service:
                until(recovers)
                for seed in range(50):
                    with suppress(OSError), service.caller() as garbage:
                        garbage.send(np.random.default_rng(seed).bytes(seed * 10 + 1))
                    assert recovers()
                service.process.kill()
                until(lambda: not recovers())
            with served("--release", "small", folder=folder) as service:
                until(recovers)
                server.stop()
                until(lambda: "what is served stays" in service.log)
                assert recovers()
            assert (client.counters["garbage"], client.counters["invalid"]) == (0, 0)
        assert "Traceback" not in (folder / "log").read_text()
