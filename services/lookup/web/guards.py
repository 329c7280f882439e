"""What stands before every HTTP request of the lookup service, with errors in the one form that all of them have."""

from collections.abc import Mapping

from starlette.responses import Response

from services.common import guards
from services.lookup.web.messages import Problem, ProblemReply


class LookupGuard(guards.Guard):
    """The guard of the lookup service."""

    def refusal(self, status: int, message: str) -> Response:
        """Return an error as all of them are."""
        return problem_response(status, message)


def problem_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error in the form that all of them have."""
    body = ProblemReply(error=Problem(status=status, message=message)).model_dump_json()
    return Response(body, status, {"Cache-Control": "no-store", **(headers or {})}, "application/json")
