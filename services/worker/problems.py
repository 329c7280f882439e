"""Errors in OpenAI's format."""

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from services.common.guards import ProblemError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
"""Error types by status; the default is `invalid_request_error`."""


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
        """Describe an error.

        Args:
            status: HTTP status.
            message: what was found, what was expected, what to do.
            param: the invalid parameter.
            code: error code for programs.
            retry_after: seconds to wait before a retry.
            headers: additional headers.
        """
        super().__init__(status, message, headers)
        self.param = param
        self.code = code
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))

    def body(self) -> dict[str, Any]:
        """Return the JSON document."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the HTTP response."""
        body = json.dumps(self.body(), ensure_ascii=False).encode(errors="backslashreplace")
        return Response(body, self.status, {"Cache-Control": "no-store", **self.headers}, "application/json")


def explain(error: Exception) -> ApiError:
    """Return the client's view of an internal error: only what it can act on, since details may be private."""
    if type(error).__name__ == "OutOfMemoryError":
        message = "the device has no memory left for this request: send a shorter one"
        return ApiError(503, message, code="out_of_memory", retry_after=1)
    return ApiError(500, "an error inside the worker: its log says more")
