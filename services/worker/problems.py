"""Errors in OpenAI's format."""

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from services.common.http import ProblemError

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""Error types by status; others are `server_error` or `invalid_request_error`."""
CODES = {401: "invalid_api_key", 413: "body_too_long"}
"""Codes for programs of errors that `services.common.http` finds, by status."""


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

    @classmethod
    def of(cls, problem: ProblemError) -> "ApiError":
        """Return an error of `services.common.http` in this format."""
        if isinstance(problem, cls):
            return problem
        code = CODES.get(problem.status)
        return cls(problem.status, problem.message, code=code, headers=problem.headers)

    def body(self) -> dict[str, Any]:
        """Return the JSON document."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the HTTP response."""
        body = json.dumps(self.body(), ensure_ascii=False).encode(errors="backslashreplace")
        return Response(body, self.status, {"Cache-Control": "no-store", **self.headers}, "application/json")
