"""A live log as a source of a collection: each text once, immediate take-down, and what may not share it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from draftstore.errors import CorpusError, TokenizerError
from draftstore.live import log, removing
from draftstore.live.log import Document, Vocabulary, Writer
from draftstore.live.store import LiveStore
from draftstore.text.scans import documents_of
from draftstore.text.tokenizer import TextTokenizer
from schema.catalogue.builds import CatalogueError
from schema.cli.common import catalogue_session
from schema.cli.corpora import corpus
from schema.collections import collecting
from tests.conftest import small_tokenizer_folder, wordy_tokenizer_folder
from tests.unit.schema.test_collecting import ask, home, run

__all__ = ["home"]
pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return small_tokenizer_folder(tmp_path / "model")


def refused(error: type[Exception], match: str, *arguments: object) -> None:
    with pytest.raises(error, match=match):
        run(*arguments)


def test_each_text_is_there_once_and_gone_once_it_is_removed(
    tmp_path: Path, tokenizer: Path, small_tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, responses = tmp_path / "live", tmp_path / "answers.jsonl"

    def answered(text: str, *, elsewhere: bool = False) -> Document:
        ids = small_tokenizer.encode(text, bos=False)
        return Document.of(small_tokenizer.encode("hello", bos=False), ids, elsewhere=elsewhere)

    def wanted() -> dict[str, str]:
        with catalogue_session() as session:
            collection = collecting.get_collection(session, "chat")
        scan = collecting.scan_collection(collection, small_tokenizer)
        digests = collecting.wanted_of(collection, scan)
        found = {each.id: each.text for each in documents_of(scan, digests)}
        assert len(found) == len({*found.values()}) == len(digests)
        return found

    ask("add", "chat", "--response-log", responses, "--live", folder, "--tokenizer", tokenizer)
    responses.write_text(json.dumps({"id": "r", "text": "hello logged twice</s>\n"}) + "\n")
    speech = Vocabulary(small_tokenizer.vocab_size, small_tokenizer.fingerprint)
    earlier, later = (LiveStore(10_000, folder) for _ in range(2))
    for store in (earlier, later):
        store.agree(speech)
    earlier.append(
        [answered("logged twice", elsewhere=True), answered("once"), answered(" "), answered("the same")]
    )
    later.append([answered("the same"), answered("hello logged twice</s>\n"), answered("jane is 42")])
    first = wanted()
    assert sorted(first.values()) == ["hello logged twice</s>\n", "jane is 42", "once", "the same"]
    earlier.close()
    assert log.put_to_rest(folder, lambda _: True) == 1
    assert wanted() == first  # by the same ids

    place = next(each for each, text in first.items() if text == "once")
    assert ask("remove", "chat", "--document", place, "--yes")["overwritten"] == 1
    done = run("remove", "chat", "--containing", "jane is 42", "--yes")
    assert done.endswith("the next rebuild will exclude them; 1 document of live logs overwritten\n")
    assert (
        ask("remove", "chat", "--document", "r", "--yes")["overwritten"] == 2
    )  # the answer of the response log, too
    assert sorted(wanted().values()) == ["the same"]
    later.append([answered("so jane is 42"), answered("still here")])
    assert (later.refused, sorted(wanted().values())) == (1, ["still here", "the same"])
    assert ask("prove-removed", "chat")["live_logs"] == [{"place": str(folder), "log": 0, "memory": 0}]

    late = Writer(folder, 10_000)  # a process that does not follow
    late.append([answered("once")])
    checked = CliRunner().invoke(corpus, ["prove-removed", "chat"])
    assert (checked.exit_code, "NOT proven" in checked.stderr) == (5, True)
    monkeypatch.setattr(removing, "SECONDS", 0.1)
    written = r"removal 4 is written, but not all live logs forgot: .* did not forget"
    refused(CorpusError, written, "remove", "chat", "--containing", "nobody", "--yes")
    late.close()
    run("add", "chat", "--tokenizer", tokenizer)  # takes down again
    assert ask("prove-removed", "chat")["live_logs"][0]["log"] == 0
    later.close()


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
    log.agree(folder, Vocabulary(384, "another"))
    refused(TokenizerError, "holds ids of the tokenizer another", "add", "chat", "--tokenizer", wordy)
    refused(TokenizerError, "holds ids of the tokenizer another", "scan", "chat")
    folder.rename(tmp_path / "unmounted")
    refused(CorpusError, "the disk may not be mounted", "scan", "chat")
