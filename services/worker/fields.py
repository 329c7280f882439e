"""The fields of requests that this worker does not use: which of them may pass, and why others are refused.

A field that is passed over in silence gives another answer than the one asked for. So only those pass that change no
answer, or have the value that says what happens anyway. `null` passes everywhere: clients send it for what they leave
out. Fields that nobody knows are refused, as OpenAI does: they may be misspelt.
"""

from collections.abc import Collection, Mapping
from typing import Any

from services.worker.problems import ApiError

HARMLESS = frozenset(
    {
        "cache_salt",
        "include_reasoning",
        "metadata",
        "parallel_tool_calls",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields that change no answer, whatever they say."""

_ANSWERS = "all answers of a request are returned: leave it out, or make it n"
_CALLS = "functions are not called"
_FORMAT = "the format of the text is not enforced"
_SPECIAL = "special tokens are no part of the text"
_TOOLS = "tools are not called"

UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "add_generation_prompt": ((True,), "a chat always asks for a new answer"),
    "add_special_tokens": (
        (True,),
        "a prompt always begins with the tokenizer's own BOS; ids are used as they are",
    ),
    "allowed_token_ids": (([],), "use logit_bias"),
    "audio": ((), "the model writes only text"),
    "bad_words": (([],), "use logit_bias"),
    "chat_template": ((), "the model's own template is used"),
    "chat_template_kwargs": (({},), "only chats have a template"),
    "continue_final_message": ((False,), "a chat always asks for a new answer: use /v1/completions"),
    "documents": (([],), "templates are given no documents"),
    "early_stopping": ((False,), "there is no beam search"),
    "echo": ((False,), "the prompt is not repeated"),
    "function_call": (("none", "auto"), _CALLS),
    "functions": (([],), _CALLS),
    "include_stop_str_in_output": ((False,), "stop strings are no part of the answer"),
    "length_penalty": ((1, 1.0), "there is no beam search"),
    "modalities": ((["text"],), "the model writes only text"),
    "prompt_logprobs": ((), "the probabilities of the prompt are not returned"),
    "reasoning_effort": ((), "if the model's template knows it, give it in chat_template_kwargs"),
    "response_format": (({"type": "text"},), _FORMAT),
    "return_token_ids": ((False,), "the ids of tokens are not returned"),
    "return_tokens_as_token_ids": ((False,), "the ids of tokens are not returned"),
    "skip_special_tokens": ((True,), _SPECIAL),
    "spaces_between_special_tokens": ((True,), _SPECIAL),
    "structured_outputs": ((), _FORMAT),
    "suffix": (("",), "text is only added at the end"),
    "tool_choice": (("none", "auto"), _TOOLS),
    "tools": (([],), _TOOLS),
    "top_logprobs": ((0,), "in completions, logprobs is their number"),
    "truncate_prompt_tokens": ((), "a prompt is used whole, or refused"),
    "use_beam_search": ((False,), "there is no beam search"),
    "verbosity": (("medium",), "say it in the prompt"),
}
"""By field: values without effect beside null, and why others are refused."""


def check_fields(document: Mapping[str, Any], used: Collection[str]) -> None:
    """Refuse fields that would change the answer, or may."""
    for name, value in document.items():
        if name in used or name in HARMLESS or value is None:
            continue
        shown = name[:100]
        harmless, reason = _rule(name, document)
        if not any(type(value) is type(other) and value == other for other in harmless):
            raise ApiError(400, f"{shown} is not supported with this value: {reason}", param=shown)


def _rule(name: str, document: Mapping[str, Any]) -> tuple[tuple[Any, ...], str]:
    """Return the values of a field that have no effect, and why others are refused."""
    if name == "best_of":
        return (document.get("n") or 1,), _ANSWERS
    if name.startswith("guided_"):
        return (), _FORMAT
    if name not in UNSUPPORTED:
        shown = name[:100]
        message = f"unknown parameter {shown!r}: leave it out, or correct it; it might change the answer"
        raise ApiError(400, message, param=shown, code="unknown_parameter")
    return UNSUPPORTED[name]
