"""Settings of one run of the worker, except for its model and drafters."""

from pathlib import Path
from typing import Annotated

from pydantic import ByteSize, Field

from draftstore.options import EXPERT, Bytes, Shown
from services.common.addresses import LOOPBACK, Access, ListenAddress


class WorkerSettings(Access):
    """Settings of one run; `body` is the maximum bytes of a request."""

    name: Annotated[
        str | None,
        Shown(flags=("--name", "--served-model-name"), unset="that of the directory, the file or the hub"),
    ] = Field(None, description="Name of the model for clients.")
    wait: Annotated[bool, Shown(unset="give up after 10 seconds")] = Field(
        False, description="Wait for the lookup service to serve the release."
    )
    host: str = Field(LOOPBACK, description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65_535, description="Port to listen on; 0 picks a free one.")
    max_batch: Annotated[int, Shown(flags=("--max-batch", "--max-num-seqs"))] = Field(
        8, ge=1, le=64, description="Maximum number of answers decoded together; 1 decodes them one by one."
    )
    max_tokens_in_flight: Annotated[int | None, Shown(unset="what fits in memory", expert=True)] = Field(
        None, ge=1, description="Maximum tokens of these answers and their prompts together."
    )
    queue: Annotated[int, EXPERT] = Field(
        16,
        ge=0,
        le=10_000,
        description="Number of answers that may wait while others are decoded; the next request gets 429.",
    )
    max_tokens: int = Field(2048, ge=1, description="Maximum number of tokens in an answer.")
    max_choices: Annotated[int, EXPERT] = Field(
        32, ge=1, description="Maximum number of answers to a request: n times its prompts."
    )
    grace_seconds: Annotated[float, EXPERT] = Field(
        30.0, ge=0, description="Seconds for accepted requests to finish when the worker stops."
    )
    response_log: Annotated[Path | None, Shown(variable="DRAFTSTORE_RESPONSE_LOG")] = Field(
        None, description="Keep finished answers with their prompts, as a corpus in JSON Lines: see PRIVACY."
    )
    response_log_bytes: Annotated[Bytes, Shown(unset="1GB", expert=True)] = Field(
        ByteSize(10**9),
        description="Maximum size of the log; its older half (FILE with .1 before the suffix) is deleted first.",
    )
    body: Annotated[int, Shown(hidden=True)] = 4 << 20

    @property
    def endpoint(self) -> ListenAddress:
        """Where the worker listens."""
        return ListenAddress(self.host, self.port)
