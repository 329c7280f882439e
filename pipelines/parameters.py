"""What the flows are asked for: pydantic types whose descriptions, bounds and examples the web page shows.

Defaults work on a bare machine: without a corpus the source of Python's standard library is read, without a tokenizer
the one of the quickstart is taken.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from draftstore.corpus import SOURCE_PATTERNS
from draftstore.ngrams import MAX_N
from draftstore.sorting import MAX_SEGMENT_TOKENS

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"

Name = Annotated[str, Field(pattern=NAME_PATTERN, examples=["chat-vicuna", "default"])]
TokenizerSource = Annotated[str, Field(min_length=1, examples=["/models/llama-2", "lmsys/vicuna-7b-v1.5"])]
Longest = Annotated[int, Field(ge=1, le=MAX_N, examples=[5])]
SegmentTokens = Annotated[int, Field(ge=2, le=MAX_SEGMENT_TOKENS, examples=[1 << 28])]
Workers = Annotated[int, Field(ge=1, le=1024, examples=[4])]
HeadRows = Annotated[int, Field(ge=0, le=100_000_000, examples=[1_000_000])]
Rule = Literal["gain", "global", "combined", "single"]
Ngrams = Annotated[int, Field(ge=1, le=1_000_000_000, examples=[100_000])]
MaxBytes = Annotated[int, Field(ge=16_384, examples=[100_000_000])]
Backends = Annotated[
    list[Literal["lmdb", "postgres"]], Field(min_length=1, max_length=2, examples=[["lmdb"]])
]


class Corpus(BaseModel):
    """The texts to build from, and how they are read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    paths: list[Path] = Field(
        default=[],
        description="Files and folders on the worker's machine: JSON Lines, Parquet, text and source code. "
        "None: the source of Python's standard library there.",
        examples=[["/data/chats.jsonl.zst", "/data/docs"]],
    )
    column: str = Field(
        default="text",
        min_length=1,
        description="Key or column of the text in records; a conversation under `messages` is found by itself.",
        examples=["text", "content"],
    )
    glob: list[str] = Field(
        default=[],
        description="Which files of a folder, by name or relative path. None: text and source files.",
        examples=[["*.md", "src/**/*.py"]],
    )
    strict: bool = Field(default=False, description="Fail at the first bad record, instead of counting it.")

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return which files of a folder are read."""
        return tuple(self.glob) or SOURCE_PATTERNS


DEFAULT_CORPUS = Corpus()
