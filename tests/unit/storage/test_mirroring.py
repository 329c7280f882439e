"""Mirrors of objects: in memory, and on a real S3 server if its package is installed."""

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from draftstore.errors import CorpusError
from draftstore.storage import mirroring
from draftstore.storage.mirroring import OBJECTS, STATE, is_url, mirror

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def put(system: Any, name: str, content: str) -> None:
    system.pipe_file(name, content.encode())


def names(folder: Path) -> dict[str, str]:
    objects = folder / OBJECTS
    return {
        path.relative_to(objects).as_posix(): path.read_text()
        for path in objects.rglob("*")
        if path.is_file()
    }


def test_urls_are_recognized() -> None:
    assert is_url("s3://bucket/prefix")
    assert not any(map(is_url, ["/data/a.jsonl", "data/s3:/x", "a b://c", "://x"]))


def test_only_changes_are_fetched(memory: Any, tmp_path: Path) -> None:
    put(memory, "/b/p/a.txt", "one")
    put(memory, "/b/p/deep/c.txt", "three")
    put(memory, "/b/other.txt", "not below")
    first = mirror("memory://b/p", tmp_path / "m")
    assert first == (tmp_path / "m" / OBJECTS, 2, 0, 2)
    assert names(tmp_path / "m") == {"a.txt": "one", "deep/c.txt": "three"}
    assert (tmp_path / "m" / OBJECTS / "a.txt").stat().st_mode & 0o777 == 0o600
    assert mirror("memory://b/p", tmp_path / "m")[1:] == (0, 0, 2)
    put(memory, "/b/p/a.txt", "another")
    memory.rm_file("/b/p/deep/c.txt")
    put(memory, "/b/p/d.txt", "four")
    assert mirror("memory://b/p", tmp_path / "m")[1:] == (2, 1, 2)
    assert names(tmp_path / "m") == {"a.txt": "another", "d.txt": "four"}
    memory.rm_file("/b/p/d.txt")
    assert [mirror("memory://b/p", tmp_path / "m")[1:] for _ in range(2)] == [(0, 1, 1), (0, 0, 1)]
    assert mirror("memory://b/other.txt", tmp_path / "one").path.read_text() == "not below"


def test_lost_files_are_fetched_again(memory: Any, tmp_path: Path) -> None:
    put(memory, "/b/a.txt", "one")
    mirror("memory://b", tmp_path)
    (tmp_path / OBJECTS / "a.txt").unlink()
    assert mirror("memory://b", tmp_path).fetched == 1
    (tmp_path / STATE).write_text("[")
    assert mirror("memory://b", tmp_path).fetched == 1


def test_an_interrupted_mirror_resumes(memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        put(memory, f"/b/{name}.txt", name)
    real = type(memory).get_file

    def failing(self: Any, name: str, target: str, **how: Any) -> None:
        if name.endswith("b.txt"):
            raise OSError("cut off")
        real(self, name, target, **how)

    monkeypatch.setattr(mirroring, "BATCH", 1)
    monkeypatch.setattr(type(memory), "get_file", failing)
    with pytest.raises(CorpusError, match=r"b\.txt cannot be fetched: cut off"):
        mirror("memory://b", tmp_path)
    assert list(json.loads((tmp_path / STATE).read_text())) == ["a.txt"]
    monkeypatch.undo()
    assert mirror("memory://b", tmp_path).fetched == 2
    assert not list((tmp_path / OBJECTS).glob(".*"))


def test_an_object_that_vanishes_meanwhile_is_gone_here(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        put(memory, f"/b/{name}.txt", name)
    mirror("memory://b", tmp_path)
    put(memory, "/b/a.txt", "another")
    put(memory, "/b/b.txt", "another")
    listed = memory.find("/b", detail=True)
    memory.rm_file("/b/b.txt")
    monkeypatch.setattr(type(memory), "find", lambda *_, **__: listed)
    assert mirror("memory://b", tmp_path)[1:3] == (1, 1)
    assert names(tmp_path) == {"a.txt": "another"}


def test_a_failed_mirror_changes_nothing(memory: Any, tmp_path: Path) -> None:
    put(memory, "/b/a.txt", "one")
    mirror("memory://b", tmp_path)
    memory.rm_file("/b/a.txt")
    with pytest.raises(CorpusError, match="holds no objects"):
        mirror("memory://b", tmp_path)
    with pytest.raises(CorpusError, match="cannot be listed"):
        mirror("nothing-like-it://b", tmp_path)
    assert names(tmp_path) == {"a.txt": "one"}


KEYS = (
    *("a.jsonl", "/a.jsonl", "//a.jsonl", "x/a.jsonl", "x/./a.jsonl", "x//a.jsonl", "x/../a.jsonl"),
    *("../../a.jsonl", "x", "x/a.jsonl/b.jsonl", ".", "./a.jsonl", "nul\0", "nul", "caf\udce9.jsonl"),
    *(f"{'l' * 300}.jsonl", f"{'l' * 301}.jsonl", f"{'d' * 300}/a.jsonl", "/" * 900 + "a.jsonl"),
    *("~e3b0c44298fc1c149afbf4c8996fb924~/a.jsonl", "long/" * 300 + "a.jsonl"),
)


def test_every_object_has_a_file_of_its_own(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_file(_: Any, name: str, target: str, **_how: Any) -> None:
        Path(target).write_bytes(name.encode(errors="surrogateescape"))

    found = {f"/b/{key}": {"type": "file", "size": 1} for key in KEYS}
    monkeypatch.setattr(type(memory), "find", lambda *_, **__: found)
    monkeypatch.setattr(type(memory), "get_file", get_file)
    assert mirror("memory://b", tmp_path / "m")[1:] == (len(KEYS), 0, len(KEYS))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]
    objects = tmp_path / "m" / OBJECTS
    files = {
        path.read_bytes().decode(errors="surrogateescape"): path
        for path in objects.rglob("*")
        if path.is_file()
    }
    assert files.keys() == found.keys()
    assert all(files[name].suffix == ".jsonl" for name in found if name.endswith(".jsonl"))
    assert files["/b/x/a.jsonl/b.jsonl"].relative_to(objects).as_posix() == "x/a.jsonl/b.jsonl"
    assert not list(objects.rglob(".*"))  # none of them is hidden
    assert mirror("memory://b", tmp_path / "m").fetched == 0


def test_an_object_may_take_the_name_of_a_folder(memory: Any, tmp_path: Path) -> None:
    put(memory, "/b/a/deep/x.txt", "one")
    mirror("memory://b", tmp_path)
    memory.rm("/b/a", recursive=True)
    put(memory, "/b/a", "two")
    assert mirror("memory://b", tmp_path)[1:] == (1, 1, 1)
    assert names(tmp_path) == {"a": "two"}


def test_two_at_once_do_not_write_into_each_others_files(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(memory, "/b/a.txt", "one")
    real, beside = type(memory).get_file, list[Any]()

    def slow(self: Any, name: str, target: str, **how: Any) -> None:
        real(self, name, target, **how)
        if not beside:
            beside.append(Thread(target=mirror, args=("memory://b", tmp_path)))
            beside[0].start()
            beside[0].join(0.1)

    monkeypatch.setattr(type(memory), "get_file", slow)
    assert mirror("memory://b", tmp_path).fetched == 1
    beside[0].join()
    assert names(tmp_path) == {"a.txt": "one"}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start an S3 server on this machine, and yield a client of it."""
    server = pytest.importorskip("moto.server", reason="moto and its server are not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    import boto3

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    running = server.ThreadedMotoServer(port=0, verbose=False)
    running.start()
    try:
        host, port = running.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        yield client
    finally:
        running.stop()


@pytest.mark.filterwarnings("default")
def test_a_real_s3_server(s3: Any, tmp_path: Path) -> None:
    def upload(key: str, content: bytes) -> None:
        s3.put_object(Bucket="bucket", Key=key, Body=content)

    upload("texts/a.txt", b"one")
    upload("texts//b.txt", b"two")
    upload("texts/b.txt", b"three")
    upload("else.txt", b"no")
    assert mirror("s3://bucket/texts", tmp_path / "m").fetched == 3
    assert sorted(names(tmp_path / "m").values()) == ["one", "three", "two"]
    assert mirror("s3://bucket/texts", tmp_path / "m").fetched == 0
    upload("texts/a.txt", b"new")  # of the same size: only the ETag tells
    s3.delete_object(Bucket="bucket", Key="texts//b.txt")
    assert mirror("s3://bucket/texts", tmp_path / "m")[1:] == (1, 1, 2)
    assert names(tmp_path / "m") == {"a.txt": "new", "b.txt": "three"}
    assert mirror("s3://bucket/texts/a.txt", tmp_path / "one").path.read_text() == "new"
