"""A live log as a source of a collection: each text once, immediate take-down, and what may not share it."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from draftstore.errors import CorpusError, EarlierVersionError, TokenizerError
from draftstore.hf.requests import GenerationRequest
from draftstore.live import log, removing, shared
from draftstore.live.log import LiveDocument, Writer
from draftstore.live.shared import Vocabulary
from draftstore.live.store import LiveStore
from draftstore.text.digests import answer_digest
from draftstore.text.scans import documents_of
from draftstore.text.tokenizer import TextTokenizer
from schema.catalogue.builds import CatalogueError
from schema.cli.common import catalogue_session
from schema.cli.corpora import corpus
from schema.collections import collecting
from schema.collections.proving import removed_keys
from services.worker.answers import Answer
from tests.conftest import small_tokenizer_folder, wordy_tokenizer_folder
from tests.fakes.waiting import until
from tests.fakes.workers import FakeEngine, running_worker
from tests.reference import plain_digest
from tests.unit.schema.test_collecting import ask, home, run

__all__ = ["home"]
pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return small_tokenizer_folder(tmp_path / "model")


def refused(error: type[Exception], match: str, *arguments: object) -> None:
    with pytest.raises(error, match=match):
        run(*arguments)


Given = tuple[str, dict[str, Any]]
UNFINISHED = {"two bytes": "é", "three bytes": "東", "four bytes": "𝄞"}
ENDINGS: dict[str, Given] = {
    "eos": ("a plain answer", {}),
    "length": ("an answer that goes on", {"max_tokens": 5}),
    "stop string": ("it ends here. and not there", {"stop": ["."]}),
    "stop string inside a token": ("one two three four", {"stop": ["hre"]}),
    "two stop strings": ("first a comma, then a dot.", {"stop": ["zzz", ", "]}),
    "min_tokens": ("no. not yet. now. or later", {"stop": ["."], "min_tokens": 12}),
    **{name: (f"cut in {sign}", {"cut": 1}) for name, sign in UNFINISHED.items()},
    "special token inside": ("before<s>after", {}),
    "special token at the end": ("at the end<s>", {}),
    "tool call": ('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', {}),
    "json": ('{"answer": [1, 2]}', {}),
    "empty": ("", {}),
}
EXACT = {"eos", "length", "special token at the end", "tool call", "json"}
"""Endings whose text says all that the token ids do."""
UNEQUAL = {"stop string", "two stop strings", "four bytes", "special token inside"}


class LiveEngine(FakeEngine):
    """Says the endings in order, and remembers its answers; with digests only if `knows`."""

    def __init__(self, tokenizer: TextTokenizer, store: LiveStore, *, knows: bool) -> None:
        super().__init__(tokenizer)
        self._store, self._knows = store, knows

    def tokens_of(self, work: GenerationRequest) -> list[int]:
        asked = self.tokenizer.decode(work.prompt)
        text, given = next(each for name, each in ENDINGS.items() if f": {name}? " in asked)
        ids = self.tokenizer.encode(text, bos=False).tolist()
        ids = ids[: -given["cut"]] if "cut" in given else [*ids, *self.facts.ends]
        return ids[: work.max_tokens]

    def remember(self, answer: Answer, digest: bytes) -> None:
        self._store.append(
            [LiveDocument.of(answer.request.prompt, answer.tokens, digest if self._knows else b"")]
        )


@pytest.mark.parametrize("knows", [True, False])
def test_answers_are_removed_however_they_end(
    knows: bool, tmp_path: Path, tokenizer: Path, small_tokenizer: TextTokenizer
) -> None:
    folder, responses = tmp_path / "live", tmp_path / "answers.jsonl"
    ask("add", "chat", "--response-log", responses, "--live", folder, "--tokenizer", tokenizer)
    store = LiveStore(10_000, folder)
    store.agree(Vocabulary(small_tokenizer.vocab_size, small_tokenizer.fingerprint))
    names = {}
    with running_worker(LiveEngine(small_tokenizer, store, knows=knows), log=responses) as worker:
        for name, (_, given) in ENDINGS.items():
            asked = {key: value for key, value in given.items() if key != "cut"}
            status, reply = worker.ask("chat", messages=[{"role": "user", "content": f"{name}?"}], **asked)
            assert status == 200, reply
            names[name] = reply["id"]
        until(lambda: len(responses.read_text().splitlines()) == len(ENDINGS) - 1)  # without the empty one
    overwritten = {
        name: ask("remove", "chat", "--document", names[name], "--yes")["overwritten"]
        for name in ENDINGS if name != "empty"
    }  # fmt: skip
    gone = {name for name, count in overwritten.items() if count == 1}
    assert gone == {*overwritten} if knows else EXACT <= gone <= {*overwritten} - UNEQUAL
    left = [found for path in log.segments(folder) for _, found in log.documents(path)]
    assert len(left) == len(overwritten) - len(gone)
    with catalogue_session() as session:
        keys = set(removed_keys(collecting.get_collection(session, "chat"), None).tolist())
    assert {answer_digest("a plain answer"), answer_digest(ENDINGS["tool call"][0])} <= keys, "of builds, too"
    proof = CliRunner().invoke(corpus, ["prove-removed", "chat", "--json"])
    assert proof.exit_code == (0 if knows else 5)
    assert [row["unclear"] for row in json.loads(proof.stdout)["live_logs"]] == [len(left)]
    run("prove-removed", "chat", "--vouch", folder)
    store.close()


def test_texts_are_built_once_and_not_after_their_removal(
    tmp_path: Path, tokenizer: Path, small_tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, responses = tmp_path / "live", tmp_path / "answers.jsonl"
    logged = {"id": "r", "text": "hello logged twice"}

    def answered(text: str, digest: bytes = b"") -> LiveDocument:
        ids = small_tokenizer.encode(text, bos=False)
        return LiveDocument.of(small_tokenizer.encode("hello", bos=False), ids, digest)

    def wanted() -> dict[str, str]:
        with catalogue_session() as session:
            collection = collecting.get_collection(session, "chat")
        scan = collecting.scan_collection(collection, small_tokenizer)
        digests = collecting.wanted_of(collection, scan)
        found = {each.id: each.text for each in documents_of(scan, digests)}
        assert len(found) == len({*found.values()}) == len(digests)
        return found

    ask("add", "chat", "--live", folder, "--response-log", responses, "--tokenizer", tokenizer)
    responses.write_text(json.dumps(logged) + "\n")
    speech = Vocabulary(small_tokenizer.vocab_size, small_tokenizer.fingerprint)
    earlier, later = (LiveStore(10_000, folder) for _ in range(2))
    for store in (earlier, later):
        store.agree(speech)
    known = plain_digest("hello logged twice")
    earlier.append(
        [answered(" logged twice</s>", known), answered("once"), answered(" "), answered("the same")]
    )
    later.append([answered("the same"), answered("jane is 42")])
    first = wanted()
    assert sorted(first.values()) == ["hello logged twice", "jane is 42", "once", "the same"]
    everywhere = ask("remove", "chat", "--containing", "hello", "--dry-run")
    assert everywhere["documents"] == 4, "the ends of prompts, which live logs alone have"
    earlier.close()
    assert log.put_to_rest(folder, lambda _: True) == 1
    assert wanted() == first  # by the same ids

    place = next(each for each, text in first.items() if text == "once")
    assert ask("remove", "chat", "--document", place, "--yes")["overwritten"] == 1
    done = run("remove", "chat", "--containing", "Jane is 42", "--ignore-case", "--yes")
    assert done.endswith("the next rebuild will exclude them; 1 document of live logs overwritten\n")
    assert ask("remove", "chat", "--document", "r", "--yes")["overwritten"] == 1
    assert sorted(wanted().values()) == ["the same"]
    later.append([answered("so jane is 42"), answered("ended otherwise", known), answered("still here</s>")])
    assert (later.refused, sorted(wanted().values())) == (2, ["still here</s>", "the same"])
    held = {"place": str(folder), "log": 0, "memory": 0, "unclear": 2, "damaged": 0, "vouched": None}
    proof = CliRunner().invoke(corpus, ["prove-removed", "chat", "--json"])
    assert (proof.exit_code, json.loads(proof.stdout)["live_logs"]) == (5, [held])
    run("prove-removed", "chat", "--vouch", folder)

    later.append([answered("written since")])
    proof = CliRunner().invoke(corpus, ["prove-removed", "chat", "--json"])
    assert (proof.exit_code, json.loads(proof.stdout)["live_logs"][0]["unclear"]) == (5, 1)

    late = Writer(folder, 10_000)  # a process that does not follow
    late.append([answered("once")])
    checked = CliRunner().invoke(corpus, ["prove-removed", "chat"])
    assert (checked.exit_code, "NOT proven" in checked.stderr) == (5, True)
    written = r"removal 4 is written, but not all live logs forgot: .* no sign of life"
    with monkeypatch.context() as patch:
        patch.setattr(removing, "SILENT_SECONDS", 0.5)
        refused(CorpusError, written, "remove", "chat", "--containing", "nobody", "--later", "--yes")
    late.close()
    run("add", "chat", "--tokenizer", tokenizer)  # takes down again
    run("prove-removed", "chat", "--vouch", folder)

    flipped = late.path.read_bytes()
    late.path.write_bytes(flipped[:12] + bytes([flipped[12] ^ 8]) + flipped[13:])  # of its length
    run("remove", "chat", "--containing", "somebody", "--later", "--yes")
    proof = CliRunner().invoke(corpus, ["prove-removed", "chat", "--json"])
    assert (proof.exit_code, json.loads(proof.stdout)["live_logs"][0]["damaged"] > 0) == (5, True)
    later.close()


def test_a_log_of_an_earlier_version_is_refused_and_unchanged(
    tmp_path: Path, tokenizer: Path, small_tokenizer: TextTokenizer
) -> None:
    folder = tmp_path / "live"
    folder.mkdir()
    state = {"size": small_tokenizer.vocab_size, "fingerprint": small_tokenizer.fingerprint}
    (folder / "live.json").write_text(json.dumps(state))
    with pytest.raises(EarlierVersionError, match="move the folder away, and a new log begins"):
        LiveStore(10_000, folder)
    refused(EarlierVersionError, "earlier version", "add", "chat", "--live", folder, "--tokenizer", tokenizer)
    assert [path.name for path in folder.iterdir()] == ["live.json"]


def test_a_log_belongs_to_one_collection_with_its_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    folder, wordy = tmp_path / "live", tmp_path / "wordy"
    wordy.mkdir()
    wordy_tokenizer_folder(wordy)
    refused(TokenizerError, "name the tokenizer of the collection chat", "add", "chat", "--live", folder)
    refused(CorpusError, "is not a live log", "add", "chat", "--live", tokenizer / "tokenizer.json")
    run("add", "chat", "--live", folder, "--tokenizer", tokenizer)
    refused(
        CatalogueError, "chat has this live log", "add", "other", "--live", folder, "--tokenizer", tokenizer
    )
    (tmp_path / "link").symlink_to(folder)
    link = ("add", "other", "--live", tmp_path / "link", "--tokenizer", tokenizer)
    refused(CatalogueError, "chat has this live log", *link)
    shared.agree(folder, Vocabulary(384, "another"))
    refused(TokenizerError, "holds ids of the tokenizer another", "add", "chat", "--tokenizer", wordy)
    refused(TokenizerError, "holds ids of the tokenizer another", "scan", "chat")
    folder.rename(tmp_path / "unmounted")
    refused(CorpusError, "the disk may not be mounted", "scan", "chat")
