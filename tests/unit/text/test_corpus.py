import bz2
import gzip
import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draftstore.errors import CorpusError, TruncatedCorpusError
from draftstore.storage.report import HIDDEN, LINKS, ReadReport
from draftstore.text.chat import Message
from draftstore.text.corpus import (
    SOURCE_PATTERNS,
    Source,
    corpus_fingerprint,
    find_files,
    read_files,
)
from draftstore.text.digests import identify
from draftstore.text.records import Document, read_json_records
from draftstore.text.selecting import RecordOptions
from tests.unit.storage.test_streams import PACKED, PACKERS


def render(messages: Sequence[Message]) -> str:
    return " ".join(f"{message['role']}={message['content']}" for message in messages)


def read(
    *paths: Path, glob: Any = SOURCE_PATTERNS, render: Any = render, **options: Any
) -> tuple[list[Document], ReadReport]:
    report = ReadReport()
    files = find_files(paths, glob, report)
    return list(read_files(files, render=render, report=report, **options)), report


def texts(*paths: Path, **options: Any) -> list[str]:
    return [document.text for document in read(*paths, **options)[0]]


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def write(path: Path, content: bytes | str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


THREE = lines({"id": "a", "text": "one"}, {"text": "two\u2028\x85\r\n"}, {"id": 7, "text": "three"})


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson.gz", ".json.zst", ".jsonl.bz2", ".jsonl.xz", ".JSONL"])
def test_json_lines(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"c{suffix}", PACKERS.get(Path(suffix).suffix, bytes)(THREE))
    documents, report = read(path)
    assert documents == [
        Document.plain("a", "one"),
        Document.plain(f"c{suffix}#2", "two\u2028\x85\r\n"),
        Document.plain("7", "three"),
    ]
    assert report == ReadReport(documents=3)


def test_conversations_are_rendered(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path = write(tmp_path / "c.jsonl", lines({"messages": chat}, {"text": chat}, {"messages": []}))
    documents, report = read(path)
    assert [document.text for document in documents] == ["user=hi assistant=hello"] * 2
    assert report.empty_documents == 1


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
WRITTEN = {**CALL, "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
ASKED, SUNNY = {"role": "user", "content": "weather?"}, {"role": "tool", "content": "sunny"}
FORMS: dict[str, list[Any]] = {
    "null": [ASKED, {"role": "assistant", "content": None, "tool_calls": [WRITTEN]}, SUNNY],
    "absent": [ASKED, {"role": "assistant", "tool_calls": [CALL], "refusal": None, "audio": []}, SUNNY],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "wea"}, {"type": "text", "text": "ther?"}]},
        {"role": "assistant", "content": [], "tool_calls": [CALL]},
        {"role": "tool", "content": [{"type": "text", "text": "sunny"}]},
    ],
    "ShareGPT": [
        {"from": "human", "value": "weather?"},
        {"from": "gpt", "value": "", "tool_calls": [CALL]},
        {"from": "observation", "value": "sunny"},
    ],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["lines", "parquet"])
def test_turns_may_lack_text_have_parts_or_be_of_sharegpt(tmp_path: Path, form: str, kind: str) -> None:
    key, given = "conversations" if form == "ShareGPT" else "messages", []

    def keep(messages: Sequence[Message]) -> str:
        given.append(messages)
        return render(messages)

    if kind == "lines":
        path = write(tmp_path / "c.jsonl", lines({key: FORMS[form]}))
    else:
        path = write_parquet(tmp_path / "c.parquet", {key: [FORMS[form]]})
    [document] = read(path, render=keep)[0]
    assert given == [[ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, SUNNY]]
    assert document.identity == identify(given[0])


def test_null_keys_of_struct_columns_are_dropped(tmp_path: Path) -> None:
    other = {"function": {"name": "time", "arguments": {"zone": "CET"}}}
    turns = [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL, other]}, SUNNY]
    parquet = write_parquet(tmp_path / "c.parquet", {"id": ["1"], "messages": [turns]})
    plain = write(tmp_path / "c.jsonl", lines({"id": "1", "messages": turns}))
    seen: list[str] = []
    for path in (parquet, plain):
        seen += [item.text for item in read(path, render=json.dumps)[0]]
    assert json.loads(seen[0]) == json.loads(seen[1])


def test_the_text_can_be_under_another_key(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", lines({"content": "yes", "text": "no"}, {"text": "no"}))
    documents, report = read(path, records=RecordOptions(column="content"))
    assert [document.text for document in documents] == ["yes"]
    assert report.problems[0].reason == "has neither 'content' nor 'messages': name another column"


BAD_LINES = [
    (b'{"text": "cut', "not JSON"),
    (b"[", "a JSON array, expected one object per line"),
    (b'"text"', "a JSON str, expected an object"),
    (b'{"other": 1}', "has neither 'text' nor 'messages'"),
    (b'{"text": 1}', "'text' is an int"),
    (b'{"messages": {"role": "user"}}', "'messages' is a dict"),
    (b'{"messages": ["hi"]}', r"messages\[0\] is a str"),
    (b'{"messages": [{"role": "user"}]}', r"messages\[0\] has no text under 'content'"),
    (b'{"messages": [{"role": "user", "content": 1}]}', r"messages\[0\] has no text under 'content'"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "only text, not .*image_url"),
    (b'{"messages": [{"content": "hi"}]}', r"messages\[0\] has no text under 'role'"),
    (b'{"conversations": [{"from": ["a"], "value": "hi"}]}', r"conversations\[0\] has no text under 'from'"),
    (b'{"conversations": [{"from": "human"}]}', r"conversations\[0\] has no text under 'value'"),
    (b'{"text": "\xff"}', "utf-8"),
    (b'{"text": "\\ud800"}', "surrogate"),
    (b'{"a":' * 100_000, "recursion"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_bad_records_are_counted_with_their_place(tmp_path: Path, line: bytes, reason: str) -> None:
    path = write(tmp_path / "c.jsonl", lines({"text": "good"}) + line + b"\n" + lines({"text": "after"}))
    documents, report = read(path)
    assert [document.text for document in documents] == ["good", "after"]
    assert report.bad_records == 1
    assert report.problems[0].place == f"{path}:line 2"
    with pytest.raises(CorpusError, match=f":line 2: .*{reason}"):
        read(path, strict=True)


def test_json_records_are_read_or_raise(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl.gz", gzip.compress(lines({"a": 1}) + b"\n" + lines({"b": 2})))
    assert list(read_json_records(path)) == [(f"{path}:line 1", {"a": 1}), (f"{path}:line 3", {"b": 2})]
    with pytest.raises(
        CorpusError, match=r"bad\.jsonl:line 2: the file ends in the middle of a record: not JSON"
    ):
        list(read_json_records(write(tmp_path / "bad.jsonl", lines({"a": 1}) + b"{")))
    with pytest.raises(CorpusError, match=r"c\.jsonl\.gz:line 1: cannot be read from here on"):
        list(read_json_records(write(path, "plain")))
    with pytest.raises(CorpusError, match=r"a\.txt is not JSON Lines: expected \.jsonl"):
        list(read_json_records(write(tmp_path / "a.txt")))
    with pytest.raises(CorpusError, match="no such file"):
        list(read_json_records(tmp_path / "absent.jsonl"))


def cut_files() -> dict[str, tuple[bytes, str]]:
    """Return by name the content of files that end early, and the place where they do."""
    two = lines({"text": "one"}, {"text": "two"})
    return {
        "c.jsonl": (two[:-5], ":line 2: the file ends in the middle of a record: not JSON"),
        "character.jsonl": (two + b'{"text": "\xc3', ":line 3: the file ends in the middle of a record"),
        "word.jsonl": (two + b'{"text": nul', ":line 3: the file ends in the middle of a record: not JSON"),
        "c.jsonl.gz": (gzip.compress(two[:-5]), ":line 2: the file ends in the middle of a record"),
        "header.jsonl.gz": (gzip.compress(two)[:5], ":line 1: cannot be read from here on"),
        "c.txt.zst": (PACKERS[".zst"](two)[:-9], ": cannot be read from here on"),
        "empty.jsonl.gz": (b"", ":line 1: cannot be read from here on: the file is empty"),
    }


@pytest.mark.parametrize("name", cut_files())
def test_files_that_end_early_stop_the_reading_unless_that_is_allowed(tmp_path: Path, name: str) -> None:
    content, place = cut_files()[name]
    path = write(tmp_path / name, content)
    with pytest.raises(TruncatedCorpusError, match=re.escape(str(path)) + place):
        read(path)
    documents, report = read(path, allow_truncated=True)
    assert (report.bad_records, report.truncated) == (1, 1)
    assert [document.text for document in documents] == ["one", "two"][: report.documents]


@pytest.mark.parametrize(
    "end",
    [b'{"text": "whole"}', b"not JSON", b'{"other": 1}', b"  ", b'{"text": "B\xc9R"}', b'{"text": "b"}]'],
)
def test_a_last_line_without_a_line_feed_is_read(tmp_path: Path, end: bytes) -> None:
    _, report = read(write(tmp_path / "c.jsonl", lines({"text": "one"}) + end))
    assert report.truncated == 0


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table(columns), path, row_group_size=100)
    return path


def test_parquet(tmp_path: Path) -> None:
    rows = [f"row {n}" for n in range(600)]
    path = write_parquet(tmp_path / "c.parquet", {"text": [*rows, None, " "], "other": [1] * 602})
    documents, report = read(path)
    assert documents[599] == Document.plain("c.parquet#600", "row 599")
    assert (report.documents, report.bad_records, report.empty_documents) == (600, 1, 1)
    assert report.problems[0].place == f"{path}:row 601"


def test_a_bad_value_of_parquet_costs_its_row(tmp_path: Path) -> None:
    import pyarrow as pa

    # Spark and others write columns of strings that are not UTF-8.
    good, bad = [f"row {n}" for n in range(100)], b"B\xc9RUX!"
    sizes = struct.pack("<2i", 0, len(bad))
    string = pa.StringArray.from_buffers(1, pa.py_buffer(sizes), pa.py_buffer(bad))
    column = pa.concat_arrays([pa.array(good[:50]), string, pa.array(good[50:])])
    binary = [*(text.encode() for text in good[:50]), bad, *(text.encode() for text in good[50:])]
    for columns in ({"text": column}, {"text": binary, "id": [b"\xff"] + [b"\xc3\xa9"] * 100}):
        documents, report = read(path := write_parquet(tmp_path / "c.parquet", columns))
        assert [document.text for document in documents] == good
        assert (report.bad_records, report.problems[0].place) == (1, f"{path}:row 51")
    assert [document.id for document in documents[:2]] == [r"\xff", "é"]
    chats = [[{"role": b"user", "content": content}] for content in (b"hi", b"\xff")]
    documents, report = read(write_parquet(tmp_path / "m.parquet", {"messages": chats}))
    assert ([document.text for document in documents], report.bad_records) == (["user=hi"], 1)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
FOREIGN = {
    "CR alone": ("a.jsonl", THREE.replace(b"\r\n", b"").replace(b"\n", b"\r"), "lines end with CR alone"),
    "indented": ("a.json", b'{\n  "text": "a",\n  "id": 1\n}\n', "over several lines"),
    "an array": ("a.json", b'[{"text": "a"},\n{"text": "b"}]', "a JSON array"),
    "UTF-16": ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), "UTF-16"),
    "UTF-16 without a mark": ("a.jsonl", b'{"text": "a"}'.decode().encode("utf-16-le"), "UTF-16"),
    "UTF-16 as text": ("a.txt", "text".encode("utf-16"), "UTF-16"),
    "packed otherwise": ("a.jsonl.gz", bz2.compress(THREE), r"the content is no \.gz data"),
    "not Parquet": ("a.parquet", THREE, r"the content is no \.parquet data"),
    **{
        f"pointer to {name}": (name, POINTER, "a Git LFS pointer")
        for name in ("a.jsonl", "a.jsonl.zst", "a.parquet", "a.txt")
    },
}


@pytest.mark.parametrize("what", FOREIGN)
def test_files_of_another_kind_are_named_as_such(tmp_path: Path, what: str) -> None:
    name, content, reason = FOREIGN[what]
    path = write(tmp_path / name, content)
    with pytest.raises(CorpusError, match=reason) as raised:
        read(path, strict=True)
    assert "whole file" not in str(raised.value)
    documents, report = read(path, allow_truncated=True)
    assert not documents
    assert re.search(reason, report.problems[0].reason)


@pytest.mark.parametrize("packer", PACKED)
def test_bytes_behind_compressed_data_cost_no_record(tmp_path: Path, packer: str) -> None:
    for suffix, plain in ((".jsonl", THREE), (".txt", b"text")):
        path = write(tmp_path / f"a{suffix}{packer}", PACKERS[packer](plain) + bytes(700) + b"other bytes")
        documents, report = read(path)
        assert (len(documents), report.bad_records, report.truncated) == (3 if plain == THREE else 1, 1, 0)
        assert "behind the compressed data" in report.problems[0].reason


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = write(tmp_path / "notes.md", "\ufeff# Title\r\nbody\n")
    assert read(path)[0] == [Document.plain("notes.md", "# Title\r\nbody\n")]
    assert texts(write(tmp_path / "a.txt.gz", gzip.compress(b"packed"))) == ["packed"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name in ("b.py", "a/z.py", "a/b/c.rs", "a.txt", ".hidden/x.py", ".git/y.py"):
        write(root / name, name)
    for name in ("node_modules/m.js", "__pycache__/p.py", ".venv/v.py", "a/photo.png", "a/.dot.py"):
        write(root / name, name)
    write(root / "a/data.jsonl", lines({"text": "record"}))
    write(root / "a/latin.py", b"# caf\xe9\n")
    (root / "link").symlink_to(root / "a", target_is_directory=True)
    (root / "dangling.py").symlink_to(root / "nowhere.py")
    return root


def test_a_folder_is_read_in_order_without_skipped_files(tree: Path) -> None:
    documents, report = read(tree)
    assert [document.id for document in documents] == ["a.txt", "a/b/c.rs", "a/z.py", "b.py"]
    assert [problem.place for problem in report.problems] == [str(tree / "a/latin.py")]
    assert report.passed_over == {".jsonl": 1, HIDDEN: 4}


@pytest.mark.parametrize(
    ("glob", "found", "hidden"),
    [("*.jsonl", ["a.jsonl", "x/a.jsonl"], 6), ("*.py", ["__init__.py", "_private.py"], 4)],
)
def test_hidden_and_unfinished_files_are_read_if_named(
    tmp_path: Path, glob: str, found: list[str], hidden: int
) -> None:
    folder = tmp_path / "data"
    for name in ("a", "x/a", "._a", "_a", "x/_a", ".hidden/a", "_temporary/0/a", "x/_temporary/a"):
        write(folder / f"{name}.jsonl", lines({"text": name}))
    for name in ("__init__.py", "_private.py", "._b.py"):
        write(folder / name, name)
    documents, report = read(folder, glob=glob)
    assert [document.id.partition("#")[0] for document in documents] == found
    assert report.passed_over == {HIDDEN: hidden}
    for named in ("._a.jsonl", "_a.jsonl", ".hidden", "_temporary", "x/_temporary/a.jsonl"):
        assert len(texts(folder / named, glob="*.jsonl")) == 1
    for pattern, number in ((f"{folder}/**/*.jsonl", 2), (f"{folder}/.*.jsonl", 1)):
        assert len(Source(1, pattern).files(report := ReadReport())) == number
    assert report.passed_over == {}


def test_globs(tree: Path) -> None:
    assert texts(tree, glob=["*.txt", "*.rs"]) == ["a.txt", "a/b/c.rs"]
    assert texts(tree, glob=["*.jsonl", "*.txt"]) == ["a.txt", "record"]
    for glob, found in {"a/*.rs": "a/b/c.rs", "**/z.py": "a/z.py", "**/b.py": "b.py"}.items():
        assert texts(tree, glob=glob) == [found]


def test_data_files_in_folders_are_skipped_and_counted(tree: Path) -> None:
    for name in ("b.jsonl", "a/c.jsonl.gz", "a/d.parquet", "e.txt.zst", "node_modules/f.jsonl", "g.bin"):
        write(tree / name)
    _, report = read(tree)
    assert report.passed_over == {".jsonl": 2, ".jsonl.gz": 1, ".parquet": 1, ".txt.zst": 1, HIDDEN: 4}
    assert read(tree, glob="*")[1].passed_over == {".jsonl": 2, ".jsonl.gz": 1, ".parquet": 1, HIDDEN: 4}
    assert read(tree, glob="*.rs")[1].passed_over == {HIDDEN: 3}  # the user asked for less
    paths = [tree, tree / "a/data.jsonl", tree / "b.jsonl", tree / "a/d.parquet", tree / "e.txt.zst"]
    _, report = read(*paths, allow_truncated=True)
    assert report.passed_over == {".jsonl.gz": 1, HIDDEN: 4}


def test_links_lead_nowhere_out_of_their_folder(tree: Path) -> None:
    secret = write(tree.parent / "private.txt", "secret")
    (tree / "notes.txt").symlink_to(secret)
    (tree / "a" / "environment.txt").symlink_to("/proc/self/environ")
    (tree / "a" / "inside.txt").symlink_to(tree / "b.py")
    documents, report = read(tree, glob="*.txt")
    assert [document.id for document in documents] == ["a.txt", "a/inside.txt"]
    assert report.passed_over == {LINKS: 2, HIDDEN: 3}
    assert texts(tree / "notes.txt") == ["secret"]  # as named
    with pytest.raises(CorpusError, match="1 link in folders leads out of them"):
        find_files([tree], "notes*")


def test_links_to_folders_are_followed_within_their_folder_once(tmp_path: Path) -> None:
    folder, beside = tmp_path / "folder", write(tmp_path / "beside" / "out.txt", "out").parent
    for name in ("z/deep/one.txt", "z/two.txt", ".versions/v1/three.txt"):
        write(folder / name, name)
    for link, target in {
        "a": "z/deep", "current": ".versions/v1", ".versions/v1/again": "..", "other": str(beside), "z/up": "..",
    }.items():  # fmt: skip
        (folder / link).symlink_to(target, target_is_directory=True)
    documents, report = read(folder)
    assert [document.id for document in documents] == ["current/three.txt", "z/deep/one.txt", "z/two.txt"]
    assert report.passed_over == {LINKS: 1, HIDDEN: 1}


def test_many_paths_have_distinct_ids_and_are_read_once(tree: Path) -> None:
    other = write(tree.parent / "other" / "b.py", "other")
    ids = [document.id for document in read(tree / "b.py", other, tree, tree)[0]]
    assert ids[:3] == ["tree/b.py", "other/b.py", "tree/a.txt"]
    assert len(ids) == len(set(ids)) == 5


def test_ids_do_not_depend_on_where_the_corpus_lies(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read(tree)[0]
    moved = tree.rename(tree.parent / "moved")
    assert read(moved)[0] == before
    monkeypatch.chdir(moved)
    assert read(Path())[0] == before


def test_the_fingerprint_shows_changes(tree: Path) -> None:
    first = corpus_fingerprint([tree], column="text")
    assert corpus_fingerprint([tree], column="text") == first
    assert corpus_fingerprint([tree], column="body") != first
    assert corpus_fingerprint([tree], glob="*.py", column="text") != first
    old = (tree / "b.py").read_bytes()
    write(tree / "b.py", bytes(reversed(old)))
    changed = corpus_fingerprint([tree], column="text")
    assert changed != first
    write(tree / "new.py")
    assert corpus_fingerprint([tree], column="text") not in (first, changed)
    write(tree / "b.py", old)
    (tree / "new.py").unlink()
    assert corpus_fingerprint([tree], column="text") == first
