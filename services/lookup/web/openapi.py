"""The OpenAPI document of the JSON API, generated from the message models."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from draftstore import __version__
from services.lookup.limits import SHARED_BUDGET
from services.lookup.web import messages as m

OPENAPI = "3.1.0"
_REF = "#/components/schemas/{model}"

PROBLEMS = {
    400: "The body is not JSON, or a worker cannot read the question.",
    401: "No bearer token, or an unknown one.",
    403: "The token does not allow this.",
    404: "No such release.",
    408: "The body did not arrive in time.",
    409: "The release drafts from hidden states of a model, which no question holds.",
    413: "The body is too long.",
    415: "The body is not `application/json`.",
    422: "The body is JSON, but not such a question.",
    429: "Too many requests at once.",
    500: "An error inside the service.",
    503: "No store is open yet, no worker answers, or the release has just moved.",
}
RETRIED = (429, 503)
"""Statuses that come with Retry-After."""


class ApiOperation(NamedTuple):
    """One path with its method."""

    path: str
    method: str
    name: str
    summary: str
    reply: type[BaseModel] | None
    problems: tuple[int, ...] = ()
    media: str = "application/json"
    also: Mapping[int, type[BaseModel]] = {}
    """Other statuses whose body is not a problem."""
    open: bool = False
    """Whether it is answered without a token even if the service needs one."""


OPERATIONS = (
    ApiOperation(
        "/v1/draft", "post", "draft", "Draft for a text, or for a batch of contexts", m.DraftReply, tuple(PROBLEMS)
    ),
    ApiOperation("/v1/releases", "get", "releases", "List what is served", m.ReleasesReply, (401, 500, 503)),
    ApiOperation("/v1/figures", "get", "figures", "Live figures of the service", m.FiguresReply, (401,)),
    ApiOperation("/healthz", "get", "health", "Whether the HTTP process is alive", m.HealthReply, open=True),
    ApiOperation(
        "/readyz", "get", "ready", "Whether drafts are served", m.ReadyReply,
        also={503: m.ReadyReply}, open=True,
    ),
    ApiOperation(
        "/metrics", "get", "metrics", "Metrics for Prometheus; needs a token for all releases", None, (401, 403),
        "text/plain",
    ),
    ApiOperation("/openapi.json", "get", "openapi", "This document", None, open=True),
)  # fmt: skip


def document(max_budget: int = SHARED_BUDGET) -> dict[str, Any]:
    """Return the OpenAPI document of a service with this limit on the nodes of a draft."""
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": OPENAPI,
        "info": {
            "title": "draftstore lookup service",
            "version": __version__,
            "summary": "Drafts for speculative decoding.",
            "description": "For people, scripts and monitoring. Decoders use frames over a Unix socket or TCP, "
            "which are ten times faster: see docs/frames.md.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": _schemas(max_budget),
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Needed where the service was started with a file of tokens.",
                }
            },
        },
    }


def _schemas(max_budget: int) -> dict[str, Any]:
    """Return the JSON schemas of all messages."""
    questions = [m.TextQuestion, m.TokensQuestion]
    replies = [m.ProblemReply]
    for operation in OPERATIONS:
        replies += [model for model in (operation.reply, *operation.also.values()) if model]  # type: ignore[misc]
    modes = [(model, "validation") for model in questions] + [
        (model, "serialization") for model in dict.fromkeys(replies)
    ]
    _, schemas = models_json_schema(modes, ref_template=_REF, schema_generator=GenerateJsonSchema)  # type: ignore[arg-type]
    for model in questions:
        budget = schemas["$defs"][model.__name__]["properties"]["budget"]
        budget |= {"maximum": max_budget, "default": min(budget["default"], max_budget)}
    return dict(sorted(schemas["$defs"].items()))


def _operation(operation: ApiOperation) -> dict[str, Any]:
    """Describe one operation."""
    content: dict[str, Any] = {"schema": {"type": "object"}}
    if operation.reply:
        content = {"schema": _reference(operation.reply)}
    elif operation.media != "application/json":
        content = {"schema": {"type": "string"}}
    responses = {"200": {"description": operation.summary, "content": {operation.media: content}}}
    for status, model in operation.also.items():
        responses[str(status)] = _response("Not yet, or no longer.", model)
    for status in operation.problems:
        responses[str(status)] = _problem(status)
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": dict(sorted(responses.items())),
        "security": [] if operation.open else [{"token": []}, {}],
    }
    if operation.method == "post":
        choices = [_reference(m.TextQuestion), _reference(m.TokensQuestion)]
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": {"oneOf": choices}}},
        }
    return described


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}


def _response(description: str, model: type[BaseModel]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _reference(model)}}}


def _problem(status: int) -> dict[str, Any]:
    """Describe an error."""
    response = _response(PROBLEMS[status], m.ProblemReply)
    if status in RETRIED:
        response["headers"] = {
            "Retry-After": {
                "description": "Seconds to wait.",
                "required": True,
                "schema": {"type": "integer", "minimum": 1},
            }
        }
    if status == 401:
        response["headers"] = {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}}
    return response
