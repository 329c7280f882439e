"""What stores are built from: sources that a `draftstore.stores.kind.Builder` can name."""

from typing import Annotated, Literal

from pydantic import Field

from draftstore.options import Options, Shown

TOKENIZER = "A folder with tokenizer.json, that file, or a name on the Hugging Face hub."
TOKENIZERS = ["/models/llama-2", "lmsys/vicuna-7b-v1.5"]


class Workers(Options):
    """How much of this machine a build uses."""

    workers: Annotated[int | None, Shown(unset="all cores")] = Field(
        None, ge=1, le=1024, description="Number of sorting processes and of threads.", examples=[4]
    )


class TextSources(Workers):
    """Sources of a store built from the corpus that the options name (`CorpusOptions`)."""

    tokenizer: Annotated[str, Shown(metavar="T")] = Field(
        min_length=1, description=TOKENIZER, examples=TOKENIZERS
    )


Weights = Annotated[
    Literal["auto", "float32", "float64", "bfloat16", "float16"] | None, Shown(unset="auto; on CPUs float32")
]
"""Data type of a model's weights."""


class Device(Options):
    """Where a model runs."""

    device: Annotated[str | None, Shown(unset="the GPU, if there is one", metavar="D")] = Field(
        None, min_length=1, description="Device: cpu, cuda, cuda:1, ...", examples=["cpu", "cuda", "cuda:1"]
    )


class ModelChoice(Device):
    """A model and where it runs."""

    model: Annotated[str, Shown(metavar="M")] = Field(
        min_length=1,
        description="Model: a directory, a hub name organisation/model, or a GGUF file.",
        examples=["/models/SmolLM2-135M-Instruct", "org/model"],
    )


class ModelSources(ModelChoice):
    """Sources of a store built from the corpus that the options name and a model that reads it."""

    model_dtype: Weights = Field(None, description="Data type of the weights.")
    batch_tokens: Annotated[int | None, Shown(unset="2,048 on CPUs, 16,384 on GPUs", expert=True)] = Field(
        None, ge=1, description="Number of tokens per model batch; fewer take less memory.", examples=[16_384]
    )
