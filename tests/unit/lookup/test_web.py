import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from draftstore.storage.manifest import manifest_digest
from draftstore.stores.registry import open_store
from draftstore.text.tokenizer import load_tokenizer
from services.common.http import SECURITY
from services.lookup import questions
from services.lookup.drafting import Drafted, Lookup
from services.lookup.questions import MAX_BODY
from tests.fakes.sites import Running, browse, grant, hold, running_site, serving
from tests.fakes.waiting import SECONDS

CONTEXT = "The quick brown fox"
BODY = json.dumps({"release": "code", "text": CONTEXT, "budget": 4}).encode()


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
    """Return a client of a service that needs tokens."""
    grants = grant("reader", "secret-1", "chat"), grant("admin", "secret-2", "*", max_budget=1024)
    with (
        running_site({"chat": small_crest, "code": small_store}, *grants) as running,
        TestClient(running.app()) as client,
    ):
        yield client


def ask(client: TestClient, token: str = "", **question: Any) -> Any:
    headers = {"Authorization": f"Bearer {token}"} if token else None
    return client.post("/v1/draft", json={"release": "code", **question}, headers=headers)


def refusal(response: Any, status: int) -> str:
    """Check the form that all errors have, and return the message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.json()["error"]["status"] == status
    return str(response.json()["error"]["message"])


@pytest.mark.parametrize(("release", "strategy"), [("chat", ""), ("code", "longest")])
def test_a_draft_for_a_text_is_that_of_the_store(
    client: TestClient, small_store: Path, small_crest: Path, release: str, strategy: str
) -> None:
    path = {"chat": small_crest, "code": small_store}[release]
    tokenizer = load_tokenizer(path / "tokenizer")
    ids = tokenizer.encode(CONTEXT, bos=False)
    with closing(open_store(path)) as store:
        drafter = store.drafter(strategy) if strategy else store.drafter()
        [expected] = drafter.draft(ids.reshape(1, -1), 24, 0.001)
    given: dict[str, Any] = {"release": release, "strategy": strategy, "budget": 24, "min_prob": 0.001}
    reply = ask(client, text=CONTEXT, **given).json()
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
    assert ask(client, contexts=[[], ids.tolist()], **given).json()["drafts"][1] == draft


def test_long_answers_are_refused(site: Running, guarded: TestClient, small_store: Path) -> None:
    contexts = [[5, 6]] * 64
    with TestClient(site.app()) as client:
        assert ask(client, contexts=contexts, budget=256).status_code == 200
        assert "at most 256" in refusal(ask(client, text=CONTEXT, budget=257), 422)
    with running_site({"code": small_store}, max_budget=4096) as large, TestClient(large.app()) as client:
        assert ask(client, contexts=contexts[:4], budget=4096).status_code == 200
        assert "at most 16,384" in refusal(ask(client, contexts=contexts[:5], budget=4096), 422)
    with running_site({"code": small_store}, max_budget=16) as small, TestClient(small.app()) as client:
        assert 0 < len(ask(client, text=CONTEXT).json()["drafts"][0]["nodes"]) <= 16
    assert ask(guarded, "secret-2", text=CONTEXT, budget=1024).status_code == 200  # a limit of its own
    assert ask(guarded, "secret-1", release="chat", text=CONTEXT, budget=1024).status_code == 422


def test_a_dense_release_has_no_drafts_for_text(small_dense: Path) -> None:
    with running_site({"dense": small_dense}) as running, TestClient(running.app()) as client:
        message = refusal(ask(client, release="dense", text=CONTEXT), 409)
        assert "draftstore generate --release dense" in message


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "not JSON"),
        (b'{"release": "chat", "text": "\xff"}', 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"release": "chat", "contexts": [[' + b"1" * 5000 + b"]]}", 400, "not JSON"),
        (b'{"release": "chat", "text": "", "min_prob": NaN}', 422, "min_prob"),
        (b'{"release": "chat", "text": "\\ud800"}', 422, "text"),
        (b'{"release": "chat"}', 422, "give `text`, or token ids in `contexts`"),
        (b'{"release": "chat", "text": "", "contexts": [[1]]}', 422, "give `text`"),
        (b'{"release": "chat", "text": "", "path": "/etc/passwd"}', 422, "path"),
        (b'{"release": "chat", "text": "", "budget": true}', 422, "budget"),
        (b'{"release": "chat", "contexts": [[2147483648]]}', 422, "contexts.0.0"),
        (b'{"release": "nothing", "text": ""}', 404, "nothing is served under the name 'nothing'"),
        (b'{"release": "chat", "text": "", "strategy": "best"}', 404, "backoff"),
    ],
)
def test_invalid_questions_are_refused(client: TestClient, body: bytes, status: int, words: str) -> None:
    response = client.post("/v1/draft", content=body, headers={"Content-Type": "application/json"})
    assert words in refusal(response, status)


def test_bodies_that_are_too_long_or_of_another_type(client: TestClient) -> None:
    fits, headers = BODY.ljust(MAX_BODY), {"Content-Type": "application/json"}
    assert client.post("/v1/draft", content=fits, headers=headers).status_code == 200
    for long in (fits + b" ", (b" " * 65_536 for _ in range(5))):  # the second without a length
        assert "262,144 bytes" in refusal(client.post("/v1/draft", content=long, headers=headers), 413)
    response = client.post("/v1/draft", content=BODY, headers={"Content-Type": "text/plain"})
    assert "application/json" in refusal(response, 415)


@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer wrong", "Basic secret-1", "secret-1"])
def test_without_a_known_token_every_request_is_refused(guarded: TestClient, given: str) -> None:
    headers = {"Authorization": given}
    for path in ("/v1/releases", "/v1/figures", "/metrics"):
        response = guarded.get(path, headers=headers)
        assert "bearer token" in refusal(response, 401)
        assert response.headers["www-authenticate"].startswith("Bearer")
    refusal(guarded.post("/v1/draft", content=BODY, headers=headers), 401)


def test_a_token_opens_its_releases_alone(guarded: TestClient, small_crest: Path) -> None:
    headers = {"Authorization": "bearer secret-1"}
    assert ask(guarded, "secret-1", release="chat", text=CONTEXT).status_code == 200
    for other in ("code", "nothing"):  # the same, whether or not it is served
        assert f"may not use {other!r}" in refusal(ask(guarded, "secret-1", release=other, text=CONTEXT), 403)
    for path in ("/v1/releases", "/v1/figures"):
        shown = guarded.get(path, headers=headers).json()["releases"]
        assert [entry["name"] for entry in shown] in (["chat"], [])
    assert "all releases" in refusal(guarded.get("/metrics", headers=headers), 403)
    headers = {"Authorization": "Bearer secret-2"}
    found = guarded.get("/v1/releases", headers=headers)
    assert [entry["name"] for entry in found.json()["releases"]] == ["chat", "code"]
    assert str(small_crest.parent) not in found.text
    assert "draftstore_contexts_total" in guarded.get("/metrics", headers=headers).text


def test_public_pages_name_no_releases(guarded: TestClient) -> None:
    assert guarded.get("/healthz").json() == {"status": "alive"}
    assert guarded.get("/readyz").json() == {"status": "ready", "releases": [], "problems": []}
    assert "chat" not in guarded.get("/").text


def test_readiness(small_store: Path, tmp_path: Path) -> None:
    with running_site({"code": small_store}) as running, TestClient(running.app()) as client:

        def ready() -> tuple[int, list[str], list[str]]:
            response = client.get("/readyz")
            return response.status_code, response.json()["releases"], response.json()["problems"]

        assert ready() == (200, ["code"], [])
        running.put(code=small_store, lost=tmp_path)
        assert ready() == (200, ["code"], ["the release 'lost' is not open"])
        running.put(code=tmp_path)
        assert ready() == (200, ["code"], ["the latest build of 'code' cannot be opened"])
        running.site.stopping = True
        assert ready()[0] == 503
        assert client.get("/healthz").status_code == 200
    with running_site({"lost": tmp_path}) as running, TestClient(running.app()) as client:
        assert ready() == (503, [], ["the release 'lost' is not open"])


@pytest.mark.parametrize("path", ["/", "/healthz", "/metrics", "/nothing", "/static/page.js", "/v1/draft"])
def test_every_answer_carries_the_security_headers(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    assert {name: headers.get(name) for name in SECURITY} == SECURITY
    assert headers["content-security-policy"].startswith("default-src 'none'")


def test_questions_at_once_are_bounded_and_slow_bodies_are_not_counted(
    site: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go, draft = threading.Event(), threading.Event(), site.drafting.draft

    def wait(lookup: Lookup) -> Drafted:
        began.set()
        assert go.wait(SECONDS)
        return draft(lookup)

    monkeypatch.setattr(questions, "AT_ONCE", 1)
    monkeypatch.setattr(site.drafting, "draft", wait)
    with serving(site.app()) as address, browse(address) as client, ThreadPoolExecutor(1) as pool:
        slow = hold(address, "/v1/draft", BODY)
        first = pool.submit(client.post, "/v1/draft", json=json.loads(BODY))
        assert began.wait(SECONDS)
        response = client.post("/v1/draft", json=json.loads(BODY))
        go.set()
        refusal(response, 429)
        assert response.headers["retry-after"] == "1"
        assert first.result(SECONDS).status_code == 200
        with slow:
            slow.sendall(BODY)
            assert slow.recv(65_536).startswith(b"HTTP/1.1 200")
