"""JSON messages of the lookup service as pydantic models, from which the OpenAPI document is generated."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag

from draftstore.trees.frontier import MAX_BUDGET
from services.lookup.limits import SHARED_BUDGET

MAX_BODY = 256 * 1024
"""Maximum bytes of a body."""
MAX_TEXT = 65_536
"""Maximum characters; only the last few matter."""
MAX_CONTEXTS = 64
MAX_CONTEXT = 4096
MAX_NODES = MAX_CONTEXTS * SHARED_BUDGET
"""Maximum nodes of all drafts of one answer: as JSON each takes 70 bytes and 14 microseconds."""

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0.0)]


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(frozen=True)


class _Question(Message):
    """What every question for drafts says; other keys, and values of other types, are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    release: str = Field(
        min_length=1,
        max_length=255,
        description="Name of a release or a store, as `/v1/releases` lists them.",
    )
    strategy: str = Field(
        "", max_length=255, description="A drafting strategy of the release; empty for its default."
    )
    budget: int = Field(
        64,
        ge=0,
        le=MAX_BUDGET,
        description=f"Most nodes of a tree; all trees of an answer have at most {MAX_NODES:,}.",
    )
    min_prob: float = Field(0.0, ge=0.0, le=1.0, description="Least probability of a node.")


class TextQuestion(_Question):
    """Draft for one text, which the service tokenizes with the tokenizer of the release, without BOS."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"release": "chat", "text": "The quick brown", "budget": 16}]}
    )

    text: str = Field(max_length=MAX_TEXT, description="The text so far; its end is enough.")


class TokensQuestion(_Question):
    """Draft for a batch of contexts of token ids."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"release": "chat", "contexts": [[450, 4996, 17354]], "budget": 16}]}
    )

    contexts: list[Annotated[list[TokenId], Field(max_length=MAX_CONTEXT)]] = Field(
        min_length=1, max_length=MAX_CONTEXTS, description="The last token ids of each text."
    )


def _kind_of_question(value: Any) -> Literal["text", "contexts"]:
    """Tell questions apart by a key that only one of them has."""
    return "contexts" if isinstance(value, dict) and "contexts" in value else "text"


Question = Annotated[
    Annotated[TextQuestion, Tag("text")] | Annotated[TokensQuestion, Tag("contexts")],
    Discriminator(_kind_of_question),
]


class Token(Message):
    """One token."""

    token: TokenId = Field(description="Its id.")
    text: str | None = Field(
        description="What it adds inside a text; null where it holds a part of a character, or is unknown."
    )
    shown: str = Field(description="The same with visible blanks, line breaks and control characters.")


class Node(Token):
    """A node of a draft tree."""

    parent: int = Field(ge=-1, description="Index of its parent in `nodes`; -1 is the end of the text.")
    prob: Share = Field(description="Estimated chance that the node is accepted; never above its parent's.")


class DraftedContext(Message):
    """The draft for one context."""

    match_length: Count = Field(description="Tokens of the longest match in the store.")
    match_count: Count = Field(description="Its occurrences.")
    matched_text: str | None = Field(
        description="The end of the text that matched; null where it cannot be told apart from its surroundings."
    )
    context: list[Token] = Field(description="The last tokens of the context.")
    nodes: list[Node] = Field(description="Parents before children, in descending probability.")


class DraftReply(Message):
    """One draft for each context, all from one build."""

    release: str
    strategy: str = Field(description="As asked for; empty is the default of the release.")
    build: str = Field(description="The first 16 hexadecimal digits of the digest of the build's manifest.")
    tokenizer: str = Field(description="The first 16 hexadecimal digits of the tokenizer's fingerprint.")
    lookup_us: Amount = Field(description="Microseconds in the store.")
    round_trip_us: Amount = Field(description="Microseconds from this server to a worker process and back.")
    drafts: list[DraftedContext]


class ReleaseEntry(Message):
    """One release or store that is served."""

    model_config = ConfigDict(extra="allow")

    name: str
    kind: str = Field(description="`rest`, `crest` or `dresd`.")
    build: str = Field(description="The first 16 hexadecimal digits of the digest of the build's manifest.")
    tokenizer: dict[str, JsonValue] = Field(description="Name and fingerprint.")
    vocab_size: int = Field(ge=1)
    target_model: str | None = Field(
        None, description="The model that the store is bound to; null where any will do."
    )
    strategies: list[str] = Field(description="What `strategy` of a question may be.")
    default_strategy: str


class ReleasesReply(Message):
    """What is served to the one who asks."""

    releases: list[ReleaseEntry]


class FigureRow(Message):
    """What one release, or all of them, did in the window, and since the start."""

    queries_per_s: Amount
    contexts_per_s: Amount
    failures_per_s: Amount
    miss_rate: Share | None = Field(
        description="Share of contexts without a draft; null without any context."
    )
    match_length: Amount | None = Field(description="Mean, in tokens.")
    nodes: Amount | None = Field(description="Mean nodes of a tree.")
    p50_us: Amount | None = Field(description="Median time of a lookup, from a histogram.")
    p99_us: Amount | None
    queries: Count = Field(description="Since the start.")
    contexts: Count
    misses: Count
    failures: Count
    swaps: Count = Field(description="Times that a build took the place of another.")


class ReleaseFigures(FigureRow):
    """The figures of one release."""

    name: str


class FiguresReply(Message):
    """Live figures of the service."""

    window_s: Amount = Field(description="Seconds that rates, shares and percentiles are taken over.")
    uptime_s: Amount
    workers: Count
    workers_ready: Count
    worker_restarts: Count
    connections: Count
    in_flight: Count = Field(description="Requests that are being answered.")
    waiting: Count = Field(description="Contexts that wait for their turn.")
    total: FigureRow
    releases: list[ReleaseFigures]
    history: list[Amount] = Field(description="Queries a second in each of the last seconds, oldest first.")


class HealthReply(Message):
    """The process that answers HTTP is alive."""

    status: Literal["alive"] = "alive"


class ReadyReply(Message):
    """Whether drafts are served."""

    status: Literal["ready", "not ready"]
    releases: list[str] = Field(description="Releases that are open in every worker process.")
    problems: list[str] = Field(description="What is missing, in sentences.")


class Problem(Message):
    """Why a request failed."""

    status: int = Field(ge=400, le=599, description="The HTTP status.")
    message: str = Field(description="What was found, what was expected, what to do.")


class ProblemReply(Message):
    """The body of every answer that is an error."""

    error: Problem
