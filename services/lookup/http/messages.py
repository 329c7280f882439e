"""JSON messages of the lookup service as pydantic models."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from draftstore.trees.frontier import BUDGET, MAX_BUDGET
from services.lookup.settings import SHARED_BUDGET

MAX_BODY = 256 * 1024
"""Maximum bytes of a body."""
MAX_TEXT = 65_536
"""Maximum characters; only the last few matter."""
MAX_CONTEXTS = 64
MAX_CONTEXT = 4096
MAX_NODES = MAX_CONTEXTS * SHARED_BUDGET
"""Maximum nodes of all drafts of one answer: as JSON each takes 70 bytes and 14 microseconds."""

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Context = Annotated[list[TokenId], Field(max_length=MAX_CONTEXT)]


class Question(BaseModel):
    """A request for drafts, for one text or several contexts; other keys and types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    release: str = Field(min_length=1, max_length=255, description="A name listed by `/v1/releases`.")
    text: str = Field(default_factory=str, max_length=MAX_TEXT, description="The text so far, or its end.")
    contexts: list[Context] = Field(
        default_factory=list, min_length=1, max_length=MAX_CONTEXTS, description="Or token ids."
    )
    strategy: str = Field("", max_length=255, description="A strategy of the release; empty for its default.")
    budget: int = Field(BUDGET, ge=0, le=MAX_BUDGET, description="Maximum nodes of a tree.")
    min_prob: float = Field(0.0, ge=0.0, le=1.0, description="Minimum probability of a node.")

    @model_validator(mode="after")
    def _check_one_is_given(self) -> Self:
        if len(self.model_fields_set & {"text", "contexts"}) != 1:
            raise PydanticCustomError("question", "give `text`, or token ids in `contexts`")
        return self


class Token(BaseModel):
    """One token."""

    token: TokenId = Field(description="Its id.")
    text: str | None = Field(description="The text that it adds; null for a part of a character.")
    shown: str = Field(description="The same with visible blanks, line breaks and control characters.")


class Node(Token):
    """A node of a draft tree."""

    parent: int = Field(ge=-1, description="Index of its parent in `nodes`; -1 is the end of the text.")
    prob: float = Field(ge=0.0, le=1.0, description="Probability of acceptance; never above its parent's.")


class DraftedContext(BaseModel):
    """The draft for one context."""

    match_length: int = Field(ge=0, description="Tokens of the longest match in the store.")
    match_count: int = Field(ge=0, description="Occurrences of that match.")
    matched_text: str | None = Field(description="The matching end of the text; null if it cuts a character.")
    context: list[Token] = Field(description="The last tokens of the context.")
    nodes: list[Node] = Field(description="Parents before children, in descending probability.")


class DraftReply(BaseModel):
    """One draft for each context, all from one build."""

    release: str
    strategy: str = Field(description="As requested; empty for the release's default.")
    build: str = Field(description="The first 16 hexadecimal digits of the digest of the build's manifest.")
    tokenizer: str = Field(description="The first 16 hexadecimal digits of the tokenizer's fingerprint.")
    lookup_us: int = Field(ge=0, description="Microseconds of the lookup in the store.")
    drafts: list[DraftedContext]


class ReadyReply(BaseModel):
    """Whether drafts are served."""

    status: Literal["ready", "not ready"]
    releases: list[str] = Field(description="Releases that are open.")
    problems: list[str] = Field(description="What is missing, as sentences.")


class Problem(BaseModel):
    """Why a request failed."""

    status: int = Field(ge=400, le=599, description="The HTTP status.")
    message: str = Field(description="What was found, what was expected, what to do.")


class ProblemReply(BaseModel):
    """The body of every answer that is an error."""

    error: Problem
