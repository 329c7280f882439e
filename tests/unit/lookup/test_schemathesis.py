"""Schemathesis against a running service: every answer is as described and never a 500."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from pydantic.json_schema import models_json_schema

from services.lookup.questions import DraftReply, Question
from services.lookup.settings import SHARED_BUDGET
from tests.fakes.sites import running_site, serving

SCHEMATHESIS = Path(sysconfig.get_path("scripts")) / "schemathesis"
TOKEN = "secret-of-the-fuzzer"
# What is too long is refused before it is read; a dense release has no answer to any question (409).
CONFIGURATION = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 409, 413, 415, 422, 429]
"""


def fields(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these fields."""
    return {"type": "object", "properties": properties, "required": [*properties]}


def document() -> dict[str, Any]:
    """Return an OpenAPI document of the JSON API, with the names of what is served."""
    _, found = models_json_schema(
        [(Question, "validation"), (DraftReply, "validation")], ref_template="#/components/schemas/{model}"
    )
    texts = {"type": "array", "items": {"type": "string"}}
    found["$defs"] |= {
        "ReadyReply": fields(status={"enum": ["ready", "not ready"]}, releases=texts, problems=texts),
        "ProblemReply": fields(error=fields(status={"type": "integer"}, message={"type": "string"})),
    }
    question = found["$defs"]["Question"]
    question["oneOf"] = [{"required": ["text"]}, {"required": ["contexts"]}]
    question["examples"] = [
        {"release": "chat", "text": "The quick brown", "budget": 16},
        {"release": "chat", "contexts": [[450, 499, 173]], "budget": 16},
    ]
    question["properties"]["budget"]["maximum"] = SHARED_BUDGET
    question["properties"]["release"]["enum"] = ["chat", "code", "dense"]
    question["properties"]["strategy"]["enum"] = ["", "longest", "backoff"]

    def content(model: str, media: str = "application/json") -> dict[str, Any]:
        schema = {"$ref": f"#/components/schemas/{model}"} if model else {}
        return {"description": model, "content": {media: {"schema": schema}}}

    def replies(model: str = "", media: str = "application/json") -> dict[str, Any]:
        return {"responses": {"200": content(model, media), "default": content("ProblemReply")}}

    ready = replies("ReadyReply")
    ready["responses"]["503"] = ready["responses"]["200"]
    draft = replies("DraftReply") | {"requestBody": {"required": True, **content("Question")}}
    gets = {"/v1/releases": replies(), "/healthz": replies(), "/readyz": ready}
    gets |= {"/metrics": replies(media="text/plain")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "lookup service", "version": "1"},
        "paths": {"/v1/draft": {"post": draft}} | {path: {"get": get} for path, get in gets.items()},
        "components": {"schemas": found["$defs"]},
    }


def run(address: str, folder: Path, *arguments: str) -> str:
    """Run Schemathesis; return what it prints."""
    (folder / "openapi.json").write_text(json.dumps(document()))
    (folder / "schemathesis.toml").write_text(CONFIGURATION)
    command = [
        sys.executable, str(SCHEMATHESIS), "run", "openapi.json", "--url", address, "--no-color",
        "--generation-database", "none", "--output-truncate", "true", "--seed", "4", *arguments,
    ]  # fmt: skip
    ran = subprocess.run(
        command, cwd=folder, env=os.environ | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, "\n".join(line[:500] for line in ran.stdout.splitlines())
    return ran.stdout


@pytest.mark.slow
def test_examples_and_the_edges_of_every_field(
    small_store: Path, small_crest: Path, small_dense: Path, tmp_path: Path
) -> None:
    stores = {"chat": small_crest, "code": small_store, "dense": small_dense}
    with running_site(stores) as running, serving(running.app()) as address:
        assert "Tested: 5" in run(address, tmp_path, "--phases", "examples,coverage")
