import dataclasses
import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from draftstore.errors import MissingPluginError, StoreError, TokenizerError
from draftstore.storage.files import hash_file
from draftstore.storage.manifest import (
    FileEntry,
    Manifest,
    TokenizerIdentity,
    WatchedFiles,
    load_manifest,
    manifest_digest,
    model_name,
    save_manifest,
    verify_files,
)
from draftstore.storage.plugins import load_plugin
from draftstore.storage.report import ReadReport, RecordProblem

ABC = FileEntry(3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
MANIFEST = Manifest(
    kind="rest",
    name="café",
    created="2025-01-02T03:04:05+00:00",
    vocab_size=384,
    token_dtype="uint16",
    tokenizer=TokenizerIdentity("small-bpe", "0123456789abcdef"),
    parameters={"segment_tokens": 1000},
    corpus={"sources": ["a.jsonl"], "fingerprint": "f0"},
    counts={"documents": 1, "tokens": 2, "entries": 3},
    files={"tokens.bin": ABC, "tokenizer/tokenizer.json": ABC},
)
SHOWN = {"sha256": ABC.sha256, "size": 3}
DOCUMENT: dict[str, Any] = {
    "corpus": {"fingerprint": "f0", "sources": ["a.jsonl"]},
    "counts": {"documents": 1, "entries": 3, "tokens": 2},
    "created": "2025-01-02T03:04:05+00:00",
    "files": {"tokenizer/tokenizer.json": SHOWN, "tokens.bin": SHOWN},
    "format_version": 1,
    "kind": "rest",
    "name": "café",
    "parameters": {"segment_tokens": 1000},
    "target_model": None,
    "token_dtype": "uint16",
    "tokenizer": {"fingerprint": "0123456789abcdef", "name": "small-bpe"},
    "vocab_size": 384,
}
GOLDEN = json.dumps(DOCUMENT, indent=2, ensure_ascii=False) + "\n"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer").mkdir()
    for name in MANIFEST.files:
        (tmp_path / name).write_bytes(b"abc")
    save_manifest(tmp_path, MANIFEST)
    return tmp_path


def test_the_bytes_of_a_manifest(store: Path) -> None:
    assert (store / "manifest.json").read_bytes() == GOLDEN.encode()
    assert load_manifest(store, "rest") == MANIFEST
    assert verify_files(store, MANIFEST) == []
    assert manifest_digest(store) == hash_file(store / "manifest.json")
    assert MANIFEST.size == 6


def changed(**fields: Any) -> bytes:
    return json.dumps(DOCUMENT | fields).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOLDEN.encode()[:-20], r"manifest.json is not a manifest .*: the store is damaged, or"),
        (GOLDEN.encode("latin-1"), r"manifest.json is not UTF-8 text"),
        (changed(format_version=2, kind=1), r"format_version: Input should be 1"),
        (changed(extra=1), r"extra: Unexpected keyword"),
        (changed(files={"../a": {"size": 1, "sha256": ""}}), r"'../a' is outside the store"),
        (changed(files={"/etc/passwd": {"size": 1, "sha256": ""}}), r"is outside the store"),
        (changed(counts={"documents": 1, "tokens": 1}), r"counts: .*the count 'entries' is missing"),
        (changed(vocab_size=0), r"vocab_size: Input should be greater"),
        (changed(token_dtype="float32"), r"token_dtype: String should match"),
    ],
)
def test_refusals(store: Path, content: bytes, message: str) -> None:
    (store / "manifest.json").write_bytes(content)
    with pytest.raises(StoreError, match=message):
        load_manifest(store)


def test_another_kind(store: Path) -> None:
    with pytest.raises(StoreError, match="is a store of kind 'rest', expected 'crest'"):
        load_manifest(store, "crest")


def test_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    reasons = {
        "": r"it has no manifest\.json",
        "absent": "there is no such directory",
        "file": "it is a file",
    }
    for name, reason in reasons.items():
        for read in (load_manifest, manifest_digest):
            with pytest.raises(StoreError, match=f"is not a store: {reason}"):
                read(tmp_path / name)


def test_another_model() -> None:
    bound = dataclasses.replace(MANIFEST, target_model="org/model")
    for wanted in (None, "org/model"):
        bound.require_model(wanted, Path("s"), "states", "build another")
    for store in (bound, MANIFEST):
        with pytest.raises(StoreError, match=r"s holds states of the model .*, found 'other': build another"):
            store.require_model("other", Path("s"), "states", "build another")


def test_the_name_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "llama.gguf").touch()
    assert model_name(tmp_path / "llama.gguf") == "llama"
    assert model_name(f"{tmp_path}/../{tmp_path.name}/") == tmp_path.name
    assert model_name("org/llama") == "org/llama"


def test_another_tokenizer() -> None:
    MANIFEST.require_tokenizer(TokenizerIdentity("other name", "0123456789abcdef"), Path("s"))
    with pytest.raises(TokenizerError, match=r"s was built with tokenizer 'small-bpe' .*, found 'x' \(fff\)"):
        MANIFEST.require_tokenizer(TokenizerIdentity("x", "fff"), Path("s"))


def store_files(store: Path) -> list[str]:
    return sorted(load_manifest(store).files)


def test_a_manifest_names_every_other_file(small_store: Path) -> None:
    found = {path.relative_to(small_store).as_posix() for path in small_store.rglob("*") if path.is_file()}
    assert found == {"manifest.json", *store_files(small_store)}
    assert "tokenizer/tokenizer.json" in found


def test_verify_finds_one_flipped_byte_in_every_file(small_store: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(small_store, store)
    manifest = load_manifest(store)
    for name in store_files(store):
        path = store / name
        whole = path.read_bytes()
        for position in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
            load_manifest(store)  # opening trusts the sizes
            [problem] = verify_files(store, manifest)
            expected = f"{path} has SHA-256 {hash_file(path)}, expected {manifest.files[name].sha256}: "
            assert problem.startswith(expected)
        path.write_bytes(whole)
    seen: list[tuple[Any, ...]] = []
    assert verify_files(store, manifest, lambda *now: seen.append(now)) == []
    assert seen[-1] == (manifest.size, manifest.size)


@pytest.mark.parametrize("damage", ["missing", "cut", "longer", "a folder"])
def test_missing_and_cut_files_are_refused(small_store: Path, tmp_path: Path, damage: str) -> None:
    for name in store_files(small_store):
        store = tmp_path / name.replace("/", "-")
        shutil.copytree(small_store, store)
        manifest = load_manifest(store)
        whole = (store / name).read_bytes()
        (store / name).unlink()
        if damage == "a folder":
            (store / name).mkdir()
        elif damage != "missing":
            (store / name).write_bytes(whole[:-1] if damage == "cut" else whole + b"x")
        reason = "is missing" if damage in ("missing", "a folder") else r"has .* bytes, expected"
        with pytest.raises(StoreError, match=rf"{store / name} {reason}.*: the store is damaged"):
            load_manifest(store)
        [problem] = verify_files(store, manifest)
        assert problem.startswith(str(store / name))


def test_a_file_that_is_cut_is_noticed(small_store: Path, tmp_path: Path) -> None:
    store, manifest = shutil.copytree(small_store, tmp_path / "copy"), load_manifest(small_store)
    keys = store / "keys.bin"
    with closing(WatchedFiles(store, manifest)) as files:
        assert files.check() is None
        (store / "tokenizer" / "tokenizer.json").write_bytes(b"")  # nobody maps it
        with keys.open("ab") as file:
            file.write(b"longer")
        assert files.check() is None
        keys.write_bytes(b"cut")
        assert (
            files.check()
            == files.damage
            == (f"{keys} was truncated: stores are replaced, never written to; build it again")
        )
    assert files.damage is not None
    keys.unlink()
    with pytest.raises(OSError, match="No such file"):
        WatchedFiles(store, manifest)


def test_a_plugin_that_is_not_installed_is_named() -> None:
    with pytest.raises(MissingPluginError, match="the stone is not installed here: install draftstore-serv"):
        load_plugin("draftstore.backends", "stone", "the stone")
    assert callable(load_plugin("draftstore.backends", "postgres", "PostgreSQL"))


def problem(number: int, *, truncated: bool = False) -> RecordProblem:
    return RecordProblem(f"c.jsonl:line {number}", "not JSON", truncated)


def test_only_the_first_problems_are_kept() -> None:
    report = ReadReport(documents=1, empty_documents=2)
    for number in range(15):
        report.add_problem(problem(number, truncated=number == 3))
    whole = ReadReport(documents=3, truncated=1)
    whole.add(report)
    whole.add(report)
    assert (whole.documents, whole.bad_records, whole.empty_documents, whole.truncated) == (5, 30, 4, 3)
    assert whole.problems == [problem(n % 15, truncated=n == 3 or n == 18) for n in range(20)]
    for number in range(50):
        report.add_problem(problem(number))
    assert (report.bad_records, len(report.problems), report.problems[19]) == (65, 20, problem(4))


def test_a_manifest_keeps_the_report() -> None:
    report = ReadReport(3, 2, 1, [problem(1)], ["a.jsonl"], {".parquet": 1}, 1)
    again = ReadReport.of_facts(3, {"fingerprint": "f", **report.facts()})
    assert again == ReadReport(3, 2, 1, [], ["a.jsonl"], {".parquet": 1}, 1)
