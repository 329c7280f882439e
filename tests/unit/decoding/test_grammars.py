"""Grammars of JSON answers: what may follow, what must follow, and which schemas are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.decoding.grammars import MAX_OPTIONAL, Form, GrammarDrafter, Grammars
from draftstore.errors import GrammarError
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "favourite_colour": {"enum": ["red", "green"]},
        "children": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "favourite_colour", "children"],
    "additionalProperties": False,
}
documents = st.fixed_dictionaries(
    {
        "name": st.text('aé"\\ 東{}:,\n', max_size=8),
        "favourite_colour": st.sampled_from(["red", "green"]),
        "children": st.lists(st.integers(-(10**9), 10**9), max_size=3),
    }
)


@pytest.fixture(scope="module")
def tokenizer(data: Path) -> TextTokenizer:
    return load_tokenizer(data / "tokenizers" / "smollm2")


@pytest.fixture(scope="module")
def grammars(tokenizer: TextTokenizer) -> Grammars:
    assert tokenizer.eos_id is not None
    return Grammars(tokenizer, tokenizer.vocab_size + 100, [tokenizer.eos_id])


@given(document=documents)
def test_documents_are_allowed_and_contain_the_forced_tokens(
    tokenizer: TextTokenizer, grammars: Grammars, document: dict[str, Any]
) -> None:
    document = {name: document[name] for name in SCHEMA["properties"]}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    ids = [*tokenizer.encode(text, bos=False).tolist(), tokenizer.eos_id]
    grammar, prompt = grammars.compiled(Form(SCHEMA)), [7, 7]
    state, drafted = grammar.start(), 0
    for size, token in enumerate(ids):
        assert state.allowed().shape == (tokenizer.vocab_size + 100,)
        assert state.allowed()[token]
        session = GrammarDrafter(grammar, len(prompt)).session([*prompt, *ids[:size]])
        forced = session.propose(16).tokens.tolist()
        assert forced == ids[size : size + len(forced)]
        drafted += len(forced)
        state.extend([token])
    assert drafted > 10
    assert not grammar.start().allowed()[tokenizer.encode("[1]", bos=False)].any()


def test_unsupported_schemas_are_refused(grammars: Grammars, tokenizer: TextTokenizer) -> None:
    with pytest.raises(GrammarError, match="nonsense"):
        grammars.compiled(Form({"type": "nonsense"}))
    with pytest.raises(GrammarError, match=r"cannot be followed: .* Unknown format: bogus$"):
        grammars.compiled(Form(None, {"f": {"properties": {"a": {"format": "bogus"}}}}))
    with pytest.raises(GrammarError, match="no token that ends"):
        Grammars(tokenizer, tokenizer.vocab_size, []).compiled(Form({"type": "object"}))
    for never_ends in ({"$ref": "#"}, {"allOf": [{"$ref": "#"}]}):
        with pytest.raises(GrammarError):
            grammars.compiled(Form(never_ends))
    chain: dict[str, Any] = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1500)}
    deep = {"$defs": chain | {"1500": {"type": "null"}}, "$ref": "#/$defs/0"}
    assert grammars.compiled(Form(deep)).start().allowed().any(), "on a stack of its own"
    many: dict[str, Any] = {"properties": {str(number): {} for number in range(MAX_OPTIONAL + 1)}}
    with pytest.raises(GrammarError, match="501 optional properties: expected at most 500"):
        grammars.compiled(Form({"items": {"anyOf": [many]}, "required": [""] * 600}))
    assert grammars.compiled(Form({"type": "object", **many, "required": ["7"]})).start().allowed().any()
    with pytest.raises(GrammarError, match="characters: expected at most"):
        grammars.compiled(Form({"const": "x" * 300_000}))
    state = grammars.compiled(Form({"x-guidance": {"item_separator": "xxx"}})).start()
    with pytest.raises(GrammarError):
        state.extend(tokenizer.encode("no JSON", bos=False).tolist())
