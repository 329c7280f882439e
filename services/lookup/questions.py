"""Answers to draft requests in JSON: each is parsed, tokenized, looked up and formatted in a thread.

That takes milliseconds of Python, while the event loop answers decoders in a tenth of a millisecond.
"""

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from draftstore.options import sentence
from draftstore.remote.wire import DraftRequest, Status
from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.batch import Draft
from draftstore.trees.frontier import BUDGET, MAX_BUDGET
from services.common.http import ProblemError
from services.common.permissions import Grant
from services.lookup.drafting import Drafted, DraftService, RequestRefusedError
from services.lookup.settings import SHARED_BUDGET

AT_ONCE = 32
"""Maximum questions in progress; more get status 429."""
THREADS = 2
MAX_PROBLEMS = 3
"""Maximum problems reported at once."""
STATUSES = {
    Status.BAD_REQUEST: 400, Status.FORBIDDEN: 403, Status.NOT_FOUND: 404, Status.TOO_LARGE: 413,
    Status.BUSY: 429, Status.UNAVAILABLE: 503,
}  # fmt: skip
LAST = 64
"""Tokens of a context to look up: drafters use 16, with room to grow."""
SHOWN = 32
"""Maximum tokens of the context in an answer."""
MAX_BODY = 256 * 1024
"""Maximum bytes of a body."""
MAX_TEXT = 65_536
"""Maximum characters; only the last few matter."""
MAX_CONTEXTS = 64
MAX_CONTEXT = 4096
MAX_NODES = MAX_CONTEXTS * SHARED_BUDGET
"""Maximum nodes of all drafts of one answer: as JSON each takes 70 bytes and 14 microseconds."""
_NO_CONTEXTS = np.empty((0, 0), np.int32)

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Context = Annotated[list[TokenId], Field(max_length=MAX_CONTEXT)]


class Question(BaseModel):
    """A request for drafts, for one text or several contexts; other keys and types are refused. See docs/service.md."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    release: str = Field(min_length=1, max_length=255)
    text: str = Field(default_factory=str, max_length=MAX_TEXT)
    contexts: list[Context] = Field(default_factory=list, min_length=1, max_length=MAX_CONTEXTS)
    strategy: str = Field("", max_length=255)
    budget: int = Field(BUDGET, ge=0, le=MAX_BUDGET)
    min_prob: float = Field(0.0, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def _check_one_is_given(self) -> Self:
        if len(self.model_fields_set & {"text", "contexts"}) != 1:
            raise PydanticCustomError("question", "give `text`, or token ids in `contexts`")
        return self


class Token(BaseModel):
    """One token: the text that it adds, None for a part of a character; and with visible blanks and line breaks."""

    token: TokenId
    text: str | None
    shown: str


class Node(Token):
    """A node of a draft tree; its parent is an index in `nodes`, or -1: the end of the text."""

    parent: int = Field(ge=-1)
    prob: float = Field(ge=0.0, le=1.0)


class DraftedContext(BaseModel):
    """The draft for one context, of which the last tokens are repeated.

    `matched_text` is the end of the text that matches, None if it cuts a character. Nodes are in canonical order.
    """

    match_length: int = Field(ge=0)
    match_count: int = Field(ge=0)
    matched_text: str | None
    context: list[Token]
    nodes: list[Node]


class DraftReply(BaseModel):
    """One draft for each context, all from one build: the strategy as requested, and the microseconds of the lookup."""

    release: str
    strategy: str
    build: str
    tokenizer: str
    lookup_us: int = Field(ge=0)
    drafts: list[DraftedContext]


class Questions:
    """Answers a limited number of questions at a time, in separate threads: decoders do not wait for them."""

    def __init__(self, drafting: DraftService) -> None:
        self._drafting = drafting
        self._open = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="questions")

    async def answer(self, body: bytes, grant: Grant) -> bytes:
        """Return the `DraftReply` to a question, both as JSON; ProblemError if there is none."""
        if self._open >= AT_ONCE:
            message = f"{self._open} questions are being answered: try again in a second"
            raise ProblemError(429, message, retry_after=1)
        self._open += 1
        try:
            loop = asyncio.get_running_loop()
            drafted, data = await loop.run_in_executor(self._threads, self._answer, body, grant)
        except RequestRefusedError as refused:
            self._drafting.count_failure(refused)
            failure = refused.failure
            status = STATUSES.get(failure.status, 500)
            raise ProblemError(status, failure.message, retry_after=failure.retry_after or None) from None
        finally:
            self._open -= 1
        self._drafting.count(drafted, len(body), len(data), drafted.micros / 1e6)
        return data

    def _answer(self, body: bytes, grant: Grant) -> tuple[Drafted, bytes]:
        most = self._drafting.limits.shared_budget
        question = parse_question(body, grant.max_budget or most)
        request = DraftRequest(
            question.release, question.strategy, _NO_CONTEXTS, question.budget, question.min_prob, None
        )
        lookup = self._drafting.allow(request, grant, most)
        if lookup.served.hidden_size:
            raise ProblemError(
                409,
                f"{question.release!r} drafts from a model's hidden states, which a text does not contain: use the "
                f"decoder, `draftstore generate --release {question.release}`",
            )
        if (tokenizer := lookup.served.text) is None:
            raise ProblemError(
                409, f"{question.release!r} is a live store, which has no tokenizer: use the binary protocol"
            )
        contexts = pack_contexts(question.contexts or [tokenizer.encode(question.text, bos=False).tolist()])
        drafted = self._drafting.draft(lookup._replace(request=request._replace(contexts=contexts)))
        drafts = zip(drafted.drafts.drafts(), contexts, strict=True)
        reply = DraftReply(
            release=question.release,
            strategy=question.strategy,
            build=f"{lookup.served.build:016x}",
            tokenizer=f"{lookup.served.tokenizer:016x}",
            lookup_us=drafted.micros,
            drafts=[show_draft(draft, context, tokenizer) for draft, context in drafts],
        )
        return drafted, reply.model_dump_json().encode()


def parse_question(body: bytes, most: int) -> Question:
    """Return the question in a body; its default budget is capped at `most` nodes."""
    try:
        question = Question.model_validate(json.loads(body.decode(), parse_float=_number))
    except ValidationError as error:
        raise ProblemError(422, sentence(error, values=False, most=MAX_PROBLEMS)) from None
    except (ValueError, RecursionError) as error:
        raise ProblemError(400, f"the body is not JSON: {error}") from None
    if "budget" not in question.model_fields_set:
        question = question.model_copy(update={"budget": min(question.budget, most)})
    if question.budget > most:
        raise ProblemError(422, f"budget: {question.budget:,} nodes, expected at most {most:,}")
    if (nodes := len(question.contexts) * question.budget) > MAX_NODES:
        message = f"contexts: {nodes:,} nodes in total, expected at most {MAX_NODES:,}: send fewer contexts"
        raise ProblemError(422, message)
    return question


def _number(text: str) -> float:
    """Parse a number with a point or an exponent; 20.0 counts as an integer."""
    number = float(text)
    return int(number) if number.is_integer() else number


def pack_contexts(contexts: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return the last ids of each context, right-aligned and padded with -1: int32 [batch, LAST]."""
    packed = np.full((len(contexts), LAST), -1, np.int32)
    for row, ids in zip(packed, contexts, strict=True):
        row[LAST - len(ids[-LAST:]) :] = ids[-LAST:]
    return packed


def show_draft(draft: Draft, context: NDArray[np.int32], tokenizer: TextTokenizer) -> DraftedContext:
    """Return a draft in readable form."""
    exact, shown = tokenizer.exact_text, tokenizer.token_text
    ids: list[int] = context[context >= 0].tolist()
    tree = draft.tree
    rows = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist(), strict=True)
    return DraftedContext(
        match_length=draft.match_length,
        match_count=draft.match_count,
        matched_text=_matched_text(ids[len(ids) - draft.match_length :], tokenizer),
        context=[Token(token=i, text=exact(i), shown=shown(i)) for i in ids[-SHOWN:]],
        nodes=[
            Node(token=i, text=exact(i), shown=shown(i), parent=parent, prob=round(prob, 6))
            for i, parent, prob in rows
        ],
    )


def _matched_text(ids: list[int], tokenizer: TextTokenizer) -> str | None:
    """Return the text of ids; None if it begins or ends inside a character."""
    pieces = [tokenizer.exact_text(token) for token in ids]
    if None in pieces:  # tokens that share a character decode only together
        text = tokenizer.decode(ids)
        return None if "\ufffd" in text else text
    return "".join(piece for piece in pieces if piece is not None)
