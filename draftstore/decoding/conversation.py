"""Encoding of a prompt, alone or with its answer: the only place that turns conversations into token ids."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from draftstore.text.chat import NO_SETTINGS, Message
from draftstore.text.tokenizer import TextTokenizer

Content: TypeAlias = str | Sequence[Message]
"""A text that the model continues, or a conversation that it answers."""


def encode_conversation(
    tokenizer: TextTokenizer,
    content: Content,
    answer: str | None = None,
    settings: Mapping[str, Any] = NO_SETTINGS,
) -> NDArray[np.int32]:
    """Return the ids of a prompt, or of a prompt and its answer encoded together, int32 [n].

    They begin with the tokenizer's own BOS exactly once, whether or not the chat template writes it.

    Args:
        tokenizer: tokenizer of the model.
        content: prompt.
        settings: additional variables of the chat template.

    Raises:
        TokenizerError: invalid Unicode, or a conversation or settings that the chat template rejects.
    """
    text = (
        content
        if isinstance(content, str)
        else tokenizer.render_chat(content, add_generation_prompt=True, settings=settings)
    )
    if answer is not None:
        text += answer_lead(tokenizer, content) + answer
    return tokenizer.encode(text, bos=True)


def answer_lead(tokenizer: TextTokenizer, content: Content) -> str:
    """Return the text between a prompt and its answer: a space in the plain role format, else nothing."""
    return "" if isinstance(content, str) or tokenizer.has_chat_template else " "
