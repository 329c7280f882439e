import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from draftstore.storage.manifest import load_manifest, manifest_digest
from draftstore.stores.registry import open_store
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from services.common import guards
from services.common import http_server as webserver
from services.common.addresses import ListenAddress
from services.common.guards import is_own_host, own_names
from services.common.permissions import EVERY, Grant, hash_token
from services.lookup.figures.counting import SharedCounters
from services.lookup.figures.totals import Labels, WorkerState
from services.lookup.stores.targets import Target, with_digest
from services.lookup.web import lexicon as lexicon_module
from services.lookup.web.app import make_app
from services.lookup.web.lexicon import Lexicon
from services.lookup.web.live import Live, Reading, Totals, percentile
from services.lookup.web.messages import MAX_BODY
from services.lookup.web.readings import read_readiness
from services.lookup.web.texts import LAST, pack_contexts, show_draft
from tests.fakes.dense_stores import MODEL
from tests.fakes.sites import Running, grant, running_site, serving
from tests.fakes.waiting import until

CONTEXT = "The quick brown fox"


@pytest.fixture(scope="module")
def site(small_store: Path, small_crest: Path, wide_store: Path) -> Iterator[Running]:
    with running_site({"chat": small_crest, "code": small_store, "wide": wide_store}) as running:
        yield running


@pytest.fixture(scope="module")
def client(site: Running) -> Iterator[TestClient]:
    with TestClient(site.app(), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def guarded(small_store: Path, small_crest: Path) -> Iterator[TestClient]:
    """Return a client of a service that asks for tokens."""
    tokens = grant("reader", "secret-1", "chat"), grant("admin", "secret-2", "*")
    with (
        running_site({"chat": small_crest, "code": small_store}, *tokens) as running,
        TestClient(running.app(), raise_server_exceptions=False) as client,
    ):
        yield client


def ask(client: TestClient, headers: dict[str, str] | None = None, **question: Any) -> Any:
    return client.post("/v1/draft", json=question, headers=headers)


def refusal(response: Any, status: int) -> str:
    """Check the form that all errors have, and return the message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.json()["error"]["status"] == status
    return str(response.json()["error"]["message"])


# --- drafts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["chat", "code"])
@pytest.mark.parametrize("strategy", ["", "longest", "backoff"])
def test_a_draft_for_a_text_is_that_of_the_store(
    client: TestClient, small_store: Path, small_crest: Path, release: str, strategy: str
) -> None:
    path = {"chat": small_crest, "code": small_store}[release]
    tokenizer = load_tokenizer(path / "tokenizer")
    store = open_store(path)
    try:
        drafter = store.drafter(strategy) if strategy else store.drafter()
        contexts = tokenizer.encode(CONTEXT, bos=False).reshape(1, -1)
        [expected] = drafter.draft(contexts, 24, 0.001)
    finally:
        store.close()
    reply = ask(client, release=release, text=CONTEXT, strategy=strategy, budget=24, min_prob=0.001).json()
    [draft] = reply["drafts"]
    assert len(expected.tree)
    assert [node["token"] for node in draft["nodes"]] == expected.tree.tokens.tolist()
    assert [node["parent"] for node in draft["nodes"]] == expected.tree.parents.tolist()
    assert [node["prob"] for node in draft["nodes"]] == pytest.approx(expected.tree.probs.tolist(), abs=1e-6)
    assert [node["shown"] for node in draft["nodes"]] == [*map(tokenizer.token_text, expected.tree.tokens)]
    assert (draft["match_length"], draft["match_count"]) == (expected.match_length, expected.match_count)
    assert "".join(token["text"] for token in draft["context"]) == CONTEXT
    assert CONTEXT.endswith(draft["matched_text"])
    assert reply["build"] == manifest_digest(path)[:16]
    assert reply["tokenizer"] == load_manifest(path).tokenizer.fingerprint[:16]
    assert reply["lookup_us"] >= 0
    assert reply["round_trip_us"] > 0


def test_drafts_for_a_batch_of_contexts(client: TestClient, small_tokenizer: TextTokenizer) -> None:
    contexts = [small_tokenizer.encode(text, bos=False).tolist() for text in (CONTEXT, "for item in", "")]
    reply = ask(client, release="code", contexts=contexts, budget=8).json()
    alone = [ask(client, release="code", contexts=[c], budget=8).json()["drafts"][0] for c in contexts]
    assert reply["drafts"] == alone
    assert [len(draft["context"]) for draft in alone] == [len(c) for c in contexts]
    assert alone[0]["nodes"]
    assert alone[2] == {"match_length": 0, "match_count": 0, "matched_text": "", "context": [], "nodes": []}


def test_wide_ids_and_ids_that_no_tokenizer_knows(client: TestClient) -> None:
    [draft] = ask(client, release="wide", contexts=[[65_536]], budget=4).json()["drafts"]
    assert draft["context"] == [{"token": 65_536, "text": "w65536", "shown": "w65536"}]
    assert draft["nodes"]
    [draft] = ask(client, release="wide", contexts=[[(1 << 31) - 1]], budget=4).json()["drafts"]
    assert draft["context"] == [{"token": (1 << 31) - 1, "text": None, "shown": "<id 2147483647>"}]
    assert draft["nodes"] == []


def test_contexts_are_aligned_right_and_cut_to_the_last_tokens() -> None:
    packed = pack_contexts([[1, 2, 3], [], [4]])
    assert packed.tolist() == [[1, 2, 3], [-1, -1, -1], [-1, -1, 4]]
    assert packed.dtype == np.int32
    assert pack_contexts([[]]).tolist() == [[-1]]
    assert pack_contexts([list(range(LAST + 5)), [7]])[:, 0].tolist() == [5, -1]


def test_the_matched_text_of_characters_of_several_tokens(
    small_store: Path, small_tokenizer: TextTokenizer
) -> None:
    store = open_store(small_store)
    try:
        ids = small_tokenizer.encode("emoji 😁", bos=False)  # not in the corpus: it is spelled in bytes
        [draft] = store.drafter().draft(ids.reshape(1, -1))
    finally:
        store.close()
    assert small_tokenizer.exact_text(int(ids[-1])) is None
    shown = [show_draft(draft._replace(match_length=n), ids, small_tokenizer) for n in range(len(ids) + 1)]
    assert shown[0].matched_text == ""
    assert shown[1].matched_text is None  # a part of a character
    assert shown[-1].matched_text == "emoji 😁"
    assert show_draft(draft, ids, None).context[0].text is None


def test_whole_numbers_with_a_point(client: TestClient) -> None:
    body = b'{"release": "code", "contexts": [[5.0, 7e0]], "budget": 8.0, "min_prob": 0}'
    response = client.post("/v1/draft", content=body, headers={"Content-Type": "application/json"})
    assert [token["token"] for token in response.json()["drafts"][0]["context"]] == [5, 7]


def test_no_draft_and_a_budget_of_nothing(client: TestClient) -> None:
    assert ask(client, release="chat", text="").json()["drafts"][0]["nodes"] == []
    assert ask(client, release="chat", text=CONTEXT, budget=0).json()["drafts"][0]["nodes"] == []
    assert ask(client, release="code", text=CONTEXT, min_prob=1.0, budget=256).status_code == 200


def test_long_answers_are_refused(site: Running) -> None:
    """As JSON, 64 drafts of 4,096 nodes were 19 MB, which took the process 3.7 seconds."""
    contexts = [[5, 6]] * 64
    with TestClient(site.app()) as client:
        assert ask(client, release="code", contexts=contexts, budget=256).status_code == 200
        for question in ({"contexts": contexts}, {"text": CONTEXT}):
            message = refusal(ask(client, release="code", **question, budget=257), 422)
            assert message == "budget: 257 nodes, expected at most 256"
    with TestClient(site.app(max_budget=4096)) as client:
        assert ask(client, release="code", contexts=contexts[:4], budget=4096).status_code == 200
        message = refusal(ask(client, release="code", contexts=contexts[:5], budget=4096), 422)
        assert "5 contexts with a budget of 4,096 nodes: expected at most 16,384 nodes" in message
        assert (
            client.get("/openapi.json").json()["components"]["schemas"]["TextQuestion"]["properties"][
                "budget"
            ]["maximum"]
            == 4096
        )
    with TestClient(site.app(max_budget=16)) as client:
        [draft] = ask(client, release="code", text=CONTEXT).json()["drafts"]
        assert 0 < len(draft["nodes"]) <= 16


def test_a_token_may_allow_longer_drafts(small_store: Path) -> None:
    more = Grant("more", frozenset([EVERY]), hash_token("more"), 1024)
    with (
        running_site({"code": small_store}, more, grant("plain", "plain", EVERY)) as running,
        TestClient(running.app()) as client,
    ):
        for token, status in (("more", 200), ("plain", 422)):
            bearer = {"Authorization": f"Bearer {token}"}
            assert ask(client, bearer, release="code", text=CONTEXT, budget=1024).status_code == status


# --- questions that are refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b'{"release": "chat", "text": "\\ud800"}', 422, "text"),
        (b'{"release": "chat", "text": "\xff"}', 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"release": "chat", "contexts": [[' + b"1" * 5000 + b"]]}", 400, "not JSON"),
        (b"[]", 422, "expected a JSON object"),
        (b"null", 422, "expected a JSON object"),
        (b"{}", 422, "release"),
        (b'{"release": "chat"}', 422, "give `text`, or token ids in `contexts`"),
        (b'{"release": "chat", "tokens": [[1]]}', 422, "contexts`; tokens: Extra inputs"),
        (b'{"release": "", "text": ""}', 422, "release"),
        (b'{"release": "chat", "text": 5}', 422, "text"),
        (b'{"release": "chat", "text": null}', 422, "text"),
        (b'{"release": "chat", "text": "", "contexts": [[1]]}', 422, "text"),
        (b'{"release": "chat", "text": "", "path": "/etc/passwd"}', 422, "path"),
        (b'{"release": "chat", "text": "", "budget": "4"}', 422, "budget"),
        (b'{"release": "chat", "text": "", "budget": -1}', 422, "budget"),
        (b'{"release": "chat", "text": "", "budget": 4097}', 422, "budget"),
        (b'{"release": "chat", "text": "", "budget": 1e400}', 422, "budget"),
        (b'{"release": "chat", "text": "", "min_prob": 1.5}', 422, "min_prob"),
        (b'{"release": "chat", "text": "", "min_prob": NaN}', 400, "NaN"),
        (b'{"release": "chat", "text": "", "min_prob": 1e999}', 422, "min_prob"),
        (b'{"release": "chat", "text": "", "min_prob": true}', 422, "min_prob"),
        (b'{"release": "chat", "text": "", "budget": true}', 422, "budget"),
        (b'{"release": "chat", "text": "", "budget": 4.5}', 422, "budget"),
        (b'{"release": "chat", "text": "' + b"x" * 65_537 + b'"}', 422, "text"),
        (b'{"release": "chat", "contexts": []}', 422, "contexts"),
        (b'{"release": "chat", "contexts": [[-1]]}', 422, "contexts.0.0"),
        (b'{"release": "chat", "contexts": [[2147483648]]}', 422, "contexts.0.0"),
        (b'{"release": "chat", "contexts": [[1.5]]}', 422, "contexts.0.0"),
        (b'{"release": "' + "é".encode() * 200 + b'", "text": ""}', 422, "no request can carry this"),
    ],
)
def test_questions_that_are_none(client: TestClient, body: bytes, status: int, words: str) -> None:
    response = client.post("/v1/draft", content=body, headers={"Content-Type": "application/json"})
    assert words in refusal(response, status)


@pytest.mark.parametrize("release", ["nothing", "../../etc/passwd", "chat\0", "' OR 1=1 --", "CHAT"])
def test_unknown_releases(client: TestClient, release: str) -> None:
    assert "served under the name" in refusal(ask(client, release=release, text=CONTEXT), 404)
    assert "served under the name" in refusal(ask(client, release=release, contexts=[[1]]), 404)


def test_an_unknown_strategy(client: TestClient) -> None:
    assert "longest" in refusal(ask(client, release="chat", text=CONTEXT, strategy="best"), 404)


def test_too_many_contexts_or_tokens(client: TestClient) -> None:
    assert "contexts" in refusal(ask(client, release="chat", contexts=[[1]] * 65), 422)
    assert "contexts.0" in refusal(ask(client, release="chat", contexts=[[1] * 4097]), 422)
    assert ask(client, release="chat", contexts=[[1] * 4096] + [[]] * 63).status_code == 200


def test_bodies_that_are_too_long(client: TestClient) -> None:
    fits = json.dumps({"release": "chat", "text": ""}).encode().ljust(MAX_BODY)
    headers = {"Content-Type": "application/json"}
    assert len(fits) == MAX_BODY
    assert client.post("/v1/draft", content=fits, headers=headers).status_code == 200
    assert "262,144 bytes" in refusal(client.post("/v1/draft", content=fits + b" ", headers=headers), 413)
    pieces = (b" " * 65_536 for _ in range(5))  # without a length up front
    assert "262,144 bytes" in refusal(client.post("/v1/draft", content=pieces, headers=headers), 413)


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_bodies_of_another_type(client: TestClient, kind: str) -> None:
    response = client.post("/v1/draft", content=b"{}", headers={"Content-Type": kind})
    assert "application/json" in refusal(response, 415)


def test_unknown_paths_and_methods(client: TestClient) -> None:
    assert "/openapi.json" in refusal(client.get("/v2/draft"), 404)
    assert "no such path" in refusal(client.get("/static/..%2f..%2fweb.py"), 404)
    assert "no such file" in refusal(client.get("/static/index.html"), 404)
    response = client.get("/v1/draft")
    assert "/v1/draft does not take GET" in refusal(response, 405)
    assert response.headers["allow"] == "POST"
    assert client.head("/healthz").status_code == 200


# --- who may ask -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic secret-1", "secret-1"]
)
def test_without_a_known_token_nothing_is_told(guarded: TestClient, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given}
    for path in ("/v1/releases", "/v1/figures", "/metrics"):
        response = guarded.get(path, headers=headers)
        assert "bearer token" in refusal(response, 401)
        assert response.headers["www-authenticate"].startswith("Bearer")
    assert "bearer token" in refusal(ask(guarded, headers, release="chat", text=CONTEXT), 401)
    assert "bearer token" in refusal(ask(guarded, headers, release="nothing", text=CONTEXT), 401)


def test_a_token_for_one_release(guarded: TestClient) -> None:
    headers = {"Authorization": "Bearer secret-1"}
    assert ask(guarded, headers, release="chat", text=CONTEXT).json()["drafts"][0]["nodes"]
    assert "'code'" in refusal(ask(guarded, headers, release="code", text=CONTEXT), 403)
    assert "'nothing'" in refusal(
        ask(guarded, headers, release="nothing", text=CONTEXT), 403
    )  # or not there: same
    assert [r["name"] for r in guarded.get("/v1/releases", headers=headers).json()["releases"]] == ["chat"]
    assert [r["name"] for r in guarded.get("/v1/figures", headers=headers).json()["releases"]] == ["chat"]
    assert "all releases" in refusal(guarded.get("/metrics", headers=headers), 403)


def test_a_token_for_all_releases(guarded: TestClient) -> None:
    headers = {"Authorization": "bearer secret-2"}
    assert ask(guarded, headers, release="code", text=CONTEXT).status_code == 200
    assert refusal(ask(guarded, headers, release="nothing", text=CONTEXT), 404)
    assert len(guarded.get("/v1/releases", headers=headers).json()["releases"]) == 2
    assert "draftstore_queries_total" in guarded.get("/metrics", headers=headers).text


def test_what_is_open_tells_nothing_about_releases(guarded: TestClient) -> None:
    assert guarded.get("/healthz").json() == {"status": "alive"}
    assert guarded.get("/readyz").json() == {"status": "ready", "releases": [], "problems": []}
    page = guarded.get("/")
    assert page.status_code == 200
    assert "option" not in page.text
    assert "chat" not in page.text


# --- what is served, health, figures ---------------------------------------------------------------------------


def test_releases(client: TestClient, small_store: Path) -> None:
    found = {entry["name"]: entry for entry in client.get("/v1/releases").json()["releases"]}
    assert sorted(found) == ["chat", "code", "wide"]
    assert found["chat"]["kind"] == "crest"
    assert found["code"]["build"] == manifest_digest(small_store)[:16]
    assert found["code"]["tokens"] == load_manifest(small_store).counts["tokens"]
    assert found["code"]["default_strategy"] in found["code"]["strategies"]
    assert str(small_store.parent) not in json.dumps(found)


def test_readiness_follows_the_workers(site: Running, client: TestClient) -> None:
    assert client.get("/readyz").json() == {
        "status": "ready",
        "releases": ["chat", "code", "wide"],
        "problems": [],
    }
    try:
        for state in (WorkerState.STARTING, WorkerState.DRAINING, WorkerState.ABSENT):
            site.workers.slot.state = state
            response = client.get("/readyz")
            assert response.status_code == 503
            assert "no worker process is ready" in response.json()["problems"]
            assert client.get("/healthz").status_code == 200
    finally:
        site.workers.slot.state = WorkerState.READY


def test_a_release_that_is_not_open_is_told_of(site: Running, client: TestClient) -> None:
    targets = [Target(name, Path()) for name in ("chat", "lost")]
    before = site.lexicon._followed
    site.lexicon._followed = {target.name: target for target in targets}
    try:
        response = client.get("/readyz")
        assert response.status_code == 200  # the others are served
        assert response.json()["problems"] == ["the release 'lost' is not open"]
    finally:
        site.lexicon._followed = before


def test_a_worker_with_nothing_open_leaves_the_service_ready() -> None:
    figures = SharedCounters(2)
    for number in range(2):
        slot = figures.slot(number)
        slot.begin()
        slot.state = WorkerState.READY
    figures.slot(0).announce([("chat", Labels("rest", "b", "t"))])
    reply = read_readiness(figures, ["chat"])
    assert (reply.status, reply.releases) == ("ready", [])
    assert reply.problems == ["the release 'chat' is open in 1 of 2 workers"]
    figures.slot(1).state = WorkerState.STARTING
    assert read_readiness(figures, ["chat"]).releases == ["chat"]


def test_figures_count_queries(client: TestClient) -> None:
    before = {row["name"]: row for row in client.get("/v1/figures").json()["releases"]}
    for _ in range(5):
        ask(client, release="wide", contexts=[[65_536], [3]], budget=4)

    def counted() -> bool:  # an answer is counted when it is on its way
        rows = client.get("/v1/figures").json()["releases"]
        return all(row["queries"] == before["wide"]["queries"] + 5 for row in rows if row["name"] == "wide")

    until(counted)
    figures = client.get("/v1/figures").json()
    after = {row["name"]: row for row in figures["releases"]}
    assert after["wide"]["contexts"] == before["wide"]["contexts"] + 10
    assert after["wide"]["misses"] >= before["wide"]["misses"] + 5
    assert after["code"]["queries"] == before["code"]["queries"]
    assert after["wide"]["p99_us"] >= after["wide"]["p50_us"] > 0
    assert figures["workers"] == figures["workers_ready"] == 1
    assert figures["total"]["queries"] == sum(row["queries"] for row in figures["releases"])


def test_metrics_are_those_of_prometheus(client: TestClient) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    response = client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name for family in text_string_to_metric_families(response.text)}
    assert {"draftstore_queries", "draftstore_lookup_seconds", "draftstore_ready"} <= families


# --- figures over time -----------------------------------------------------------------------------------------


def test_rates_are_those_of_the_window() -> None:
    now, queries = 0.0, 0
    bounds = (0.001, 0.002)

    def read() -> Reading:
        counts = Totals(queries, 2 * queries, queries // 2, 60 * queries, 6 * queries, 0, 1, (queries, 0, 0))
        return Reading({"chat": counts, "": Totals(failures=queries)}, bounds, 2, 1)

    live = Live(read, lambda: now)
    for second in range(1, 101):
        now, queries = float(second), queries + (10 if second <= 80 else 30)
        live.sample()
    report = live.report()
    assert report.window_s == 10.0
    assert report.total.queries_per_s == 30.0
    assert report.total.failures_per_s == 30.0
    assert report.releases[0].name == "chat"
    assert report.releases[0].match_length == 3.0
    assert report.releases[0].nodes == 30.0
    assert report.releases[0].miss_rate == 0.25
    assert report.total.p50_us == 500.0
    assert report.total.p99_us == 990.0
    assert len(report.history) == 60
    assert report.history[0] == 10.0
    assert report.history[-1] == 30.0
    nobody = live.report(lambda _: False)
    assert nobody.releases == []
    assert nobody.total.queries == 0


def test_figures_of_a_release_that_appears_and_of_nothing_at_all() -> None:
    readings = iter(
        [Reading({}), Reading({}), Reading({"new": Totals(queries=3)}), Reading({"new": Totals(queries=3)})]
    )
    live = Live(lambda: next(readings))
    assert live.report().total.p50_us is None
    assert live.report().total.miss_rate is None
    assert live.report().releases[0].queries == 3


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([], 0.5, None),
        ([0, 0, 0], 0.5, None),
        ([10, 0, 0], 0.5, 500.0),
        ([0, 10, 0], 0.5, 2000.0),
        ([0, 0, 10], 0.99, 3000.0),
        ([50, 50, 0], 0.5, 1000.0),
        ([0, 1, 0], 0.0, None),
    ],
)
def test_percentiles(counts: list[int], share: float, expected: float | None) -> None:
    assert percentile(counts, [0.001, 0.003], share) == expected


# --- security --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/", "/healthz", "/v1/releases", "/metrics", "/nothing", "/static/page.js", "/v1/draft"]
)
def test_every_answer_carries_the_security_headers(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    for name, value in guards.SECURITY.items():
        assert headers[name] == value
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["content-security-policy"].startswith("default-src 'none'")


def test_a_foreign_name_for_this_machine_is_refused(client: TestClient) -> None:
    response = client.get("/v1/releases", headers={"Host": "attacker.example:7780"})
    assert "attacker.example" in refusal(response, 400)
    assert client.get("/v1/releases", headers={"Host": "127.0.0.1:7780"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("localhost", True),
        ("LocalHost:80", True),
        ("127.0.0.1:7780", True),
        ("192.168.1.5", True),
        ("[::1]:7780", True),
        ("[::1]", True),
        ("box", True),
        ("box.:80", True),
        ("a.localhost", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example:7780", False),
        ("notlocalhost", False),
        ("", False),
        ("[::1", False),
    ],
)
def test_own_hosts(host: str, own: bool) -> None:
    assert is_own_host(host, {"box"}) is own or host == "[::1"


@pytest.mark.parametrize(
    ("endpoint", "allowed", "tokens", "names"),
    [
        ("127.0.0.1:1", (), False, ("127.0.0.1",)),
        ("0.0.0.0:1", (), False, ("0.0.0.0",)),
        ("0.0.0.0:1", ("box",), False, ("0.0.0.0", "box")),
        ("0.0.0.0:1", (), True, None),
        ("0.0.0.0:1", ("box",), True, ("0.0.0.0", "box")),
        ("127.0.0.1:1", (), True, ("127.0.0.1",)),
    ],
)
def test_names_that_requests_may_use(
    endpoint: str, allowed: tuple[str, ...], tokens: bool, names: tuple[str, ...] | None
) -> None:
    assert own_names(ListenAddress.parse(endpoint, 1), allowed, tokens=tokens) == names


def test_an_unexpected_error_is_a_plain_500(site: Running) -> None:
    def fail() -> bytes:
        raise RuntimeError("a secret path /srv/stores")

    broken = site.site()
    broken.metrics = fail
    with TestClient(make_app(broken), raise_server_exceptions=False) as client:
        response = client.get("/metrics")
        assert "secret" not in refusal(response, 500)
        assert response.headers["content-security-policy"]


# --- workers that are away, and moves --------------------------------------------------------------------------


def test_workers_come_and_go(small_store: Path) -> None:
    with (
        running_site({"code": small_store}) as running,
        TestClient(running.app(), raise_server_exceptions=False) as client,
    ):
        assert ask(client, release="code", text=CONTEXT).status_code == 200
        running.workers.stop()
        response = ask(client, release="code", text=CONTEXT)
        assert "no worker" in refusal(response, 503)
        assert int(response.headers["retry-after"]) >= 1
        assert "no worker" in refusal(client.get("/v1/releases"), 503)
        assert "no worker" in client.get("/").text
        running.workers.start()
        assert ask(client, release="code", text=CONTEXT).status_code == 200
        running.workers.stop()
        running.workers.start()  # the connection that was there is gone: another is made within the request
        assert ask(client, release="code", text=CONTEXT).status_code == 200


def test_a_release_that_moves_to_another_tokenizer(small_store: Path, wide_store: Path) -> None:
    with (
        running_site({"code": small_store}) as running,
        TestClient(running.app(), raise_server_exceptions=False) as client,
    ):
        running.workers.put("code", wide_store)
        response = ask(client, release="code", text="w65536")
        assert "tokenizer of 'code'" in refusal(response, 503)
        assert response.headers["retry-after"] == "1"
        [draft] = ask(client, release="code", contexts=[[65_536]]).json()["drafts"]
        assert draft["nodes"][0]["text"] is None  # spelled as soon as the tokenizer is known
        running.lexicon.follow([with_digest(Target("code", wide_store))])
        assert ask(client, release="code", text="w65536").json()["drafts"][0]["nodes"][0]["text"]
        # The other way round: the tokenizer moves first, the workers answer from the old build for a while.
        running.lexicon.follow([with_digest(Target("code", small_store))])
        [draft] = ask(client, release="code", text="w65536").json()["drafts"]
        assert draft["nodes"][0]["text"].startswith("w")


def test_a_tokenizer_that_cannot_be_read(small_store: Path, tmp_path: Path, site: Running) -> None:
    lexicon = Lexicon()
    lexicon.follow([Target("lost", tmp_path), with_digest(Target("code", small_store))])
    assert lexicon.names == ["code", "lost"]
    assert lexicon.of_release("lost") is None
    assert lexicon.of_release("code") is not None
    lexicon.follow([])
    assert lexicon.of_release("code") is None


def test_a_tokenizer_that_could_not_be_read_once_is_read_again(
    small_store: Path, wide_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lexicon = Lexicon()
    lexicon.follow([with_digest(Target("code", small_store))])
    before, moved = lexicon.of_release("code"), [with_digest(Target("code", wide_store))]

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(lexicon_module, "load_tokenizer", fail)
        lexicon.follow(moved)
    assert lexicon.of_release("code") is before
    lexicon.follow(moved)
    found = lexicon.of_release("code")
    assert found is not None
    assert found is not before


def test_a_dense_release_is_not_asked_with_text(small_store: Path, small_dense: Path) -> None:
    with (
        running_site(
            {"code": small_store, "dense": small_dense}, grant("reader", "secret", "dense")
        ) as running,
        TestClient(running.app(), raise_server_exceptions=False) as client,
    ):
        headers = {"Authorization": "Bearer secret"}
        for question in ({"text": CONTEXT}, {"contexts": [[1, 2]]}, {"text": "", "budget": 0}):
            message = refusal(ask(client, headers, release="dense", **question), 409)
            assert "'dense' drafts from a model's hidden states" in message
            assert "draftstore generate --release dense" in message
        refusal(ask(client, headers, release="dense", text=1), 422)
        refusal(ask(client, headers, release="code", text=CONTEXT), 403)
        refusal(ask(client, release="dense", text=CONTEXT), 401)
        [entry] = client.get("/v1/releases", headers=headers).json()["releases"]
        assert (entry["kind"], entry["target_model"], entry["projection"]["dims"]) == ("dresd", MODEL, 8)


def test_a_release_that_becomes_a_dense_one(small_store: Path, small_dense: Path) -> None:
    with (
        running_site({"code": small_store}) as running,
        TestClient(running.app(), raise_server_exceptions=False) as client,
    ):
        running.workers.put("code", small_dense)
        [draft] = ask(client, release="code", text=CONTEXT).json()["drafts"]
        assert draft["nodes"] == []  # as long as this side does not know
        running.lexicon.follow([with_digest(Target("code", small_dense))])
        assert running.lexicon.kind_of("code") == "dresd"
        refusal(ask(client, release="code", text=CONTEXT), 409)
        running.lexicon.follow([with_digest(Target("code", small_store))])
        running.workers.put("code", small_store)
        assert ask(client, release="code", text=CONTEXT).status_code == 200
        running.lexicon.follow([])
        assert running.lexicon.kind_of("code") is None


def test_too_many_questions_at_once(site: Running) -> None:
    """Hold some questions up, and see the next one sent away."""
    with serving(make_app(site.site(most_at_once=2))) as address:
        host, port = address.removeprefix("http://").split(":")
        held = [http.client.HTTPConnection(host, int(port), timeout=30) for _ in range(2)]
        body = json.dumps({"release": "code", "text": CONTEXT}).encode()
        for connection in held:
            connection.putrequest("POST", "/v1/draft")
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders()
        statuses = set()
        for _ in range(200):
            other = http.client.HTTPConnection(host, int(port), timeout=30)
            other.request("POST", "/v1/draft", body, {"Content-Type": "application/json"})
            response = other.getresponse()
            statuses.add(response.status)
            wait = response.getheader("Retry-After")
            other.close()
            if response.status == 429:
                break
        assert 429 in statuses
        assert wait == "1"
        for connection in held:  # the server still works on them
            connection.send(body)
            assert connection.getresponse().status == 200
            connection.close()


def test_slow_bodies_and_slow_headers_are_cut_off(site: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(guards, "BODY_SECONDS", 0.2)
    with serving(site.app()) as address:
        place = ("127.0.0.1", int(address.rsplit(":", 1)[1]))
        start = b"POST /v1/draft HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(place, 30) as slow:
            slow.sendall(start + b"Content-Length: 10\r\n\r\n{")
            assert slow.recv(65_536).startswith(b"HTTP/1.1 408")
        with socket.create_connection(place, 30) as large:
            large.sendall(start + b"X: " + b"x" * (2 * webserver.HEADERS))
            assert large.recv(65_536).startswith(b"HTTP/1.1 400")
        monkeypatch.setattr(webserver, "HEAD_SECONDS", 0.2)
        with socket.create_connection(place, 30) as slow:
            slow.sendall(start)
            assert slow.recv(65_536) == b""
        with socket.create_connection(place, 30) as silent:
            assert silent.recv(65_536) == b""


def test_requests_that_are_under_way_are_finished(site: Running) -> None:
    """The event loop ends after the answer, not before."""
    answers: list[int] = []
    with serving(site.app(), drain_seconds=60) as address:
        host, port = address.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        connection.putrequest("POST", "/v1/draft")
        connection.putheader("Content-Type", "application/json")
        body = json.dumps({"release": "code", "text": CONTEXT}).encode()
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        http_health = http.client.HTTPConnection(host, int(port), timeout=30)
        http_health.request("GET", "/healthz")  # the server has seen the first request by now
        assert http_health.getresponse().status == 200
        http_health.close()
        thread = threading.Timer(0.3, connection.send, (body,))
        thread.start()
    thread.join()
    answers.append(connection.getresponse().status)
    connection.close()
    assert answers == [200]


def test_questions_do_not_wait_for_each_other(site: Running) -> None:
    """Many at once over one connection to the workers, each with its own answer."""

    async def ask_all() -> list[int]:
        upstream = site.site().upstream
        contexts = [np.array([[i]], np.int32) for i in range(200)]
        replies = await asyncio.gather(*(upstream.draft("code", c, 4, 0.0) for c in contexts))
        alone = [await upstream.draft("code", c, 4, 0.0) for c in contexts[:20]]
        assert [r.answer.drafts for r in replies[:20]] == [r.answer.drafts for r in alone]
        await upstream.close()
        return [len(reply.answer.drafts) for reply in replies]

    assert asyncio.run(ask_all()) == [1] * 200
