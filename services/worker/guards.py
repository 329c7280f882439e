"""HTTP guard and authentication of the worker, with errors in OpenAI's format."""

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from services.common import guards
from services.common.permissions import Grant, Permissions
from services.worker.problems import ApiError

BODY_SECONDS = 30.0
"""Time limit in seconds for a body to arrive."""


class WorkerGuard(guards.Guard):
    """The guard of a worker; clients that disconnect before the request is complete get no answer."""

    what = "worker"
    quiet = (ClientDisconnect,)

    def refusal(self, status: int, message: str) -> Response:
        """Return an error in OpenAI's format."""
        return ApiError(status, message).response()


def identify(request: Request, permissions: Permissions, model: str) -> Grant:
    """Return the sender's grant.

    Args:
        request: HTTP request with a bearer token, where one is needed.
        permissions: known tokens.
        model: requested model; a token covers it like a release of that name.

    Raises:
        ApiError: the token is missing, unknown, or does not cover the model.
    """
    given = guards.bearer_token(request)
    grant = permissions.identify(given)
    if grant is None:
        found = "an unknown bearer token" if given else "no bearer token"
        wanted = "send `Authorization: Bearer TOKEN` (OpenAI's clients: api_key), see `draftstore tokens new`"
        realm = {"WWW-Authenticate": 'Bearer realm="draftstore"'}
        raise ApiError(401, f"{found}: {wanted}", code="invalid_api_key", headers=realm)
    if not grant.allows(model):
        raise ApiError(403, f"this token is not for {model!r}", code="model_not_allowed")
    return grant


async def read_body(request: Request, most: int) -> bytes:
    """Return the body of a JSON request.

    Raises:
        ApiError: the body has another type, exceeds `most` bytes, or arrives too slowly.
    """
    try:
        return await guards.read_body(request, most, "send a shorter text", BODY_SECONDS)
    except guards.ProblemError as error:
        code = "body_too_long" if error.status == 413 else None
        raise ApiError(error.status, error.message, code=code, headers=error.headers) from None
