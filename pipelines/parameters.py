"""Parameters of the flows: pydantic types whose descriptions, bounds and examples the web page shows.

Defaults work on a bare machine: the source of Python's standard library as the demonstration corpus, and the
quickstart's tokenizer.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from draftstore.cluster import ADDRESS, LOCAL
from draftstore.search.ngrams import MAX_N
from draftstore.search.sorting import MAX_SEGMENT_TOKENS
from draftstore.stores.crest.counts import DEFAULT_MAX_N
from draftstore.stores.dresd.build import DIMS, MAX_LENGTH, SAMPLE
from draftstore.text.corpus import SOURCE_PATTERNS

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"

Name = Annotated[str, Field(pattern=NAME_PATTERN, examples=["chat-vicuna"])]
ReleaseName = Annotated[
    str,
    Field(
        pattern=r"^([A-Za-z0-9]|\{name\})[A-Za-z0-9._-]{0,62}$",
        examples=["chat-vicuna", "{name}", "{name}-dresd"],
    ),
]
"""The name of a release; `{name}` stands for that of the store."""
TokenizerSource = Annotated[str, Field(min_length=1, examples=["/models/llama-2", "lmsys/vicuna-7b-v1.5"])]
Longest = Annotated[int, Field(ge=1, le=MAX_N, examples=[5])]
SegmentTokens = Annotated[int, Field(ge=2, le=MAX_SEGMENT_TOKENS, examples=[1 << 28])]
Workers = Annotated[int, Field(ge=1, le=1024, examples=[4])]
Cluster = Annotated[
    str,
    Field(pattern=f"^({LOCAL.pattern}|{ADDRESS.pattern})$", examples=["tcp://scheduler:8786", "local:2"]),
]
"""Where jobs run: `draftstore.cluster`."""
HeadRows = Annotated[int, Field(ge=0, le=100_000_000, examples=[1_000_000])]
Rule = Literal["gain", "global", "combined", "single"]
Ngrams = Annotated[int, Field(ge=1, le=1_000_000_000, examples=[100_000])]
MaxBytes = Annotated[int, Field(ge=16_384, examples=[100_000_000])]
Gate = Literal["tokenizer", "model", "kind", "strategy", "corpus", "tokens", "bad-records", "replay"]
"""Names of `schema.gates.CHECKS`."""
Force = Annotated[list[Gate], Field(examples=[["tokens"]])]
Keep = Annotated[int, Field(ge=1, examples=[3])]
ModelSource = Annotated[str, Field(min_length=1, examples=["/models/SmolLM2-135M-Instruct", "org/model"])]
Weights = Literal["auto", "float32", "float64", "bfloat16", "float16"]
Device = Annotated[str, Field(min_length=1, examples=["cpu", "cuda", "cuda:1"])]
Dims = Annotated[int, Field(ge=1, le=65_536, examples=[64])]
Vectors = Literal["float16", "int8"]
Window = Annotated[int, Field(ge=2, examples=[1024])]
Sample = Annotated[int, Field(ge=2, examples=[1_000_000])]
BatchTokens = Annotated[int, Field(ge=1, examples=[16_384])]
Batch = Annotated[int, Field(ge=1, examples=[64])]
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
        description="Key or column of a record's text; a conversation under `messages` is found without it.",
        examples=["text", "content"],
    )
    glob: list[str] = Field(
        default=[],
        description="Files of a folder to read, by name or relative path. None: text and source files.",
        examples=[["*.md", "src/**/*.py"]],
    )
    strict: bool = Field(default=False, description="Fail at the first bad record, instead of counting it.")
    allow_truncated: bool = Field(
        default=False,
        description="Build also from files that are cut short or damaged, up to that place, instead of failing.",
    )
    rehash: bool = Field(
        default=False,
        description="Read large files to see whether they changed, even where size and times say that they did not.",
    )

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return which files of a folder are read."""
        return tuple(self.glob) or SOURCE_PATTERNS


class Distilling(BaseModel):
    """The CREST store that is cut from a collection's REST store, and when."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    after: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Trees are cut again once this share of the documents is new since, and when documents went. "
        "0: at every change.",
    )
    max_n: Longest = Field(default=DEFAULT_MAX_N, description="Most tokens of an n-gram.")
    ngrams: Ngrams | None = Field(
        default=None,
        description="How many n-grams are kept; give this or max_bytes. None of both: 100,000.",
    )
    max_bytes: MaxBytes | None = Field(default=None, description="Most bytes of the kept trees on disk.")
    backends: Backends = Field(default=["lmdb"], description="Where the trees lie.")
    head: HeadRows = Field(
        default=100_000, description="How many n-grams of each n go into the database with their text."
    )


class Dense(BaseModel):
    """The DReSD store of a collection's documents, and when it is made again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelSource = Field(
        description="A folder, or a name on the Hugging Face hub. Its tokenizer must be the collection's."
    )
    after: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="The model reads all documents again once this share of them is new since, and when documents "
        "went. 0: at every change.",
    )
    dims: Dims = Field(default=DIMS, description="Numbers of a vector, to which hidden states are projected.")
    dtype: Vectors = Field(default="float16", description="Type of these numbers: int8 takes half the space.")
    max_length: Window = Field(
        default=MAX_LENGTH, description="Most tokens that the model reads of a text at once."
    )
    sample: Sample = Field(default=SAMPLE, description="Most hidden states that the projection is fitted to.")
    batch_tokens: BatchTokens | None = Field(
        default=None,
        description="Most tokens that the model reads in one batch. None: 2,048 on CPUs, 16,384 on GPUs.",
    )
    model_dtype: Weights | None = Field(
        default=None,
        description="Type of the model's weights. None: what the files say, on a CPU float32.",
    )
    device: Device | None = Field(
        default=None, description="Where the model runs. None: the GPU, if there is one."
    )


class Questions(BaseModel):
    """Prompts for a model, and how it answers them; or answers in logs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: list[Path] = Field(
        default=[],
        description="JSON Lines files on the worker's machine with `prompt`, `messages` or `text`.",
        examples=[["/data/prompts.jsonl.zst"]],
    )
    logs: list[Path] = Field(
        default=[],
        description="Response logs of decoding workers: the answers of this model in them are taken over.",
        examples=[["/data/answers.jsonl", "/data/answers.1.jsonl"]],
    )
    logged_as: str | None = Field(
        default=None, description="Name of the model in these logs. None: its own.", examples=["chat"]
    )
    max_new_tokens: int = Field(default=128, ge=1, description="Maximum number of tokens in an answer.")
    temperature: float = Field(
        default=0.0, ge=0, description="Temperature of sampling; 0 always takes the most likely token."
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Draw from the most likely tokens, up to this probability mass."
    )
    samples: int = Field(
        default=1, ge=1, description="Number of answers to each prompt; several need a temperature above 0."
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of the random numbers.")
    max_prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Prompts with more tokens are skipped. None: what the model has room for.",
    )
    limit: int | None = Field(default=None, ge=1, description="Maximum number of prompts. None: all.")
    system: str | None = Field(
        default=None, description="System message for conversations without one. None: no message."
    )
    chat: bool | None = Field(
        default=None,
        description="Ask texts in the chat template, or continue them as they are. None: the template if there is one.",
    )
    strict: bool = Field(default=False, description="Fail at the first bad record, instead of counting it.")


DEFAULT_CORPUS = Corpus()
DEFAULT_DISTILLING = Distilling()
