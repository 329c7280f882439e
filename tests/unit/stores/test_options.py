"""Options of builds: bounds, and what commands and flows show of them."""

from typing import Any

import click
import pytest

from draftstore.answers.responses import ResponseOptions
from draftstore.cli.build import build
from draftstore.errors import DraftstoreError
from draftstore.options import Options, OptionsError, Shown
from draftstore.stores.crest.build import CrestOptions
from draftstore.stores.registry import KINDS, builder_of
from draftstore.stores.rest.build import RestOptions
from draftstore.text.tokenizing import CorpusOptions


@pytest.mark.parametrize(
    ("model", "values", "reason"),
    [
        (RestOptions, {"segment_tokens": 1}, "segment_tokens: .* greater than or equal to 2, not 1"),
        (CrestOptions, {"max_bytes": 16_383}, "max_bytes: .* greater than or equal to 16384"),
        (CrestOptions, {"backend": "stone"}, "backend: .* 'lmdb', 'postgres' or 'both'"),
        (CrestOptions, {"ngrams": 5, "max_bytes": 1 << 20}, "are both given: choose one"),
        (ResponseOptions, {"prompts": ()}, "prompts"),
        (ResponseOptions, {"prompts": ("a",), "samples": 2}, "2 samples at temperature 0 are all the same"),
    ],
)
def test_bounds(model: type[Options], values: dict[str, Any], reason: str) -> None:
    corpus = {"corpus": ()} if issubclass(model, CorpusOptions) else {}
    with pytest.raises(OptionsError, match=reason) as caught:
        model(**corpus, **values)
    assert isinstance(caught.value, DraftstoreError)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if builder_of(kind)])
def test_command_and_flow_show_the_same(kind: str) -> None:
    from prefect.utilities.callables import parameter_schema

    from pipelines.flows import FLOWS

    builder = builder_of(kind)
    command = build.get_command(click.Context(build), kind)
    assert builder is not None
    assert command is not None
    options = {option.name: option for option in command.params}
    parameters = parameter_schema(FLOWS[f"build-{kind}"]).properties
    for model in (builder.sources, builder.options):
        for name, field in model.model_fields.items():
            if Shown.of(field).hidden:
                continue
            option = options[name]
            assert isinstance(option, click.Option)
            assert field.description
            assert option.help
            assert option.help.startswith(field.description)
            if name in CorpusOptions.model_fields or name == "tokenizer":
                continue  # a parameter with parts, and one with a default in flows
            shown = parameters[name]
            assert shown["description"].startswith(field.description)
            assert shown.get("examples") == field.examples
            if isinstance(option.type, click.Choice):
                values = shown.get("enum") or shown["anyOf"][0]["enum"]
                assert list(option.type.choices) == values
            if isinstance(option.type, click.IntRange):
                bounds = shown if "type" in shown else shown["anyOf"][0]
                assert (option.type.min, option.type.max) == (bounds.get("minimum"), bounds.get("maximum"))
