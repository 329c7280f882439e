"""N-grams read as the tokenizer decodes them, with nothing in them that PostgreSQL or a reader could trip over."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from schema.statistics.texts import MAX_TEXT_BYTES, ngram_texts


def shown(text: str) -> str:
    """Return a text as it is to be shown, one character after the other."""
    return "".join(each if each == "'" else repr(each)[1:-1] for each in text)


def render(tokenizer: TextTokenizer, ngrams: list[list[int]]) -> list[str]:
    return ngram_texts(tokenizer, ngrams).to_list()


@given(
    texts=st.lists(st.text() | st.text("a\0\n\t\r\\'\"\x7f\x80\xa0\u200b\ufeff\U000e0001😀é "), max_size=5)
)
def test_whole_texts_come_back(small_tokenizer: TextTokenizer, texts: list[str]) -> None:
    texts = [text.encode(errors="ignore").decode() for text in texts]
    ngrams = [small_tokenizer.encode(text, bos=False).tolist() for text in texts]
    assert render(small_tokenizer, ngrams) == list(map(shown, texts))


def test_long_texts_are_cut(small_tokenizer: TextTokenizer) -> None:
    (text,) = render(small_tokenizer, [small_tokenizer.encode("é" * 2_000, bos=False).tolist()])
    assert text.endswith("é…")
    assert MAX_TEXT_BYTES - 20 < len(text.encode()) <= MAX_TEXT_BYTES


def test_special_tokens_are_spelled_out(small_tokenizer: TextTokenizer) -> None:
    assert render(small_tokenizer, [[0, *small_tokenizer.encode("hi", bos=False), 1]]) == ["<s>hi</s>"]


@pytest.mark.parametrize("name", ["llama2", "qwen2.5", "smollm2"])
def test_real_tokenizers(data: Path, name: str) -> None:
    tokenizer = load_tokenizer(data / "tokenizers" / name)
    text = "def f(x):\n\treturn x, naïve 東京 😀 \u200b tab\tnul\\"
    ids = tokenizer.encode(f"a{text}", bos=False).tolist()
    assert render(tokenizer, [ids]) in (
        [shown(f"a{text}")],
        [shown(f" a{text}")],
    )  # SentencePiece puts a space there
    within = tokenizer.encode("a the", bos=False).tolist()[1:]
    parts = tokenizer.encode("a🦜", bos=False).tolist()[1:]
    assert render(tokenizer, [within, parts]) == [" the", "🦜"]
    assert set(render(tokenizer, [parts[:-1]])[0]) == {"�"}
