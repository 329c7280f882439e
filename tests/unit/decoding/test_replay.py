import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.decoding.replay import (
    MAX_OUTPUT_TOKENS,
    Recording,
    check_recordings,
    read_recordings,
    replay,
)
from draftstore.errors import ReplayError
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import tree_of
from tests.fakes.scripted import Scripted
from tests.unit.trees.test_tree import trees

CHAT = [{"role": "user", "content": "hi"}]
TEMPLATE = """{{ bos_token }}{% for m in messages %}
{% if m.role == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}
[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


# --- counting ---


def test_a_chain_is_the_best_path_of_the_draft() -> None:
    """Of 1 2 3 and 4, two tokens of the first are verified: 7 | 1 2 3 | 4 | 1 9 | 4."""
    drafter = Scripted(tree_of([(1, 2, 3), (4,)]))
    result = replay(drafter, [Recording("a", ids(0), ids(7, 1, 2, 3, 4, 1, 9, 4))], budget=9, chain=2)
    assert drafter.accepted == [[1, 2, 3], [4], [1, 9], [4]]
    assert (result.drafted, drafter.requests) == (2 * 4, [(9, 0.0)] * 4)


def test_outputs_of_a_token_take_no_pass() -> None:
    rows = [Recording("a", ids(0), ids()), Recording("b", ids(0), ids(7))]
    result = replay(Scripted(tree_of([(1,)])), rows)
    assert (result.rows, result.passes, result.accepted_length) == (2, 0, 0.0)
    assert result.summary()["lookup_us"] == {"p50": 0.0, "p99": 0.0, "mean": 0.0}


OUTPUTS = st.lists(st.integers(0, 5), min_size=2, max_size=40)
DRAFTS = trees(9, ids=st.integers(0, 5))


@given(
    output=OUTPUTS,
    draft=DRAFTS,
    budget=st.integers(0, 9),
)
def test_passes_are_those_counted_by_hand(output: list[int], draft: DraftTree, budget: int) -> None:
    """Each pass takes the part of the draft that agrees and one token more; of the draft, no more than the budget."""
    drafter, tree = Scripted(draft), draft.prefix(budget)
    said, passes = 1, 0
    while said < len(output):
        said += len(tree.accepted(ids(*output[said:]))) + 1
        passes += 1
    result = replay(drafter, [Recording("a", ids(3), ids(*output))], budget=budget, min_prob=0.5)
    assert drafter.prefill[0][0].tolist() == [3, output[0]]
    assert [token for tokens in drafter.accepted for token in tokens] == output[1:]
    assert (result.tokens, result.passes) == (len(output) - 1, passes)
    assert result.drafted == passes * len(tree)
    assert drafter.requests == [(budget, 0.5)] * passes * (budget > 0)
    assert (result.rows, result.misses, len(result.lookup_ns)) == (1, passes * (len(tree) == 0), passes)


@given(output=OUTPUTS, draft=DRAFTS)
def test_the_state_is_the_one_that_predicted_the_last_token(output: list[int], draft: DraftTree) -> None:
    """State j holds j and output[j]."""
    hidden = np.array([[place, token, 9] for place, token in enumerate(output)], np.float32)
    drafter = Scripted(draft, hidden=True)
    replay(drafter, [Recording("a", ids(3), ids(*output), hidden)])
    states = [drafter.prefill[0][1], *(feedback.hidden for feedback in drafter.feedback)]
    place = 0
    for accepted, state in zip([output[:1], *drafter.accepted], states, strict=True):
        place += len(accepted)
        assert state.tolist() == [place - 1, accepted[-1], 9]
    assert place == len(output)


def test_missing_states_are_an_error() -> None:
    with pytest.raises(ReplayError, match=r"recording a has no hidden states.* the model that made it"):
        replay(Scripted(hidden=True), [Recording("a", ids(3), ids(7, 1, 2))])


def test_the_acceptance_rate_is_a_mean_over_outputs_with_drafts() -> None:
    """Of the first 3 of 10 nodes are accepted, of the second none of 5; of the third nothing is drafted."""

    class Moody(Scripted):
        def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
            return DraftTree.empty() if self.prefill[-1][0][0] == 9 else super().propose(budget)

    rows = [
        Recording("a", ids(0), ids(7, 1, 2, 3, 4, 8)),
        Recording("b", ids(0), ids(7, 8)),
        Recording("c", ids(9), ids(7, 8, 8)),
    ]
    result = replay(Moody(tree_of([(1, 2, 3), (4, 5)])), rows)
    assert (result.drafted, result.accepted, result.passes) == (3 * 5, 3, 2 + 1 + 2)
    assert result.rates == [3 / 10, 0.0]
    assert result.acceptance_rate == 0.15
    assert replay(Scripted(DraftTree.empty()), rows).acceptance_rate == 0.0


def test_progress_and_summary() -> None:
    rows = [Recording("a", ids(0), ids(7, 1, 9)), Recording("b", ids(0), ids(7, 1, 9))]
    one = replay(Scripted(tree_of([(1, 5)])), rows[:1]).summary()
    assert (one["passes"], one["nodes_mean"], one["accepted_length"]) == (1, 2.0, 2.0)
    assert replay(Scripted(DraftTree.empty()), []).summary()["nodes_mean"] == 0.0
    seen: list[tuple[Any, ...]] = []
    result = replay(Scripted(tree_of([(1, 5)])), rows, on_progress=lambda *now: seen.append(now))
    assert seen == [(1, 2, "accepted length 2.000"), (2, 2, "accepted length 2.000")]
    result.lookup_ns = [1_000, 2_000, 3_000, 10_000]
    assert result.summary() == {
        "accepted_length": 2.0,
        "acceptance_rate": 0.5,
        "tokens": 4,
        "passes": 2,
        "rows": 2,
        "nodes_mean": 2.0,
        "miss_rate": 0.0,
        "lookup_us": {"p50": 2.5, "p99": 9.8, "mean": 4.0},
    }


# --- reading recordings ---


@pytest.fixture
def templated(small_tokenizer: TextTokenizer, tmp_path: Path) -> TextTokenizer:
    """Return the small tokenizer with a chat template that begins with the BOS."""
    small_tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return load_tokenizer(tmp_path)


def recordings(tokenizer: TextTokenizer, folder: Path, *records: Any, **options: Any) -> list[Recording]:
    path = folder / "replays.jsonl"
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_text("".join(f"{line}\n" for line in lines))
    return list(read_recordings(path, tokenizer, **options))


def test_the_output_starts_at_the_first_id_that_differs(
    small_tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    """`for` alone ends in other ids than `for item` cut in the middle of a token."""
    prompt, output = "for it", "em in items"
    alone = small_tokenizer.encode(prompt, bos=True).tolist()
    together = small_tokenizer.encode(prompt + output, bos=True).tolist()
    assert alone != together[: len(alone)], "the cut should lie inside a token"
    [row] = recordings(small_tokenizer, tmp_path, {"prompt": prompt, "output": output})
    cut = len(row.prompt)
    assert row.id == f"{tmp_path}/replays.jsonl:line 1"
    assert alone[:cut] == together[:cut] == row.prompt.tolist()
    assert alone[cut] != together[cut] == row.output[0]


@pytest.mark.parametrize("length", [0, MAX_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS + 1])
def test_the_output_is_cut(small_tokenizer: TextTokenizer, tmp_path: Path, length: int) -> None:
    newline = small_tokenizer.encode("\x01", bos=False)
    assert len(newline) == 1
    [row] = recordings(small_tokenizer, tmp_path, {"prompt": "x", "output": "\x01" * length})
    assert row.output.tolist() == newline.tolist() * min(length, 1024)


def test_a_conversation_in_the_format_of_the_model(templated: TextTokenizer, tmp_path: Path) -> None:
    [row] = recordings(templated, tmp_path, {"prompt": CHAT, "output": "hello"})
    assert templated.decode(row.prompt).replace("\n", "") == "<s>[user]hi[assistant]"
    assert templated.decode(row.output) == "hello"
    assert row.prompt.tolist().count(0) == 1  # the BOS of the template is the only one


def test_each_answer_of_a_conversation_is_a_recording(templated: TextTokenizer, tmp_path: Path) -> None:
    """As if its turns before were a prompt; an answer before any question, or without text, is none."""
    turns = [
        {"role": role, "content": text}
        for role, text in zip(
            ["user", "assistant"] * 3, ["hi", "hello", "how", "", "so?", "well"], strict=True
        )
    ]
    prompts = [{"id": f"a#{i}", "prompt": turns[:i], "output": turns[i]["content"]} for i in (1, 5)]
    found = recordings(templated, tmp_path, {"id": "a", "messages": turns}, {"conversations": turns[1:2]})
    wanted = recordings(templated, tmp_path, *prompts)
    assert [row.id for row in found] == ["a#1", "a#5"]
    for row, same in zip(found, wanted, strict=True):
        assert (row.prompt.tolist(), row.output.tolist()) == (same.prompt.tolist(), same.output.tolist())
    [row] = recordings(templated, tmp_path, {"messages": turns}, limit=1)
    assert templated.decode(row.output) == "hello"


def test_model_and_limit(small_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    records = [{"id": i, "model": "ab"[i % 2], "prompt": "p", "output": "out"} for i in range(6)]

    def found(**options: Any) -> list[str]:
        return [row.id for row in recordings(small_tokenizer, tmp_path, *records, **options)]

    assert found() == ["0", "1", "2", "3", "4", "5"]
    assert found(model="b") == ["1", "3", "5"]
    assert found(model="b", limit=2) == ["1", "3"]
    assert found(limit=1) == ["0"]
    assert found(limit=100) == found()


def test_a_limit_does_not_read_on(small_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    good = {"prompt": "p", "output": "out"}
    assert len(recordings(small_tokenizer, tmp_path, good, good, "bad", limit=2)) == 2
    assert check_recordings(tmp_path / "replays.jsonl", limit=2) == 2
    with pytest.raises(ReplayError, match="line 3"):
        check_recordings(tmp_path / "replays.jsonl")


GOOD = {"prompt": "p", "output": "out"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("not json", r"not JSON"),
        ({"prompt": "p", "output": ["x"]}, r"expected the key 'output' with a text"),
        ({"messages": "hi"}, r"'messages' is a str, expected a list of messages"),
        ({"text": "hi"}, r"expected the key 'output' with a text, or a conversation"),
        ({"prompt": 7, "output": "o"}, r"expected the key 'prompt' with a text or a list of messages"),
        ({"prompt": ["hi"], "output": "o"}, r"prompt\[0\] is a str, expected an object"),
        ({"prompt": [{"role": "system", "content": "x"}], "output": "o"}, r"rejects .* no system prompts"),
        ({"prompt": "p", "output": "\ud800"}, r"surrogate"),
    ],
)
def test_bad_records_name_their_place(
    templated: TextTokenizer, tmp_path: Path, record: Any, message: str
) -> None:
    with pytest.raises(ReplayError, match=rf"replays\.jsonl:line 2: .*{message}"):
        recordings(templated, tmp_path, GOOD, record)


def test_no_recording_is_left(small_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    rows = [GOOD | {"model": "vicuna"}, GOOD | {"model": "llama"}, GOOD]
    with pytest.raises(ReplayError, match=r"no recording of model 'x', its models are llama, vicuna$"):
        recordings(small_tokenizer, tmp_path, *rows, model="x")
    with pytest.raises(ReplayError, match=r"replays\.jsonl holds no recording$"):
        recordings(small_tokenizer, tmp_path)
    with pytest.raises(ReplayError, match="no such file"):
        list(read_recordings(tmp_path / "absent.jsonl", small_tokenizer))
