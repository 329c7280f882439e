import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from services.common.guards import ProblemError
from services.lookup.web import messages, openapi
from services.lookup.web.drafting import parse_question
from tests.fakes.sites import running_site

DOCUMENT = openapi.document()


@pytest.fixture(scope="module")
def client(small_crest: Path) -> Iterator[TestClient]:
    with running_site({"chat": small_crest}) as running, TestClient(running.app()) as client:
        yield client


def references(value: Any) -> Iterator[str]:
    """Yield every reference inside a document."""
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def check(value: Any, name: str) -> None:
    """Compare a value with one of the schemas."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    jsonschema_rs.Draft202012Validator(schema).validate(value)


def test_the_document_is_served_as_it_is(client: TestClient) -> None:
    response = client.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    assert response.json() == json.loads(json.dumps(DOCUMENT))
    assert response.json()["openapi"].startswith("3.1.")


def test_every_path_of_the_api_is_described_and_none_besides(client: TestClient) -> None:
    routes = {
        (route.path, method.lower())
        for route in client.app.routes  # type: ignore[attr-defined]
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD" and route.path != "/" and not route.path.startswith("/static")
    }
    described = {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == routes


def test_all_references_lead_somewhere_and_all_schemas_are_used() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    found = {reference.rsplit("/", 1)[1] for reference in references(DOCUMENT)}
    assert found == set(schemas)
    for schema in schemas.values():
        jsonschema_rs.meta.validate(schema)
    assert len({operation.name for operation in openapi.OPERATIONS}) == len(openapi.OPERATIONS)


@pytest.mark.parametrize(
    "operation", [o for o in openapi.OPERATIONS if o.method == "get"], ids=lambda o: o.name
)
def test_answers_are_as_described(client: TestClient, operation: openapi.ApiOperation) -> None:
    response = client.get(operation.path)
    assert response.status_code == 200
    described = DOCUMENT["paths"][operation.path]["get"]["responses"]["200"]["content"]
    assert response.headers["content-type"].startswith(*described)
    if operation.reply:
        check(response.json(), operation.reply.__name__)


@pytest.mark.parametrize("model", [messages.TextQuestion, messages.TokensQuestion])
def test_examples_are_questions_that_are_answered(client: TestClient, model: type[messages.Message]) -> None:
    [example] = DOCUMENT["components"]["schemas"][model.__name__]["examples"]
    check(example, model.__name__)
    response = client.post("/v1/draft", json=example)
    assert response.status_code == 200
    check(response.json(), "DraftReply")


@pytest.mark.parametrize(
    "question",
    [
        {"release": "chat", "text": "x"},
        {"release": "chat", "contexts": [[1], []], "budget": 0, "min_prob": 1},
        {"release": "chat", "text": "x", "budget": 5.0},
        {"release": "chat", "text": "x", "contexts": [[1]]},
        {"release": "chat", "text": "x", "budget": 5000},
        {"release": "chat", "text": None},
        {"release": "chat"},
        {"release": "chat", "text": "x", "other": 1},
        {"release": "", "text": "x"},
        {"release": "chat", "text": 1},
        {"release": "chat", "contexts": [[]] * 65},
        {"release": "chat", "contexts": [[1 << 31]]},
        {"release": "chat", "contexts": [["1"]]},
        {"release": "chat", "text": "x", "min_prob": "0"},
        {"release": "chat", "text": "x" * 65_537},
        [],
        None,
        5,
    ],
)  # fmt: skip
def test_the_schema_and_the_service_agree_on_questions(question: Any) -> None:
    body = DOCUMENT["paths"]["/v1/draft"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = {**body, "components": DOCUMENT["components"]}
    try:
        parse_question(json.dumps(question).encode())
        status = 200
    except ProblemError as problem:
        status = problem.status
    assert status == (200 if jsonschema_rs.Draft202012Validator(schema).is_valid(question) else 422)


def test_problems_are_described(client: TestClient) -> None:
    responses = DOCUMENT["paths"]["/v1/draft"]["post"]["responses"]
    assert {int(status) for status in responses} == {200, *openapi.PROBLEMS}
    for status in openapi.RETRIED:
        assert responses[str(status)]["headers"]["Retry-After"]["required"]
    response = client.post("/v1/draft", json={"release": "nothing", "text": ""})
    assert str(response.status_code) in responses
    check(response.json(), "ProblemReply")
