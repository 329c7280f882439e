import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from starlette.testclient import TestClient

from services.common.guards import ProblemError
from services.lookup.http import openapi
from services.lookup.http.drafting import parse_question
from tests.fakes.sites import running_site

DOCUMENT = openapi.document()
MOST = 256


@pytest.fixture(scope="module")
def client(small_crest: Path) -> Iterator[TestClient]:
    with running_site({"chat": small_crest}) as running, TestClient(running.app()) as client:
        yield client


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    whole = {**schema, "components": DOCUMENT["components"]}
    return jsonschema_rs.Draft202012Validator(whole).is_valid(value)


def test_the_document_names_the_limit_of_the_service(client: TestClient) -> None:
    assert client.get("/openapi.json").json() == json.loads(json.dumps(openapi.document(MOST)))
    question = openapi.document(16)["components"]["schemas"]["Question"]["properties"]["budget"]
    assert (question["maximum"], question["default"]) == (16, 16)


@pytest.mark.parametrize(
    "question",
    [
        {"release": "chat", "text": "x"},
        {"release": "chat", "contexts": [[1], []], "budget": 0, "min_prob": 1},
        {"release": "chat", "text": "x", "budget": 5.0},
        {"release": "chat", "text": "x", "contexts": [[1]]},
        {"release": "chat", "text": "x", "budget": MOST + 1},
        {"release": "chat", "text": None},
        {"release": "chat", "text": "x", "other": 1},
        {"release": "", "text": "x"},
        {"release": "chat", "contexts": [[]] * 65},
        {"release": "chat", "contexts": [[1] * 4097]},
        {"release": "chat", "contexts": [["1"]]},
        {"release": "chat", "text": "x" * 65_537},
        5,
    ],
)
def test_the_schema_and_the_service_agree_on_questions(question: Any) -> None:
    try:
        parse_question(json.dumps(question).encode(), MOST)
        status = 200
    except ProblemError as problem:
        status = problem.status
    assert status == (200 if is_valid(question, {"$ref": "#/components/schemas/Question"}) else 422)
