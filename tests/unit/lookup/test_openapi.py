import json
from typing import Any

import jsonschema_rs
import pytest

from services.common.guards import ProblemError
from services.lookup.http import openapi
from services.lookup.http.drafting import parse_question

DOCUMENT = openapi.document()
MOST = 256


def test_the_document_names_the_limit_of_the_service() -> None:
    budget = openapi.document(16)["components"]["schemas"]["Question"]["properties"]["budget"]
    assert (budget["maximum"], budget["default"]) == (16, 16)


@pytest.mark.parametrize(
    "question",
    [
        {"release": "chat", "text": "x"},
        {"release": "chat", "contexts": [[1], []], "budget": 0, "min_prob": 1},
        {"release": "chat", "text": "x", "contexts": [[1]]},
        {"release": "chat", "text": "x", "budget": MOST + 1},
        {"release": "", "text": "x"},
        {"release": "chat", "contexts": [[]] * 65},
        {"release": "chat", "contexts": [[1] * 4097]},
        {"release": "chat", "text": "x" * 65_537},
    ],
)
def test_the_schema_and_the_service_agree_on_questions(question: Any) -> None:
    schema = {"$ref": "#/components/schemas/Question", "components": DOCUMENT["components"]}
    if jsonschema_rs.Draft202012Validator(schema).is_valid(question):
        parse_question(json.dumps(question).encode(), MOST)
    else:
        with pytest.raises(ProblemError) as problem:
            parse_question(json.dumps(question).encode(), MOST)
        assert problem.value.status == 422
