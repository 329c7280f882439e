"""Conversations as token ids, which only this module makes, and the tokens of an answer as text, piece by piece.

    pieces = Pieces(tokenizer, encode_conversation(tokenizer, content))
    for token in answer:
        print(pieces.push(token), end="")
    print(pieces.finish())

A character may take several tokens (bytes of an emoji), and a token's text may depend on the one before it (leading
spaces of SentencePiece). So a few tokens are decoded together with those before them, and new text is returned once it
ends in a whole character, as in the text streamers of inference servers.

`tokenizers.decoders.DecodeStream` does less: it never returns what it holds back at the end of an answer (text after
invalid UTF-8), and after a prompt that ends inside a character it repeats the prompt's text.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from draftstore.text.chat import NO_SETTINGS, Message
from draftstore.text.tokenizer import TextTokenizer

Content: TypeAlias = str | Sequence[Message]
"""A text that the model continues, or a conversation that it answers."""
WINDOW = 8
"""Tokens of the prompt used to decode the first token of an answer."""
LONGEST_WINDOW = 64
"""The largest such window, which grows while its first token begins inside a character."""
FAR = 512
"""Tokens at the end of a prompt, special ones included, from which the window is taken."""
BROKEN = "\ufffd"
"""Output of decoders for invalid or incomplete characters."""


def encode_conversation(
    tokenizer: TextTokenizer,
    content: Content,
    answer: str | None = None,
    settings: Mapping[str, Any] = NO_SETTINGS,
) -> NDArray[np.int32]:
    """Return the ids of a prompt, or of a prompt and its answer encoded together, int32 [n].

    They begin with the tokenizer's own BOS exactly once, whether or not the chat template writes it. `settings` are
    additional variables of the template. TokenizerError if it rejects the conversation, or for invalid Unicode.
    """
    if isinstance(content, str):
        text = content
    else:
        text = tokenizer.render_chat(content, add_generation_prompt=True, settings=settings)
    if answer is not None:
        text += answer_lead(tokenizer, content) + answer
    return tokenizer.encode(text, bos=True)


def answer_lead(tokenizer: TextTokenizer, content: Content) -> str:
    """Return the text between a prompt and its answer: a space in the plain role format, else nothing."""
    return "" if isinstance(content, str) or tokenizer.has_chat_template else " "


class Pieces:
    """The text that tokens add to a prompt, without special tokens.

    Invalid UTF-8 becomes U+FFFD, as in `decode`, but an unfinished character never does; at the end it is dropped.
    """

    def __init__(self, tokenizer: TextTokenizer, prompt: NDArray[np.int32]) -> None:
        self._tokenizer = tokenizer
        self._spelled = _spelled(tokenizer)
        self._window = _last_tokens(tokenizer, prompt.tolist())
        self._fresh = len(self._window)
        self._shown = len(self._whole_text())

    def push(self, token: int) -> str:
        """Add a token; return the new text known so far."""
        if token in self._tokenizer.special_ids:
            return ""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if len(text) <= self._shown or self._ends_inside(text):
            return ""
        piece = text[self._shown :]
        # The tokens of this piece become the context for decoding the next ones.
        self._window = self._window[self._fresh :]
        self._fresh = len(self._window)
        self._shown = len(self._tokenizer.decode(self._window))
        return piece

    def finish(self) -> str:
        """Return the text held back, without an unfinished character."""
        return self._whole_text()[self._shown :]

    def _whole_text(self) -> str:
        """Return the text of the window, without an unfinished character."""
        text = self._tokenizer.decode(self._window)
        return text.rstrip(BROKEN) if self._ends_inside(text) else text

    def _ends_inside(self, text: str) -> bool:
        """Return True if the window's text ends inside a character; U+FFFD may also be genuine text."""
        if not text.endswith(BROKEN) or self._window[-len(self._spelled) :] == self._spelled:
            return False
        return self._tokenizer.exact_text(self._window[-1]) is None


def _spelled(tokenizer: TextTokenizer) -> list[int]:
    """Return the tokens that spell U+FFFD inside a text."""
    before, whole = (tokenizer.encode(text, bos=False) for text in ("a", f"a{BROKEN}"))
    ids: list[int] = whole[len(before) :].tolist()
    return ids


def _last_tokens(tokenizer: TextTokenizer, prompt: list[int]) -> list[int]:
    """Return the last text tokens of a prompt, starting at a character boundary."""
    prompt = [token for token in prompt[-FAR:] if token not in tokenizer.special_ids]
    start = max(0, len(prompt) - WINDOW)
    while 0 < start > len(prompt) - LONGEST_WINDOW and tokenizer.exact_text(prompt[start]) is None:
        start -= 1
    return prompt[start:]
