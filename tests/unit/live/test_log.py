"""The log of a live store: what remains after a truncation, an active writer, a full disk and a take-down."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from draftstore.cli import cli
from draftstore.errors import TokenizerError, TokenRangeError
from draftstore.live import log, shared
from draftstore.live.log import LIVE, REST, LiveDocument, Writer
from draftstore.live.removing import Held, TakeDowns, still_held, take_down
from draftstore.live.shared import Vocabulary
from draftstore.live.source import adopt
from draftstore.live.store import LiveStore
from draftstore.text.digests import answer_digest, identify
from draftstore.text.fragments import Fragment
from draftstore.text.tokenizer import TextTokenizer
from tests.fakes.waiting import until

TOKENS = 10_000
OURS = Vocabulary(100, "ours")
token_ids = st.lists(st.integers(0, 70_000), max_size=12).map(lambda ids: np.array(ids, np.int32))
documents = st.builds(
    lambda ids, prompt_size, *others: LiveDocument(ids, min(prompt_size, len(ids)), *others),
    token_ids, st.integers(0, 8), st.binary(min_size=16, max_size=16), st.booleans(), st.just(7.0),
    st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1),
) | token_ids.map(LiveDocument)  # fmt: skip


def plain(found: Any) -> list[Any]:
    return [each._replace(ids=each.ids.tolist(), created=0.0) for each in found]


def ids(*numbers: int) -> LiveDocument:
    return LiveDocument(np.array(numbers, np.int32))


def read(path: Path) -> list[list[int]]:
    return [found.ids.tolist() for _, found in log.documents(path)]


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    made = Writer(tmp_path / "chat", TOKENS)
    yield made
    made.close()


@given(st.lists(documents, max_size=6), st.data())
def test_a_cut_loses_the_records_after_it_and_a_flipped_bit_one_record(
    written: list[LiveDocument], data: st.DataObject
) -> None:
    with TemporaryDirectory() as folder:
        writer, ends = Writer(Path(folder), TOKENS), [0]
        for document in written:
            writer.append([document])
            ends.append(writer.size)
        whole = writer.path.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        writer.path.write_bytes(whole[:cut])
        found, position = log.read_since(writer.path)
        there = sum(end <= cut for end in ends) - 1
        assert (plain(found), position) == (plain(written[:there]), ends[there])
        writer.path.write_bytes(whole)
        assert plain(log.read_since(writer.path, position)[0]) == plain(written[there:])
        assert log.damage(writer.path) == 0
        for number in range(len(written)):
            at = data.draw(st.integers(ends[number], ends[number + 1] - 1))
            writer.path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            left = [other for place, other in enumerate(written) if place != number]
            assert plain(other for _, other in log.documents(writer.path)) == plain(left)
            last = number + 1 == len(written)  # of an open segment: it may be incomplete
            assert log.damage(writer.path) == (0 if last else ends[number + 1] - ends[number])
        os.close(writer._file)
        assert log.damage(writer.path) == (ends[-1] - ends[-2] if written else 0)


def test_documents_are_erased_in_place_during_appends(writer: Writer) -> None:
    numbers, done = range(1, 2_000), threading.Event()

    def append() -> None:
        for number in numbers:
            writer.append([ids(*[number] * 9)])
        done.set()

    def odd(document: LiveDocument) -> bool:
        return bool(document.ids[0] % 2)

    thread = threading.Thread(target=append)
    thread.start()
    erased = 0
    while not done.is_set():
        erased += log.erase(writer.path, odd)
    thread.join()
    places = {found.ids[0]: place for place, found in log.documents(writer.path)}
    assert erased + log.erase(writer.path, odd) == len(numbers[::2])
    assert read(writer.path) == [[number] * 9 for number in numbers if number % 2 == 0]
    assert all(places[found.ids[0]] == place for place, found in log.documents(writer.path))
    assert np.full(9, 1_001, np.int32).tobytes() not in writer.path.read_bytes()


def test_closed_segments_are_put_to_rest_and_dropped_only_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "chat"
    for numbers in ([1, 2], [3]):
        closed = Writer(folder, TOKENS)
        closed.append([ids(number) for number in numbers])
        closed.close()
    running, silent = Writer(folder, TOKENS), Writer(folder, TOKENS)
    running.append([ids(1)])
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in log.segments(folder))

    def among(*numbers: int) -> Any:
        return lambda document: document.ids[0] in numbers

    assert log.put_to_rest(folder, among(1, 3)) == 1
    assert [read(path) for path in log.segments(folder, REST)] == [[[3]]]
    assert {running.path, silent.path} < {*log.segments(folder, LIVE)}
    assert log.drop_rested(folder, among(1, 2)) == 0
    assert log.drop_rested(folder, among(3)) == 1
    assert sorted(read(path) for path in log.segments(folder)) == [[], [[1]], [[1], [2]]]


def test_every_segment_records_the_take_downs_that_its_process_has_applied(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "SEGMENT_SECONDS", 0.0)
    for state in (0, 3):
        writer.append([ids(1)])
        writer.apply(state)
        before = writer.path
        writer.roll()
        assert writer.path != before
        assert [log.applied(path)[0] for path in (before, writer.path)] == [state, state]


def test_a_full_disk_costs_the_log_and_not_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def nearly_full(file: int, data: bytes, at: int) -> int:
        return write(file, data[:5], at)

    store = LiveStore(TOKENS, tmp_path / "chat")
    store.agree(Vocabulary(100, "f"))
    for number, disk in enumerate((write, full, nearly_full, write)):
        monkeypatch.setattr(os, "pwrite", disk)
        store.append([ids(number, number)])
    assert (store.appended, store.unlogged, len(store)) == (4, 2, 12)
    store.close()
    again = LiveStore(TOKENS, tmp_path / "chat")
    assert len(again) == 6
    again.close()


@contextmanager
def running(folder: Path, tokens: int = TOKENS, vocabulary: Vocabulary = OURS) -> Iterator[LiveStore]:
    store = LiveStore(tokens, folder)
    store.agree(vocabulary)
    yield store
    store.close()


def appended(folder: Path, *numbers: int, tokens: int = TOKENS) -> None:
    """Append a document of 100 ids for each number, by a process that has ended since."""
    with running(folder, tokens) as store:
        store.append([ids(*[number] * 100) for number in numbers])


def test_memory_is_bounded_by_its_process_and_the_log_by_the_largest(tmp_path: Path) -> None:
    folder = tmp_path / "chat"
    for number in range(5):
        appended(folder, *[number] * 60)
    with running(folder, 100_000) as first, running(folder, 1_024) as second:
        assert (len(first), len(second)) == (300 * 101, 1_024)
        second.append([ids(7)])
        until(lambda: len(first) == 300 * 101 + 2)
        assert shared.settings_of(folder).tokens == 100_000
    most = CliRunner().invoke(cli, ["live", str(folder), "--tokens", "1024", "--json"])
    assert most.exit_code == 0, most.output
    assert (json.loads(most.output)["documents"], json.loads(most.output)["deleted_documents"]) == (301, 0)
    for number in range(5, 15):
        appended(folder, *[number] * 60, tokens=1_024)
    with running(folder, 1_024):
        until(lambda: sum(len(read(path)) for path in log.segments(folder)) < 700)
    kept = [read(path)[0][0] for path in log.segments(folder)]
    assert kept == [*range(kept[0], 15)]
    assert sum(path.stat().st_size for path in log.segments(folder)) > log.most_bytes(1_024)
    with running(folder, 5_000):
        assert shared.settings_of(folder).tokens == 5_000
    with running(folder, 5_000) as store:
        log.limit(folder, 2_000)
        for _ in range(20):  # begins a new segment
            store.append([ids(*[1] * 1_000)])
            store.follow()
        assert shared.settings_of(folder).tokens == 2_000, "until a larger process starts"
    ran = CliRunner().invoke(cli, ["live", str(tmp_path)])
    assert ran.exit_code == 1
    assert "is not the log of a live store" in str(ran.exception)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("how", ["removed", "moved", "restored", "link"])
def test_appends_to_a_changed_folder_are_logged_or_counted(
    how: str, there: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "chat"
    if how == "link":
        (tmp_path / "one").mkdir()
        folder.symlink_to(tmp_path / "one")
    with running(folder) as store:
        store.append([ids(1)])
        if how == "link":
            folder.unlink()
            if there:
                (tmp_path / "two").mkdir()
                folder.symlink_to(tmp_path / "two")
        elif how == "removed":
            shutil.rmtree(folder)
        else:
            folder.rename(tmp_path / "old")
        if there and how == "restored":
            shutil.copytree(tmp_path / "old", folder)
        elif there and how != "link":
            folder.mkdir()
        store.append([ids(2)])
        until(lambda: caplog.text)
        assert store.unlogged == (not there)
        assert ("moved, removed or replaced" in caplog.text) == there
        until(lambda: len(store) == 4 - 2 * (there and how != "restored"))
        if not there:
            (tmp_path / "new").mkdir()
            folder.symlink_to(tmp_path / "new")
            store.append([ids(3)])
            until(lambda: len(store) == 4)  # without the first document, which the new folder lacks
    found = [each for path in log.segments(folder) for each in read(path)]
    assert found == [[1], [2]][how != "restored" :] if there else [[3]]
    with running(folder) as again:
        assert len(again) == 2 * len(found)


def test_the_newest_documents_stay_when_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, back = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: now() + back)
    for number in range(6):
        appended(tmp_path, number, number + 20)
        back -= 86_400.0
    assert [read(path)[0][0] for path in log.segments(tmp_path)] == [*range(6)]
    with running(tmp_path, 606) as store:  # six documents
        drafter, numbers = store.drafter("sole"), [*range(6), *range(20, 26)]
        drafts = drafter.draft(np.array([[number, number] for number in numbers], np.int32), 1)
        known = [number for number, draft in zip(numbers, drafts, strict=True) if len(draft.tree)]
        assert known == [3, 4, 5, 23, 24, 25]


def test_a_vocabulary_that_was_only_declared_ends_with_its_process(tmp_path: Path) -> None:
    other = Vocabulary(7, "other")
    with running(tmp_path, vocabulary=other) as mistaken, running(tmp_path) as store:
        assert (mistaken.vocabulary, store.vocabulary) == (other, OURS)
        store.append([ids(1)])
        with pytest.raises(TokenizerError, match="with 100 ids, found other with 7"):
            mistaken.append([ids(1)])
        mistaken.follow()
        assert (len(mistaken), mistaken.appended, mistaken.unlogged) == (0, 0, 0)
    with pytest.raises(TokenizerError), running(tmp_path, vocabulary=other):
        pass
    assert shared.settings_of(tmp_path).vocabulary == OURS


def test_a_refused_append_leaves_the_vocabulary_open() -> None:
    store = LiveStore(TOKENS)
    store.agree(Vocabulary(7, "other"))
    drafter = store.drafter("sole")
    with pytest.raises(TokenRangeError):
        store.append([ids(7)])
    store.agree(OURS)
    store.append([ids(8, 9, 10)])
    assert drafter.draft(np.array([[8, 9]], np.int32), 1)[0].tree.tokens.tolist() == [10]
    with pytest.raises(TokenizerError):
        store.agree(Vocabulary(7, "other"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root writes for others")
def test_the_files_of_a_log_stay_those_of_its_owner(tmp_path: Path, small_tokenizer: TextTokenizer) -> None:
    adopt(tmp_path, small_tokenizer)
    os.chown(tmp_path, 65_534, 65_534)
    log.limit(tmp_path, 2_000)
    take_down(tmp_path, TakeDowns(answers=frozenset([b"d" * 16])))
    assert {(tmp_path / name).stat().st_uid for name in ("live.json", "removed.json")} == {65_534}


def test_damage_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    appended(tmp_path, 1, 2, 3)
    (path,) = log.segments(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:500] + b"?" + data[501:])
    with running(tmp_path) as store:
        assert len(store) == 2 * 101
    assert f"{path}: {len(data) // 3} damaged bytes are skipped" in caplog.text


def test_segments_at_rest_leave_the_memory_of_their_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "SEGMENT_SECONDS", 0.05)
    store = LiveStore(TOKENS, tmp_path / "chat")
    store.agree(Vocabulary(100, "f"))
    for number in range(3):
        store.append([ids(number)])
        until(lambda: log.put_to_rest(tmp_path / "chat", lambda _: True))
        until(lambda: len(store) == 0)
    store.close()


RUNNING = """
import sys
from pathlib import Path
import numpy as np
from draftstore.live.log import LiveDocument
from draftstore.live.shared import Vocabulary
from draftstore.live.store import LiveStore
from draftstore.live.source import tokenizer_of
store, tokenizer = LiveStore(10_000, Path(sys.argv[1])), tokenizer_of(Path(sys.argv[1]))
store.agree(Vocabulary(tokenizer.vocab_size, tokenizer.fingerprint))
for line in sys.stdin:
    text, _, digest = line[:-1].partition("|")
    ids = tokenizer.encode(text, bos=False)
    store.append([LiveDocument.of(np.array([5, 6]), ids, bytes.fromhex(digest))])
    print(len(store), store.refused, flush=True)
"""


def test_a_take_down_covers_the_log_and_memory_of_a_running_process_and_later_appends(
    tmp_path: Path, small_tokenizer: TextTokenizer
) -> None:
    folder = tmp_path / "chat"
    adopt(folder, small_tokenizer)
    with subprocess.Popen(
        [sys.executable, "-c", RUNNING, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        given, answers = process.stdin, process.stdout
        assert given is not None
        assert answers is not None

        def say(text: str) -> tuple[int, int]:
            print(text, file=given, flush=True)
            size, refused = answers.readline().split()
            return int(size), int(refused)

        follower = LiveStore(TOKENS, folder)
        try:
            talk = identify(
                [{"role": "user", "content": "?"}, {"role": "assistant", "content": "forget me, too"}]
            )
            texts = (
                "a harmless answer",
                "the number of jane is 42",
                "forget me",
                f"forget me, too|{talk.document.hex()}",
            )
            sizes = [say(text)[0] for text in texts]
            until(lambda: len(follower) == sizes[-1])
            rules = TakeDowns(
                documents=frozenset([talk.document]),
                answers=frozenset([answer_digest(" forget me\n")]),
                containing=(Fragment.of("Jane IS 42", ignore_case=True),),
            )
            held = Held(str(folder))
            assert still_held(folder, rules) == held._replace(log=3, unclear=1)
            assert take_down(folder, rules) == 3
            assert still_held(folder, rules) == held._replace(unclear=1)
            assert len(follower) == sizes[0]
            assert say("forget me") == (sizes[0], 1)
            assert say("so jane is 42 is it") == (sizes[0], 2)
            assert say(f"forget me, too, ended otherwise|{talk.document.hex()}") == (sizes[0], 3)
            size, _ = say(f"forget me, too|{identify('of another conversation').document.hex()}")
            size, _ = say("well")
            until(lambda: len(follower) == size)
            assert take_down(folder, rules) == 0  # nothing new
            (path,) = (path for path in log.segments(folder) if read(path))
            found = [small_tokenizer.decode(each.ids[each.prompt_size :]) for _, each in log.documents(path)]
            assert found == ["a harmless answer", "forget me, too", "well"]
            stuck = Writer(folder, TOKENS)  # a process that does not follow
            assert still_held(folder, rules) == held._replace(memory=1, unclear=2)
            stuck.close()
            assert take_down(folder, TakeDowns()) == 0
            assert say("forget me")[1] == 3, "taken back"
        finally:
            given.close()
            follower.close()


@pytest.mark.parametrize(
    ("text", "unclear"),
    [
        ("whole</s>", False), ("cut", True), ("be<s>fore</s>", True), ("<think>hm</think>so</s>", True),
        ("</s>", False),
    ],
)  # fmt: skip
def test_answers_that_a_response_log_may_know_otherwise_cannot_be_compared(
    text: str, unclear: bool, small_tokenizer: TextTokenizer
) -> None:
    found = LiveDocument(small_tokenizer.encode(text, bos=False))
    rules = TakeDowns(answers=frozenset([b"d" * 16]))
    assert rules.unclear(found, small_tokenizer) == unclear
    assert not rules.unclear(found._replace(digest=b"d" * 16), small_tokenizer)
    assert not TakeDowns(documents=rules.answers).unclear(found, small_tokenizer)


def test_a_take_down_does_not_wait_for_a_process_that_has_taken_nothing_yet(
    tmp_path: Path, small_tokenizer: TextTokenizer
) -> None:
    folder = tmp_path / "chat"
    adopt(folder, small_tokenizer)
    store = LiveStore(TOKENS, folder)
    try:
        assert take_down(folder, TakeDowns(containing=(Fragment.of("forget me"),))) == 0
        assert still_held(folder, TakeDowns()) == Held(str(folder))
        store.agree(Vocabulary(small_tokenizer.vocab_size, small_tokenizer.fingerprint))
        store.append([LiveDocument(small_tokenizer.encode("please forget me", bos=False))])
        assert (len(store), store.refused) == (0, 1)
    finally:
        store.close()
