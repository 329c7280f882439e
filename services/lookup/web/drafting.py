"""Drafts over HTTP: a JSON question is tokenized, sent to the workers, and the answer decoded to text."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request

from draftstore.errors import TokenizerError, WireError
from draftstore.remote import wire
from draftstore.stores.dresd import store as dresd
from draftstore.text.tokenizer import TextTokenizer
from services.common.guards import ProblemError, read_body
from services.common.permissions import Grant
from services.lookup.limits import SHARED_BUDGET
from services.lookup.web.lexicon import Lexicon
from services.lookup.web.messages import (
    MAX_BODY,
    MAX_NODES,
    DraftReply,
    Question,
    TextQuestion,
    TokensQuestion,
)
from services.lookup.web.texts import encode_text, pack_contexts, show_draft
from services.lookup.web.upstream import Drafted, Upstream

MAX_AT_ONCE = 32
THREADS = 2
MAX_PROBLEMS = 3
"""Maximum problems reported at once."""
ADVICE = "send only the last tokens of a text: they alone decide the draft"
EXAMPLE = {"release": "chat", "text": "The quick brown", "budget": 16}
DENSE = (
    "{release!r} drafts from a model's hidden states, which a text does not hold: ask with the decoder, "
    "`draftstore generate --release {release}`"
)
Spelled = TypeVar("Spelled")
_QUESTION: TypeAdapter[TextQuestion | TokensQuestion] = TypeAdapter(Question)


class DraftDesk:
    """Answers a limited number of draft questions at a time; tokenizes in its own threads."""

    def __init__(
        self,
        upstream: Upstream,
        lexicon: Lexicon,
        most_at_once: int = MAX_AT_ONCE,
        max_budget: int = SHARED_BUDGET,
    ) -> None:
        """Answer with drafts from the workers.

        Args:
            upstream: connection to the workers.
            lexicon: tokenizers of the served stores.
            most_at_once: concurrent questions; more get status 429.
            max_budget: nodes of a draft; a token may name another limit.
        """
        self._upstream = upstream
        self._lexicon = lexicon
        self._most = most_at_once
        self._max_budget = max_budget
        self._busy = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")

    def close(self) -> None:
        """Shut the threads down."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def answer(self, request: Request, grant: Grant) -> DraftReply:
        """Answer one request.

        Args:
            request: request whose body is a question.
            grant: what the sender may ask for.

        Raises:
            ProblemError: the question is invalid or not allowed, there are too many at once, or its release needs
                hidden states.
            RefusedError: a worker refused.
            ServiceAwayError: no worker answers.
        """
        if self._busy >= self._most:
            message = f"{self._most} questions are being answered: try again in a second"
            raise ProblemError(429, message, {"Retry-After": "1"})
        self._busy += 1
        try:
            question = parse_question(await read_body(request, MAX_BODY, ADVICE))
            question = sized(question, grant.max_budget or self._max_budget)
            if not grant.allows(question.release):
                raise ProblemError(403, f"this token is not for the release {question.release!r}")
            if self._lexicon.kind_of(question.release) == dresd.KIND:
                raise ProblemError(409, DENSE.format(release=question.release))
            return await self._draft(question)
        finally:
            self._busy -= 1

    async def _draft(self, question: TextQuestion | TokensQuestion) -> DraftReply:
        """Draft; retry once if the release has moved to another tokenizer meanwhile."""
        tokenizer = self._lexicon.of_release(question.release)
        contexts = await self._contexts(question, tokenizer)
        drafted = await self._ask(question, contexts)
        found = self._lexicon.of_answer(drafted.answer.tokenizer)
        if isinstance(question, TextQuestion) and (tokenizer is None or found is not tokenizer):
            if found is None:
                message = (
                    f"the tokenizer of {question.release!r} is not known here yet: try again in a moment"
                )
                raise ProblemError(503, message, {"Retry-After": "1"})
            contexts = await self._contexts(question, found)
            drafted = await self._ask(question, contexts)
        return await self._in_thread(lambda: _reply(question, contexts, drafted, found))

    async def _ask(self, question: TextQuestion | TokensQuestion, contexts: NDArray[np.int32]) -> Drafted:
        try:
            return await self._upstream.draft(
                question.release, contexts, question.budget, question.min_prob, question.strategy
            )
        except WireError as error:
            raise ProblemError(422, str(error)) from None

    async def _contexts(
        self, question: TextQuestion | TokensQuestion, tokenizer: TextTokenizer | None
    ) -> NDArray[np.int32]:
        """Return the contexts of a question, int32 [batch, width]; an empty one if the tokenizer is unknown."""
        if isinstance(question, TokensQuestion):
            return pack_contexts(question.contexts)
        if tokenizer is None:  # ask anyway: the worker knows whether there is such a release
            return pack_contexts([[]])
        try:
            return await self._in_thread(lambda: encode_text(tokenizer, question.text))
        except TokenizerError as error:
            raise ProblemError(422, f"text: {error}") from None

    async def _in_thread(self, call: Callable[[], Spelled]) -> Spelled:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def sized(question: TextQuestion | TokensQuestion, most: int) -> TextQuestion | TokensQuestion:
    """Return a question whose answer is not too long; without a budget of its own it gets one."""
    if "budget" not in question.model_fields_set:
        question = question.model_copy(update={"budget": min(question.budget, most)})
    contexts = len(question.contexts) if isinstance(question, TokensQuestion) else 1
    if question.budget > most:
        raise ProblemError(422, f"budget: {question.budget:,} nodes, expected at most {most:,}")
    if contexts * question.budget > MAX_NODES:
        raise ProblemError(
            422,
            f"{contexts} contexts with a budget of {question.budget:,} nodes: expected at most {MAX_NODES:,} nodes "
            "for all together; send fewer contexts at once, or ask with frames",
        )
    return question


def parse_question(body: bytes) -> TextQuestion | TokensQuestion:
    """Parse a question."""
    try:
        document = json.loads(body.decode(), parse_float=_number, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProblemError(400, f"the body is not JSON: {error}") from None
    try:
        return _QUESTION.validate_python(document)
    except ValidationError as error:
        raise ProblemError(422, _wrong(document, error)) from None


def _wrong(document: Any, error: ValidationError) -> str:
    """Describe what is wrong with a question."""
    if not isinstance(document, dict):
        return "expected a JSON object, such as " + json.dumps(EXAMPLE)
    details = error.errors(include_url=False, include_context=False, include_input=False)
    problems = [f"{'.'.join(map(str, detail['loc'][1:]))}: {detail['msg']}" for detail in details]
    if not document.keys() & {"text", "contexts"}:
        problems = [problem for problem in problems if not problem.startswith("text:")]
        problems.insert(0, "give `text`, or token ids in `contexts`")
    more = len(problems) - MAX_PROBLEMS
    return "; ".join(problems[:MAX_PROBLEMS]) + (f" (and {more} more)" if more > 0 else "")


def _number(text: str) -> float:
    """Parse a number with a point or an exponent; 20.0 counts as an integer."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _reply(
    question: TextQuestion | TokensQuestion,
    contexts: NDArray[np.int32],
    drafted: Drafted,
    tokenizer: TextTokenizer | None,
) -> DraftReply:
    """Decode an answer to text."""
    answer: wire.DraftAnswer = drafted.answer
    return DraftReply(
        release=question.release,
        strategy=question.strategy,
        build=f"{answer.build:016x}",
        tokenizer=f"{answer.tokenizer:016x}",
        lookup_us=answer.micros,
        round_trip_us=round(drafted.round_trip_us, 1),
        drafts=[show_draft(d, row, tokenizer) for d, row in zip(answer.drafts, contexts, strict=True)],
    )
