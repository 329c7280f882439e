"""Parameters of the flows: their own, and how a flow gets all of them from models of options.

Prefect's page shows type, bounds, description and example of each. Defaults work on a bare machine: the source of
Python's standard library as the demonstration corpus, and the quickstart's tokenizer.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

from prefect import Flow, flow
from prefect.runtime import flow_run
from prefect.states import Failed
from pydantic import Field
from pydantic.fields import FieldInfo

from draftstore.answers.responses import Batching, ResponseOptions
from draftstore.errors import DraftstoreError
from draftstore.options import NAME, Options, Shown
from draftstore.stores.kind import TOKENIZER, TOKENIZERS
from draftstore.text.tokenizing import CORPUS, CorpusOptions, ReadOptions
from schema.catalogue.gates import CHECKS

Name = Annotated[str, Field(pattern=f"^{NAME}$", examples=["chat-vicuna"])]
Gate = Annotated[str, Field(pattern=f"^({'|'.join(CHECKS)})$", json_schema_extra={"enum": [*CHECKS]})]


class CorpusFiles(ReadOptions):
    """The texts to build from and how they are read."""

    paths: list[Path] = Field(
        default=[],
        description=f"On the worker's machine. {CORPUS} None: the source of Python's standard library there.",
        examples=[["/data/chats.jsonl.zst", "/data/docs"]],
    )


class BuildInput(Options):
    """What a flow builds and from which texts."""

    name: Name | None = Field(
        None, description="Name of the store and of its folder. None: demo, if no corpus is named."
    )
    corpus: CorpusFiles = Field(
        CorpusFiles(),
        description="The texts and how they are read. None named: the source of Python's standard library.",
    )


class Tokenization(Options):
    """How texts are tokenized."""

    tokenizer: str | None = Field(
        None, min_length=1, description=f"{TOKENIZER} None: an installed one.", examples=TOKENIZERS
    )


class StoredNgrams(Options):
    """Which counts go into the database."""

    head: int = Field(
        100_000,
        ge=0,
        le=100_000_000,
        description="How many of the most common n-grams of each n go into the database with their text.",
        examples=[100_000],
    )


class ModelAnswers(Batching):
    """A model's answers as a corpus."""

    questions: ResponseOptions | None = Field(
        None,
        description="Have the model answer these first, and build from its answers and the files that `corpus` "
        "names. None: build from the corpus alone.",
    )


class AnswersInput(Options):
    """A corpus of a model's answers."""

    questions: ResponseOptions = Field(description="Prompts and how they are answered.")
    name: Name = Field(description="Name of the answers and of their folder.")


class ReleaseChecks(Options):
    """Treatment of live releases and old builds."""

    force: list[Gate] = Field(
        default=[],
        description="Checks to override if the store is too different from the live one.",
        examples=[["tokens"]],
    )
    keep: int | None = Field(
        None,
        ge=1,
        description="How many builds of each kind and name stay; older ones are removed unless needed. None: all.",
        examples=[3],
    )


class Publishing(ReleaseChecks):
    """Which release moves."""

    release: str | None = Field(
        None,
        pattern=rf"^({NAME}|\{{name\}}[A-Za-z0-9._-]*)$",
        description="The release to point at the store once it is verified; {name} stands for the name. None: "
        "none.",
        examples=["chat-vicuna", "{name}", "{name}-dresd"],
    )


def flow_of(name: str, *models: type[Options]) -> Callable[[Callable[..., Any]], Flow[..., Any]]:
    """Make a flow of a function whose parameters are the fields of models, each from the first model that has it.

    How texts are read is part of `BuildInput.corpus`, not separate parameters.
    """

    def decorate(function: Callable[..., Any]) -> Flow[..., Any]:
        fields = _fields(models)
        function.__signature__ = Signature([_parameter(*each) for each in fields.items()])  # type: ignore[attr-defined]
        about = inspect.cleandoc(function.__doc__ or "").partition("\n\n\b")[0]
        lines = [f"    {each}: {_description(field)}" for each, field in fields.items()]
        function.__doc__ = "\n".join([about, "", "Args:", *lines])

        @wraps(function)
        def run(**parameters: Any) -> Any:
            try:
                return function(**parameters)
            except DraftstoreError as error:
                return Failed(message=error.spelled(partial(_parameter_named, fields)), data=error)

        return flow(name=name, flow_run_name=_run_name)(run)

    return decorate


def _run_name() -> str:
    parameters = flow_run.parameters
    if "collections" in parameters:
        names = parameters["collections"] or ["all collections"]
    else:
        names = [parameters["name"] or "demo"]
    return f"{flow_run.flow_name} {', '.join(names)}"


def _parameter_named(fields: Mapping[str, FieldInfo], option: str) -> str:
    """Return the parameter of a flow for an option that an error names, or the option if it has none."""
    if "corpus" in fields and option in CorpusFiles.model_fields:
        option = f"corpus.{option}"
    elif option not in fields:
        return option
    return f"the parameter {option}"


def _fields(models: Sequence[type[Options]]) -> dict[str, FieldInfo]:
    fields: dict[str, FieldInfo] = {}
    for model in models:
        reading = CorpusOptions.model_fields if issubclass(model, CorpusOptions) else ()
        for name, field in model.model_fields.items():
            if name not in reading and not Shown.of(field).hidden:
                fields.setdefault(name, field)
    return fields


def _parameter(name: str, field: FieldInfo) -> Parameter:
    default = Parameter.empty if field.is_required() else field.default
    annotated: Any = Annotated  # with parts that no type checker knows
    annotation = annotated[(field.annotation, *field.metadata, Field(examples=field.examples))]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _description(field: FieldInfo) -> str:
    unset = Shown.of(field).unset
    return f"{field.description}" + (f" None: {unset}." if unset else "")
