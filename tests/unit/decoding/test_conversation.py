from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.decoding.conversation import BROKEN, Pieces
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer

LINES = [
    "\ufffd", "b\ufffd\ufffd", "naïve café", "東京, 🏳️‍🌈 and 👩‍👩‍👧", "tabs\tand   spaces",
    " leading", "\n\n", "a\ufffdb", "x" * 40,
]  # fmt: skip


@pytest.fixture(scope="module")
def stories(data: Path) -> TextTokenizer:
    """Return a tokenizer of SentencePiece's kind: spaces before words, bytes for unknown characters."""
    return load_tokenizer(data / "models" / "stories260K")


def pieces_of(tokenizer: TextTokenizer, prompt: list[int], tokens: list[int]) -> list[str]:
    pieces = Pieces(tokenizer, np.array(prompt, np.int32))
    return [*map(pieces.push, tokens), pieces.finish()]


def check_pieces(tokenizer: TextTokenizer, prompt: str, text: str) -> None:
    start = tokenizer.encode(prompt, bos=True).tolist()
    tokens = tokenizer.encode(text, bos=False).tolist()
    pieces = pieces_of(tokenizer, start, tokens)
    bare = [token for token in start if token not in tokenizer.special_ids]
    assert "".join(pieces) == tokenizer.decode(bare + tokens)[len(tokenizer.decode(bare)) :]
    if BROKEN not in text:
        assert not any(BROKEN in piece for piece in pieces)


PROMPTS = st.sampled_from(["a", "the quick 東", "😀" * 30]) | st.text(min_size=1, max_size=12)
TEXTS = st.sampled_from(LINES) | st.text(max_size=20)


@given(prompt=PROMPTS | st.just(""), text=TEXTS)
def test_pieces_are_whole_characters(small_tokenizer: TextTokenizer, prompt: str, text: str) -> None:
    check_pieces(small_tokenizer, prompt, text)


@given(prompt=PROMPTS, text=TEXTS)
def test_pieces_of_a_tokenizer_with_spaces_before_words(
    stories: TextTokenizer, prompt: str, text: str
) -> None:
    check_pieces(stories, prompt, text)


def test_pieces_of_any_tokens_equal_their_decoding(small_tokenizer: TextTokenizer) -> None:
    """Tokens that a model makes up may be no text at all."""
    draw = np.random.default_rng(3)
    for _ in range(200):
        tokens = draw.integers(2, small_tokenizer.vocab_size, 30).tolist()
        text = small_tokenizer.decode(tokens)
        assert "".join(pieces_of(small_tokenizer, [], tokens)) == text.rstrip(BROKEN)


def test_an_unfinished_character_is_dropped_at_the_end(small_tokenizer: TextTokenizer) -> None:
    tokens = small_tokenizer.encode("ok 😁", bos=False).tolist()
    whole = pieces_of(small_tokenizer, [], tokens)
    assert "".join(whole) == "ok 😁"
    assert whole[-3:] == ["", " 😁", ""]
    assert "".join(pieces_of(small_tokenizer, [], tokens[:-1])) == "ok "


def test_a_character_that_the_prompt_began(small_tokenizer: TextTokenizer) -> None:
    tokens = small_tokenizer.encode("ok 😁!", bos=False).tolist()
    inside = len(tokens) - 2
    assert "".join(pieces_of(small_tokenizer, tokens[:inside], tokens[inside:])) == "😁!"


def test_special_tokens_add_no_text(small_tokenizer: TextTokenizer) -> None:
    [bos], eos = small_tokenizer.bos_ids, small_tokenizer.eos_id
    tokens = small_tokenizer.encode("one two", bos=False).tolist()
    assert eos is not None
    assert "".join(pieces_of(small_tokenizer, [bos], [bos, *tokens[:2], eos, *tokens[2:], eos])) == "one two"
