"""N-grams read as the tokenizer decodes them, with nothing in them that PostgreSQL or a reader could trip over."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import TokenRangeError
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from schema.texts import MAX_TEXT_BYTES, NgramTexts, piece_bytes


def shown(data: bytes) -> str:
    """Return bytes as they are to be shown, one character after the other."""
    characters = data.decode("utf-8", errors="surrogateescape")
    parts = []
    for character in characters:
        if 0xDC80 <= ord(character) < 0xDD00:
            parts.append(f"\\x{ord(character) - 0xDC00:02x}")
        else:
            parts.append(character if character == "'" else repr(character)[1:-1])
    return "".join(parts)


def render(tokenizer: TextTokenizer, ngrams: list[list[int]]) -> list[str]:
    return NgramTexts(tokenizer).render(ngrams).to_list()


@given(
    texts=st.lists(st.text() | st.text("a\0\n\t\r\\'\"\x7f\x80\xa0\u200b\ufeff\U000e0001😀é "), max_size=5)
)
def test_whole_texts_come_back(small_tokenizer: TextTokenizer, texts: list[str]) -> None:
    texts = [text.encode(errors="ignore").decode() for text in texts]
    ngrams = [small_tokenizer.encode(text, bos=False).tolist() for text in texts]
    assert render(small_tokenizer, ngrams) == [shown(text.encode()) for text in texts]


@given(data=st.data())
def test_parts_of_characters_are_shown_as_bytes(small_tokenizer: TextTokenizer, data: st.DataObject) -> None:
    token = st.integers(0, small_tokenizer.vocab_size - 1)
    ngrams = data.draw(st.lists(st.lists(token, max_size=6), max_size=6))
    pieces = [b"".join(piece_bytes(small_tokenizer, token) for token in ngram) for ngram in ngrams]
    assert render(small_tokenizer, ngrams) == list(map(shown, pieces))


@given(data=st.binary(max_size=12) | st.lists(st.sampled_from(range(0x7F, 0x100)), max_size=9).map(bytes))
def test_any_bytes_read_as_python_reads_them(small_tokenizer: TextTokenizer, data: bytes) -> None:
    single = {piece_bytes(small_tokenizer, token): token for token in range(small_tokenizer.vocab_size)}
    assert render(small_tokenizer, [[single[bytes([byte])] for byte in data]]) == [shown(data)]


def test_long_texts_are_cut(small_tokenizer: TextTokenizer) -> None:
    token = int(small_tokenizer.encode("é", bos=False)[0])
    many = small_tokenizer.encode("é" * 2_000, bos=False).tolist()
    (text,) = render(small_tokenizer, [many])
    assert text.endswith("é…")
    assert MAX_TEXT_BYTES - 20 < len(text.encode()) <= MAX_TEXT_BYTES
    assert render(small_tokenizer, [[token]])[0] in ("é", "\\xc3")


def test_no_ngrams(small_tokenizer: TextTokenizer) -> None:
    assert render(small_tokenizer, []) == []
    assert render(small_tokenizer, [[], []]) == ["", ""]


def test_foreign_ids_are_refused(small_tokenizer: TextTokenizer) -> None:
    for token in (-1, small_tokenizer.vocab_size):
        with pytest.raises(TokenRangeError, match="count them again"):
            render(small_tokenizer, [[1, token]])


def test_special_tokens_are_spelled_out(small_tokenizer: TextTokenizer) -> None:
    assert render(small_tokenizer, [[0, *small_tokenizer.encode("hi", bos=False), 1]]) == ["<s>hi</s>"]


@pytest.mark.parametrize("name", ["llama2", "qwen2.5", "smollm2"])
def test_real_tokenizers(data: Path, name: str) -> None:
    tokenizer = load_tokenizer(data / "tokenizers" / name)
    sentences = ["def f(x):\n\treturn x", "naïve 東京 😀 \u200b", "tab\tnul\\"]
    ngrams = [tokenizer.encode(sentence, bos=False).tolist() for sentence in sentences]
    decoded = [tokenizer.decode(ngram) for ngram in ngrams]
    # SentencePiece puts a space in front of a text, which its decoder takes away again.
    assert [text.removeprefix(" ") for text in render(tokenizer, ngrams)] == [
        shown(t.encode()) for t in decoded
    ]


def test_byte_fallback(data: Path) -> None:
    tokenizer = load_tokenizer(data / "tokenizers" / "llama2")
    ids = tokenizer.encode("🦜", bos=False).tolist()[-4:]  # a character without an entry of its own
    assert [piece_bytes(tokenizer, token) for token in ids] == [bytes([byte]) for byte in "🦜".encode()]
    assert render(tokenizer, [ids, ids[:3], ids[1:]]) == ["🦜", r"\xf0\x9f\xa6", r"\x9f\xa6\x9c"]
