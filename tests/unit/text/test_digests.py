"""The identity of documents, against a slow and obvious oracle, and in whatever form a record is written."""

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from draftstore.text.chat import as_messages
from draftstore.text.digests import identify
from tests.reference import identity_of

TEXTS = st.text("a é\n\x00\ud800😀\u2003", max_size=4)
LEAVES = st.none() | st.booleans() | st.integers(-2, 2) | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
CALLS = st.lists(
    st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": TEXTS, "arguments": VALUES})}),
    max_size=2,
)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "other"])
TURNS = st.fixed_dictionaries({"role": ROLES, "content": TEXTS}, optional={"tool_calls": CALLS})
CHATS = st.lists(TURNS, max_size=5)


@given(content=TEXTS | CHATS)
@example(content=[])
@example(content=[{"role": "assistant", "content": " a "}])
def test_digests_are_those_of_the_oracle(content: Any) -> None:
    assert tuple(identify(content)) == identity_of(content)


@given(chat=CHATS)
def test_beginnings_are_those_of_the_conversations_that_end_there(chat: list[Any]) -> None:
    expected = []
    for end in range(1, len(chat)):
        beginning = identify(chat[:end])
        if chat[end - 1]["role"] in ("assistant", "other") and beginning.text:
            expected += [beginning.document, beginning.text]
    assert list(identify(chat).beginnings) == expected


@given(texts=st.lists(st.tuples(ROLES, TEXTS), min_size=1))
def test_the_text_of_a_conversation_is_known_without_its_roles(texts: list[Any]) -> None:
    found = identify([{"role": role, "content": text} for role, text in texts])
    joined = "\n".join(text for _, text in texts)
    copy = identify(joined)
    assert (found.text, found.document != copy.document) == (copy.text, True)
    assert copy.text == (copy.document if joined.strip() else None), "builds show a copy as plain text"


def padded(value: Any, draw: Any) -> Any:
    """Return a JSON value with null and empty keys in all of its objects, in another order."""
    if isinstance(value, list):
        return [padded(item, draw) for item in value]
    if not isinstance(value, dict):
        return value
    empty: Any = st.sampled_from([None, "", [], {}, {"deep": None}])
    more = draw(st.dictionaries(st.sampled_from(["more", "x"]), empty, max_size=2))
    pairs = [(key, padded(item, draw)) for key, item in value.items()]
    return {**more, **dict(reversed(pairs))}


@given(chat=CHATS, data=st.data())
def test_null_and_empty_keys_change_nothing(chat: list[Any], data: st.DataObject) -> None:
    written = [padded(message, data.draw) for message in chat]
    assert identify(as_messages(written, "messages")) == identify(as_messages(chat, "messages"))


def test_other_keys_change_the_document_but_not_its_text() -> None:
    plain: list[dict[str, Any]] = [
        {"role": "user", "content": "why?"},
        {"role": "assistant", "content": "so"},
    ]
    thought = [plain[0], plain[1] | {"reasoning_content": "hm"}]
    named = [plain[0] | {"name": "jane", "weight": 0}, plain[1]]
    digests = [identify(chat) for chat in (plain, thought, named)]
    assert len({each.document for each in digests}) == 3
    assert len({each.text for each in digests}) == len({each.answer for each in digests}) == 1


def test_tool_calls_that_are_no_list_say_nothing() -> None:
    for calls in (1.5, True, "f", {"function": {"name": "f"}}):
        assert (
            identify([{"role": "assistant", "content": "a", "tool_calls": calls}]).text == identify("a").text
        )


def test_tool_calls_are_the_same_as_written_by_the_model_and_as_returned_by_clients() -> None:
    asked = {"role": "user", "content": "the weather?"}
    written = (
        'So: <tool_call>\n{"name": "f", "arguments": {"x": [1, null]}}\n</tool_call> <tool_call>{"name": "g"}'
    )
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, null]}'}},
        {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    first = identify([asked, {"role": "assistant", "content": written}])
    returned = as_messages([asked, {"role": "assistant", "content": "So:", "tool_calls": calls}], "messages")
    goes_on = identify([*returned, {"role": "tool", "content": "rain"}])
    again = identify(returned)
    assert (again.text, again.answer) == (first.text, first.answer)
    assert first.text in goes_on.beginnings
    broken = identify([asked, {"role": "assistant", "content": "<tool_call>{"}])
    assert broken.text == identify("the weather?\n<tool_call>{").text


NAMES = {"user": "human", "assistant": "gpt", "tool": "observation"}


@given(chat=st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXTS})), data=st.data())
def test_a_turn_is_the_same_in_parts_and_in_the_form_of_sharegpt(
    chat: list[Any], data: st.DataObject
) -> None:
    def written(role: str, content: str) -> dict[str, Any]:
        form = data.draw(st.sampled_from(["parts", "sharegpt", "null"]))
        if form == "sharegpt":
            return {"from": NAMES.get(role, role), "value": content}
        if form == "null" and not content:
            return {"role": role, "content": None}
        cut = data.draw(st.integers(0, len(content)))
        return {
            "role": role,
            "content": [{"type": "text", "text": part} for part in (content[:cut], content[cut:])],
        }

    assert as_messages([written(**message) for message in chat], "messages") == chat
