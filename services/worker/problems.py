"""Errors in OpenAI's format, and the checks of HTTP requests that lead to them."""

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.common import guards
from services.common.guards import ProblemError
from services.common.permissions import Grant, Permissions

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""Error types by status; others are `server_error` or `invalid_request_error`."""
BODY_SECONDS = 30.0
"""Time limit in seconds for a body to arrive."""


class ApiError(ProblemError):
    """A request that fails with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Describe an error, with the invalid parameter, a code for programs, and seconds to wait."""
        super().__init__(status, message, headers)
        self.param = param
        self.code = code
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))

    def body(self) -> dict[str, Any]:
        """Return the JSON document."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the HTTP response."""
        body = json.dumps(self.body(), ensure_ascii=False).encode(errors="backslashreplace")
        return Response(body, self.status, {"Cache-Control": "no-store", **self.headers}, "application/json")


def identify(request: Request, permissions: Permissions, model: str) -> Grant:
    """Return the sender's grant; a token covers a model like a release of that name."""
    try:
        grant = guards.identify(request, permissions)
    except ProblemError as error:
        raise ApiError(401, error.message, code="invalid_api_key", headers=error.headers) from None
    if not grant.allows(model):
        raise ApiError(403, f"this token is not for {model!r}", code="model_not_allowed")
    return grant


async def read_body(request: Request, most: int) -> bytes:
    """Return the body of a JSON request of at most `most` bytes."""
    try:
        return await guards.read_body(request, most, "send a shorter text", BODY_SECONDS)
    except ProblemError as error:
        code = "body_too_long" if error.status == 413 else None
        raise ApiError(error.status, error.message, code=code, headers=error.headers) from None
