"""Plain or compressed files of any size and with any damage."""

import bz2
import gzip
import lzma
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from draftstore.storage import streams
from draftstore.storage.streams import STREAM_ERRORS, read_lines, read_whole, split_lines, write_lines

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda plain: zstandard.ZstdCompressor().compress(plain),
}


PACKED = [suffix for suffix in PACKERS if suffix]
DAMAGES = ("cut", "end", "plain", "empty")


@example(parts=[b"aaaaa", b"\n"])
@given(parts=st.lists(st.text("ab\n", max_size=12).map(str.encode), max_size=6))
def test_lines_do_not_depend_on_chunks(parts: list[bytes]) -> None:
    *ended, rest = b"".join(parts).split(b"\n")
    lines = [*(line + b"\n" for line in ended), *([rest] if rest else [])]
    assert list(split_lines(parts)) == lines
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "MAX_RECORD_BYTES", 5)
        bounded = [line if len(line.rstrip(b"\n")) <= 5 else None for line in lines]
        assert list(split_lines(parts)) == bounded


@pytest.mark.parametrize("suffix", [*PACKERS, ".GZ"])
def test_written_files_are_read(tmp_path: Path, suffix: str) -> None:
    path, lines = tmp_path / f"a{suffix}", [b"one", b"", b"two\r", os.urandom(3_000).replace(b"\n", b"")]
    write_lines(path, lines, suffix)
    assert list(read_lines(path, [])) == [line + b"\n" for line in lines]
    assert read_whole(path, []) == b"".join(line + b"\n" for line in lines)
    first = path.read_bytes()
    write_lines(path, lines, suffix)
    assert path.read_bytes() == first
    path.write_bytes(PACKERS[suffix.lower()](b"last"))
    assert list(read_lines(path, [])) == [b"last"]


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [(".gz", "changed"), *((suffix, damage) for suffix in PACKED for damage in DAMAGES)],
)
def test_damaged_files_are_read_up_to_the_damage(tmp_path: Path, suffix: str, damage: str) -> None:
    many = b"".join(b"%d %s\n" % (number, os.urandom(40).hex().encode()) for number in range(5_000))
    data = PACKERS[suffix](many)
    middle = len(data) // 2
    changed = data[:middle] + bytes(64) + data[middle + 64 :]
    damaged = {"cut": data[:middle], "end": data[:-1], "changed": changed, "plain": many, "empty": b""}
    path = tmp_path / f"a{suffix}"
    path.write_bytes(damaged[damage])
    found: list[bytes | None] = []
    with pytest.raises(STREAM_ERRORS):
        found.extend(read_lines(path, []))
    if damage in ("cut", "end"):
        assert len(found) > 1_000 or (suffix, damage) == (".bz2", "cut")  # of one block
        assert found == many.splitlines(keepends=True)[: len(found)]
    with pytest.raises(STREAM_ERRORS):
        read_whole(path, [])


@pytest.mark.parametrize("suffix", PACKED)
def test_members_follow_each_other(tmp_path: Path, suffix: str) -> None:
    path, pack, notes = tmp_path / f"a{suffix}", PACKERS[suffix], list[str]()
    one, two = pack(b"one\n"), pack(b"two\n")
    for padding in (0, 4, 40_000):
        path.write_bytes(one + bytes(padding) + two + bytes(padding))
        assert list(read_lines(path, notes)) == [b"one\n", b"two\n"]
        assert not notes
        for size in (1, 5, len(two) - 1):
            path.write_bytes(one + bytes(padding) + two[:size])
            with pytest.raises(EOFError, match="truncated"):
                read_whole(path, notes)
        path.write_bytes(one + two + bytes(padding) + b"x")
        assert read_whole(path, notes) == b"one\ntwo\n"
        assert notes.pop() == "other bytes behind the compressed data were ignored"
    path.write_bytes(pack(bytes(3 << 20)) + two)  # a member of several full chunks
    assert read_whole(path, notes) == bytes(3 << 20) + b"two\n"


def test_zstandard_frames_and_windows(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, compression_level=1)
    wide = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    skipped = b"\x5e\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"any"
    frames = skipped, wide.compress(b"one\n") + wide.flush(), PACKERS[".zst"](b"two\n"), skipped
    (tmp_path / "a.zst").write_bytes(b"".join(frames))
    assert list(read_lines(tmp_path / "a.zst", [])) == [b"one\n", b"two\n"]


def test_a_line_that_is_too_long_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_RECORD_BYTES", 100)
    path = tmp_path / "a"
    path.write_bytes(b"a\n" + b"x" * 100 + b"\n" + b"x" * 101 + b"\nb\n" + b"x" * 3_000_000)
    assert list(read_lines(path, [])) == [b"a\n", b"x" * 100 + b"\n", None, b"b\n", None]
    for size, expected in ((100, b"x" * 100), (101, None)):
        path.write_bytes(b"x" * size)
        assert read_whole(path, []) == expected
    assert list(split_lines([b"x" * 60, b"x" * 60, b"x\nb"])) == [None, b"b"]


@pytest.mark.parametrize("suffix", PACKED)
def test_a_bomb_takes_constant_memory(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_RECORD_BYTES", 16 << 20)
    path = tmp_path / f"bomb{suffix}"
    with path.open("wb") as file:
        for piece in (b"one\n", *[b"a" * (100 << 20)] * 2, b"\ntwo\n"):
            file.write(PACKERS[suffix](piece))
    tracemalloc.start()
    try:
        assert list(read_lines(path, [])) == [b"one\n", None, b"two\n"]
        assert read_whole(path, []) is None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * streams.MAX_RECORD_BYTES
