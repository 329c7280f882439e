"""The HTTP guard of the lookup service, and its error format."""

from collections.abc import Mapping

from starlette.responses import Response

from services.common import guards
from services.lookup.web.messages import Problem, ProblemReply


class LookupGuard(guards.Guard):
    """The guard of the lookup service."""

    def refusal(self, status: int, message: str) -> Response:
        """Return an error in the service's error format."""
        return problem_response(status, message)


def problem_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error in the service's error format."""
    body = ProblemReply(error=Problem(status=status, message=message)).model_dump_json()
    return Response(body, status, {"Cache-Control": "no-store", **(headers or {})}, "application/json")
