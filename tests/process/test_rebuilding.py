"""Collections whose stores keep up with their sources: what is built, what is not, and what a kill leaves behind."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from sqlalchemy.orm import sessionmaker
from tokenizers import Tokenizer

from draftstore.errors import CorpusError, DraftstoreError
from draftstore.stores.crest.build import CrestOptions
from draftstore.stores.kind import Workers
from draftstore.stores.rest import updating
from draftstore.text.digests import digest_keys, identify, stack_digests
from draftstore.text.records import Document
from draftstore.text.scans import groups_of
from draftstore.text.sharding import Group
from pipelines.rebuild import CrestRebuild
from schema.catalogue.builds import list_builds
from schema.catalogue.lineage import store_digests
from schema.catalogue.publishing import Transaction
from schema.cli.corpora import corpus
from schema.collections.collecting import NewSource, add_sources
from schema.collections.removal_files import collection_folder
from schema.db.database import make_engine
from schema.db.embedded import HOME_VARIABLE
from schema.renewal import making, publishing
from schema.renewal import stores as renewing
from schema.renewal import survey as surveying
from schema.renewal.ledger import Built, Ledger
from schema.renewal.stores import Change, LaggingStore, is_due, renew_rest
from schema.renewal.survey import survey
from tests.conftest import small_tokenizer_folder, wordy_tokenizer_folder
from tests.reference import plain_digest

WORKERS = Workers(workers=1)
WORDS = ["the", "of", "and", "a", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are"]


def text(number: int) -> str:
    rng = np.random.default_rng(number)
    return " ".join(rng.choice(WORDS, 30))


class Site:
    """A collection `small` of two files."""

    def __init__(self, folder: Path, transaction: Transaction) -> None:
        self.transaction = transaction
        self.files = [folder / "a.jsonl", folder / "b.jsonl"]
        self.write(0, range(40))
        self.write(1, range(40, 50))
        tokenizer = small_tokenizer_folder(folder / "tokenizer")
        with self.transaction() as session:
            sources = [NewSource(place=str(file)) for file in self.files]
            add_sources(session, "small", sources, str(tokenizer))

    def write(self, file: int, numbers: Any) -> None:
        lines = [json.dumps({"id": f"d{number}", "text": text(number)}) for number in numbers]
        self.files[file].write_text("\n".join(lines) + "\n")

    def rebuild(self) -> tuple[Built, Change]:
        with Ledger() as ledger:
            surveyed = survey(ledger, "small", 1 << 20)
            return renew_rest(ledger, surveyed, 1)

    def due(self, options: CrestOptions, after: float) -> bool:
        store = LaggingStore("crest", options, WORKERS, after)
        with Ledger() as ledger:
            return is_due(ledger, survey(ledger, "small", 1 << 20), store)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: str) -> Iterator[Site]:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    engine = make_engine()
    yield Site(tmp_path, sessionmaker(engine).begin)
    engine.dispose()


def held(store: Path) -> set[bytes]:
    digests = store_digests(store)
    assert digests is not None
    return set(digest_keys(digests).tolist())


def expected(numbers: Any) -> set[bytes]:
    return set(digest_keys(stack_digests(plain_digest(text(number)) for number in numbers)).tolist())


def test_only_changed_documents_are_tokenized(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    first, change = site.rebuild()
    assert (len(change.added), change.kept, change.removed, change.base) == (50, 0, 0, None)
    assert held(first.path) == expected(range(50))
    read: list[str] = []

    def noted(group: Group, **options: Any) -> Iterator[Document]:
        for document in group(**options):
            read.append(document.id)
            yield document

    monkeypatch.setattr(
        surveying, "groups_of", lambda *args: [partial(noted, each) for each in groups_of(*args)]
    )
    site.write(1, range(43, 53))
    second, change = site.rebuild()
    assert sorted(read) == ["d50", "d51", "d52"]
    assert (change.kept, change.removed, change.base) == (47, 3, first.path)
    assert held(second.path) == expected([*range(40), *range(43, 53)])
    assert second.manifest.corpus["characters"] == sum(len(text(n)) for n in [*range(40), *range(43, 53)])
    assert not any((collection_folder("small") / "tokens").rglob("*.tokens"))


def test_an_unchanged_collection_is_not_rebuilt(site: Site) -> None:
    first, _ = site.rebuild()
    site.write(0, reversed(range(40)))  # the same documents in another order
    again, change = site.rebuild()
    assert (again.build_id, again.reused) == (first.build_id, True)
    assert (len(change.added), change.kept, change.removed) == (0, 50, 0)


def test_a_killed_rebuild_resumes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = site.rebuild()
    site.write(1, range(45, 60))

    class Killed(BaseException):
        pass

    def kill(*_: Any, **__: Any) -> None:
        raise Killed

    for module, name in ((updating, "merge_segment"), (updating, "seal_store"), (renewing, "remove")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, kill)
            with pytest.raises(Killed):
                site.rebuild()
    assert any(collection_folder("small").rglob("*.tokens"))
    made, _ = site.rebuild()
    assert not any(collection_folder("small").rglob("*.tokens"))
    assert held(made.path) == expected([*range(40), *range(45, 60)])
    assert made.build_id != first.build_id
    with site.transaction() as session:
        states = [build.state for build in list_builds(session, kind="rest")]
    assert sorted(states) == ["failed", "failed", "finished", "finished"]  # the last kill came after its end


def test_without_a_tokenizer_texts_are_built_and_conversations_are_not(site: Site, tmp_path: Path) -> None:
    log = tmp_path / "answers.jsonl"
    with site.transaction() as session:
        add_sources(session, "plain", [NewSource(place=str(log), log=True)])
    log.write_text('{"text": "one"}\n')
    with Ledger() as ledger:
        assert len(survey(ledger, "plain", 1 << 20).contents.digests) == 1
        log.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
        with pytest.raises(DraftstoreError, match="conversations, whose text depends"):
            survey(ledger, "plain", 1 << 20)
        log.write_text("{}\n")
        with pytest.raises(
            CorpusError, match=r"no document of plain can be read: 1 bad record, .*:line 1: has n"
        ):
            survey(ledger, "plain", 1 << 20)


TEMPLATE = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"


def set_template(folder: Path, template: str) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))


def test_removed_documents_stay_out_under_any_template_and_tokenizer(site: Site, tmp_path: Path) -> None:
    chats = [
        [{"role": "user", "content": text(n)}, {"role": "assistant", "content": text(n + 100)}]
        for n in range(9)
    ]
    lines = [json.dumps({"id": f"c{n}", "messages": chat}) for n, chat in enumerate(chats)]
    for file in site.files:
        file.write_text("\n".join(lines) + "\n")
    set_template(tmp_path / "tokenizer", TEMPLATE)
    options = CrestOptions(name="small-crest", max_n=3, ngrams=500)
    before, _ = site.rebuild()
    with Ledger() as ledger:
        publishing.publish(ledger, options.name, making.make_store(ledger, "crest", options, WORKERS, before))
    assert not site.due(options, after=1.0)
    take_down("c3")
    left = set(
        digest_keys(stack_digests(identify(chat).document for chat in (*chats[:3], *chats[4:]))).tolist()
    )

    def rebuilt() -> tuple[Built, Change]:
        built, change = site.rebuild()
        assert held(built.path) == left
        with Ledger() as ledger:
            crest = making.make_store(ledger, "crest", options, WORKERS, built)
            publishing.publish(ledger, options.name, crest, ["tokenizer"])
        assert not site.due(options, after=1.0)
        return built, change

    removed, change = rebuilt()
    assert (change.base, change.removed) == (before.path, 1)
    set_template(tmp_path / "tokenizer", "New: " + TEMPLATE)
    assert site.due(options, after=1.0), "the template is another one"
    rendered, change = rebuilt()
    assert (rendered.build_id > removed.build_id, change.base) == (True, None)
    file = tmp_path / "tokenizer" / "tokenizer.json"
    larger = Tokenizer.from_file(str(file))
    larger.add_special_tokens(["<more>"])
    larger.save(str(file))
    assert site.due(options, after=1.0), "the tokenizer is another one"
    assert rebuilt()[1].base is None


def test_documents_without_tokens_do_not_delay_a_removal(site: Site, tmp_path: Path) -> None:
    (tmp_path / "wordy").mkdir()
    with site.transaction() as session:
        add_sources(session, "small", [], str(wordy_tokenizer_folder(tmp_path / "wordy")))
    site.files[0].write_text('{"text": "one two"}\n{"text": "two"}\n')
    site.files[1].write_text('{"text": "..."}\n')
    site.rebuild()
    site.files[0].write_text('{"text": "two"}\n')
    made, _ = site.rebuild()
    assert held(made.path) == set(digest_keys(stack_digests([plain_digest("two")])).tolist())


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin"])
def test_damaged_stores_are_not_the_base_of_the_next_one(site: Site, name: str) -> None:
    first, _ = site.rebuild()
    file = first.path / name
    if name == "tokens.bin":
        content = bytearray(file.read_bytes())
        content[40] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    site.write(1, range(40, 52))
    second, change = site.rebuild()
    assert (len(change.added), change.base) == (52, None)
    assert held(second.path) == expected(range(52))


def take_down(document: str) -> None:
    command = ["remove", "small", "--document", document, "--yes"]
    assert CliRunner().invoke(corpus, command, catch_exceptions=False).exit_code == 0


def prove() -> int:
    return CliRunner().invoke(corpus, ["prove-removed", "small"], catch_exceptions=False).exit_code


def test_trees_are_rebuilt_when_enough_documents_are_new_or_some_were_removed(site: Site) -> None:
    options = CrestOptions.of(CrestRebuild(), name="small-crest")

    def publish() -> None:
        rest, _ = site.rebuild()
        with Ledger() as ledger:
            crest = making.make_store(ledger, "crest", options, WORKERS, rest)
            assert site.due(options, 0.0)  # killed, or refused, before it went live
            publishing.publish(ledger, "small", rest)
            publishing.publish(ledger, "small-crest", crest)

    assert site.due(options, 1.0)
    publish()
    assert not site.due(options, 0.0)
    assert site.due(options.changed(max_n=3), 1.0)
    site.write(1, range(40, 54))
    site.rebuild()
    assert site.due(options, 0.05)
    assert not site.due(options, 0.1)
    take_down("d7")
    assert prove() == 5
    assert site.due(options, 1.0)
    publish()
    assert prove() == 0
