"""Options of builds: their bounds, and how commands and flows show them."""

import pickle
from typing import Any

import pytest

from draftstore.answers.responses import ResponseOptions
from draftstore.engines.config import EngineConfig
from draftstore.errors import BuildError, DraftstoreError
from draftstore.options import Options, OptionsError
from draftstore.stores.crest.build import CrestOptions
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


def test_each_user_reads_options_in_their_own_spelling() -> None:
    error = BuildError("use smaller batches", "batch_tokens", "dims")
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == "use smaller batches (batch_tokens, dims)"
    assert error.spelled("--{}".format) == "use smaller batches (--batch_tokens, --dims)"
    with pytest.raises(OptionsError) as caught:
        EngineConfig(budget=-1, corpora={"a": {"token": "secret", "request": "maybe"}})
    assert caught.value.spelled("<{}>".format).startswith("<corpora.a.request>: must be a valid boolean, ")
    assert "; <budget>: must be greater" in caught.value.spelled("<{}>".format)
    assert "secret" not in str(caught.value)
