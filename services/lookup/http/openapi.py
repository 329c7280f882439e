"""The OpenAPI document of the JSON API, generated from the message models."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from draftstore import __version__
from services.lookup.http import messages as m
from services.lookup.settings import SHARED_BUDGET

_REF = "#/components/schemas/{model}"
PROBLEMS = """Why the request failed and what to do about it. Status 409: the release drafts from hidden states of a
model, which a question cannot carry; 422: JSON, but not a valid question; 429 and 503: try again later."""


def document(max_budget: int = SHARED_BUDGET) -> dict[str, Any]:
    """Return the OpenAPI document of a service with this limit on the nodes of a draft.

    It omits what only the page uses.
    """
    draft = _operation("draft", "Draft for a text, or for several contexts", m.DraftReply)
    draft["requestBody"] = {"required": True, "content": {"application/json": {"schema": _of(m.Question)}}}
    ready = _operation("ready", "Whether drafts are served", m.ReadyReply)
    ready["responses"]["503"] = ready["responses"]["200"]
    operations = {
        "/v1/releases": _operation("releases", "What is served", m.ReleasesReply),
        "/healthz": _operation("health", "Whether the service is alive"),
        "/readyz": ready,
        "/metrics": _operation("metrics", "Metrics; requires a token for '*'", media="text/plain"),
        "/openapi.json": _operation("openapi", "This document"),
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "draftstore lookup service",
            "version": __version__,
            "description": "Drafts for people, scripts and monitoring. Decoders use frames over a Unix socket or TCP, "
            "which are ten times faster: see docs/frames.md.",
        },
        "security": [{"token": []}, {}],
        "paths": {"/v1/draft": {"post": draft}} | {path: {"get": get} for path, get in operations.items()},
        "components": _components(max_budget),
    }


def _operation(
    name: str, summary: str, reply: type[BaseModel] | None = None, media: str = "application/json"
) -> dict[str, Any]:
    success = {"description": summary, "content": {media: {"schema": _of(reply) if reply else {}}}}
    return {
        "operationId": name,
        "summary": summary,
        "responses": {"200": success, "default": {"$ref": "#/components/responses/Problem"}},
    }


def _components(max_budget: int) -> dict[str, Any]:
    """Return the schemas of all messages, the error response and the security scheme."""
    models = m.Question, m.DraftReply, m.ReleasesReply, m.ReadyReply, m.ProblemReply
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    budget = schemas["$defs"]["Question"]["properties"]["budget"]
    budget |= {"maximum": max_budget, "default": min(budget["default"], max_budget)}
    problem = {
        "description": PROBLEMS,
        "content": {"application/json": {"schema": _of(m.ProblemReply)}},
        "headers": {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}},
    }
    token = {"type": "http", "scheme": "bearer", "description": "Required by a service with a token file."}
    return {
        "schemas": schemas["$defs"],
        "responses": {"Problem": problem},
        "securitySchemes": {"token": token},
    }


def _of(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
