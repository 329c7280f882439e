"""Recall: drafts from the latest answers to a text's own prompt, against a memory that holds nothing else."""

from pathlib import Path
from threading import Thread
from time import sleep

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.drafting.slots import Slots, start
from draftstore.errors import DraftstoreError
from draftstore.live import store as stores
from draftstore.live.directory import ANSWERS, TOKENS
from draftstore.live.log import LiveDocument, documents, hash_prompt, segments
from draftstore.live.memory import Memory, MemoryDrafter
from draftstore.live.recall import RecallDrafter
from draftstore.live.shared import Vocabulary
from draftstore.live.store import LiveStore
from draftstore.trees.tree import DraftTree
from tests.fakes.waiting import until

VOCAB = Vocabulary(6, "0a" * 32)
PROMPTS = [np.array(ids, np.int32) for ids in ([1, 2], [2, 1], [1, 2, 3] * 5)]
ids = st.lists(st.integers(0, 3), min_size=1, max_size=8)
answers = st.lists(st.tuples(st.integers(0, 2), ids, st.integers(1, 3)), max_size=40)
"""Prompt, answer and version."""


def opened(tokens: int = 10_000, folder: Path | None = None) -> LiveStore:
    store = LiveStore(tokens, folder)
    store.agree(VOCAB)
    return store


def draft(store: LiveStore, prompt: np.ndarray, answer: list[int], count: int = ANSWERS) -> DraftTree:
    return RecallDrafter(store, VOCAB.size, count).session([*prompt, *answer]).propose(12)


@given(answers, st.integers(1, ANSWERS), ids)
def test_drafts_are_those_of_a_memory_of_the_latest_answers(
    given_answers: list[tuple[int, list[int], int]], count: int, context: list[int]
) -> None:
    store = opened()
    for number, answer, version in given_answers:
        store.append_many(PROMPTS[number], [answer], version)
    for place, prompt in enumerate(PROMPTS):
        own = [(version, answer) for other, answer, version in given_answers if other == place]
        latest = sorted(own, key=lambda each: each[0])[-ANSWERS:][-count:]
        memory = Memory(VOCAB.size, 10_000)
        for _, answer in latest:
            memory.append(LiveDocument.of(prompt, answer).ids)
        tree = RecallDrafter(store, VOCAB.size, count).session([*prompt, context[0]])
        tree.observe(context[1:])
        last = np.array([[*prompt, *context]], np.int32)
        assert tree.propose(12) == MemoryDrafter(memory, "sole").draft(last, 12)[0].tree


@given(answers, st.integers(8, 60))
def test_answers_are_recalled_as_long_as_they_are_in_memory(
    given_answers: list[tuple[int, list[int], int]], room: int
) -> None:
    memory, written = Memory(VOCAB.size, room), list[tuple[int, list[int], int]]()
    for prompt, answer, version in given_answers:
        memory.append(answer, prompt + 1, version)
        written.append((prompt + 1, answer, version))
    for prompt in (1, 2, 3):
        held, size = list[tuple[int, list[int]]](), 0
        for other, answer, version in reversed(written):
            size += len(answer) + 1
            if other == prompt and size <= room:
                held.insert(0, (version, answer))
        latest = [answer for _, answer in sorted(held, key=lambda each: each[0])]
        found = [answer.tolist() for answer in memory.recall(prompt, ANSWERS)]
        assert found == latest[-ANSWERS:] or len(given_answers) > ANSWERS


def test_running_texts_of_a_prompt_share_what_ends_meanwhile() -> None:
    store, slots = opened(), Slots()
    drafter = RecallDrafter(store, VOCAB.size, 2)
    texts = [start(drafter, [*prompt, 5], slots=slots) for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[0])]

    def proposed() -> list[list[int]]:
        return [text.propose(2).tokens.tolist() for text in texts]

    assert proposed() == [[], [], []]
    store.append_many(PROMPTS[0], [[5, 4, 3]])
    assert proposed() == [[4, 3], [], [4, 3]]
    store.append_many(PROMPTS[0], [[5, 0, 1], [5, 0, 1]], version=7)
    assert proposed() == [[0, 1], [], [0, 1]], "two answers are recalled, the newest"
    slots.leave(texts.pop(0).slot)
    assert proposed() == [[], [0, 1]]


def test_long_answers_are_cut() -> None:
    store = opened(1 << 17)
    store.append_many(PROMPTS[0], [[3] * (TOKENS + 50), [0] * 10])
    assert [len(each) for each in store.recall(hash_prompt(PROMPTS[0]), 2)] == [12]
    store.append_many(PROMPTS[1], [[3] * (TOKENS + 50)])
    assert draft(store, PROMPTS[1], [3]).tokens.tolist()
    assert [len(each) for each in store.recall(hash_prompt(PROMPTS[1]), 1)] == [TOKENS]


@pytest.mark.parametrize("logged", [False, True])
def test_earlier_versions_are_forgotten(tmp_path: Path, logged: bool) -> None:
    folder = tmp_path / "log" if logged else None
    store = opened(folder=folder)
    store.append_many(PROMPTS[0], [[5, 4, 3]], version=1)
    store.append_many(PROMPTS[0], [[5, 0, 1]], version=2)
    text = RecallDrafter(store, VOCAB.size, 16).session([*PROMPTS[0], 5])
    other = opened(folder=folder) if folder else None
    store.forget(before=2)
    assert text.propose(2).tokens.tolist() == [0, 1]
    assert store.drafter("sole").session([5, 4]).propose(1).tokens.tolist() == []
    store.append_many(PROMPTS[0], [[4, 4, 4]], version=1)
    store.append_many(PROMPTS[1], [[5, 2]])
    assert draft(store, PROMPTS[1], [5]).tokens[0] == 2, "its version is the newest known"
    if other is not None:
        until(lambda: len(other.recall(hash_prompt(PROMPTS[1]), 1)) == 1)
        assert draft(other, PROMPTS[0], [5]).tokens[:2].tolist() == [0, 1]
        other.close()
        assert folder is not None
        assert not any(b"\5\0\0\0\4\0\0\0\3\0\0\0" in path.read_bytes() for path in folder.iterdir())
    store.close()
    if folder:
        again = opened(folder=folder)
        assert draft(again, PROMPTS[0], [5]).tokens[:2].tolist() == [0, 1]
        again.close()


def test_digests_are_for_all_answers_or_none() -> None:
    with pytest.raises(DraftstoreError, match="1 digests for 2 answers"):
        opened().append_many(PROMPTS[0], [[1], [2]], digests=[b"d" * 16])


@pytest.mark.parametrize("logged", [False, True])
def test_answers_without_a_version_are_not_older_than_what_is_kept(tmp_path: Path, logged: bool) -> None:
    folder = tmp_path / "log" if logged else None
    store = opened(folder=folder)
    store.append_many(PROMPTS[0], [[5, 4, 3]], version=1)
    store.forget(before=3)
    if folder:
        store.close()
        store = opened(folder=folder)
    store.append_many(PROMPTS[0], [[5, 0, 1]])
    assert draft(store, PROMPTS[0], [5]).tokens.tolist()[:2] == [0, 1]
    assert store.refused == 0
    store.close()


@pytest.mark.parametrize("logged", [False, True])
def test_a_version_out_of_range_is_refused_alone(tmp_path: Path, logged: bool) -> None:
    store = opened(folder=tmp_path / "log" if logged else None)
    for version in (-1, 1 << 32):
        with pytest.raises(DraftstoreError, match="version"):
            store.append_many(PROMPTS[0], [[5, 4, 3]], version)
    with pytest.raises(DraftstoreError, match="version"):
        store.forget(before=1 << 32)
    store.forget(before=-1)
    store.append_many(PROMPTS[0], [[5, 0, 1]])
    assert draft(store, PROMPTS[0], [5]).tokens.tolist()[:2] == [0, 1]
    store.close()


def test_what_a_process_appends_before_it_forgets_is_erased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "FOLLOW_SECONDS", 3600)
    first, late = opened(folder=tmp_path / "log"), opened(folder=tmp_path / "log")
    first.append_many(PROMPTS[0], [[5, 0, 1]], version=2)
    first.forget(before=2)
    late.append_many(PROMPTS[0], [[5, 4, 3]], version=1)
    late.follow()
    written = [each.version for path in segments(tmp_path / "log") for _, each in documents(path)]
    assert written == [2]
    first.close()
    late.close()


def test_no_answer_is_lost_while_processes_append_and_forget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "FOLLOW_SECONDS", 0.001)
    first, other = opened(1 << 20, tmp_path / "log"), opened(1 << 20, tmp_path / "log")
    prompts = [np.array([number // 36, number // 6 % 6, number % 6], np.int32) for number in range(200)]

    def append(store: LiveStore, token: int) -> None:
        for prompt in prompts:
            store.append_many(prompt, [[token] * 400], version=1 << 20)
            sleep(0.0005)

    append(first, 0)
    threads = [Thread(target=append, args=each) for each in ((first, 1), (other, 2))]
    for thread in threads:
        thread.start()
    version = 1
    while any(thread.is_alive() for thread in threads):
        first.forget(before=version)
        version += 1
    first.follow()
    found = [sorted(int(each[-1]) for each in first.recall(hash_prompt(prompt), 16)) for prompt in prompts]
    first.close()
    other.close()
    assert found == [[0, 1, 2]] * len(prompts)


@pytest.mark.parametrize("count", [-1, 0, ANSWERS + 1])
def test_the_number_of_answers_is_checked(count: int) -> None:
    with pytest.raises(DraftstoreError, match="answers"):
        RecallDrafter(opened(), VOCAB.size, count)
