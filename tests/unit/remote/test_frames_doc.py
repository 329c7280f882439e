"""What docs/frames.md says is true: its numbers, its bytes, its client, and what a running service does."""

import ast
import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from draftstore.remote import addresses, wire
from draftstore.remote.sections import Tag
from draftstore.remote.wire import Operation, Status
from draftstore.stores.dresd.store import DresdStore
from draftstore.stores.registry import open_store
from draftstore.trees import codec, tree
from draftstore.trees.tree import DraftTree
from services.common.permissions import Grant, Permissions, hash_token
from services.lookup.frames import server
from services.lookup.limits import Limits
from services.lookup.settings import DRAFT_PORT
from tests import ROOT
from tests.fakes.lookups import Caller, Lookups, contexts_of, failure, serving
from tests.fakes.waiting import SECONDS, until
from tests.unit.trees.test_batch import batch_of
from tests.unit.trees.test_tree import ANIMALS

TEXT = (ROOT / "docs" / "frames.md").read_text(encoding="utf-8")
LINES = " ".join(TEXT.split())
"""The page without line breaks, to look sentences up in."""
CLIENT, USE = re.findall(r"^```python\n(.+?)^```", TEXT, re.MULTILINE | re.DOTALL)
DUMPS = re.findall(r"^```text\nat [^\n]*\n(.+?)^```", TEXT, re.MULTILINE | re.DOTALL)
FORMS = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i32": "i", "f32": "f"}
CHAT = np.array([[-1, -1, 15, 27], [15, 27, 4, 9]], np.int32)
TOKEN = "secret"


class Row(NamedTuple):
    """One line of a dump."""

    at: int
    data: bytes
    kind: str
    value: str
    field: str

    def packed(self) -> bytes:
        """Return the bytes that kind and value ask for."""
        if self.kind == "text":
            return str(ast.literal_eval(self.value)).encode()
        name, _, count = self.kind.rstrip("]").partition("[")
        read = float if name == "f32" else lambda text: int(text, 0)
        return struct.pack(f"<{count}{FORMS[name]}", *map(read, self.value.split()))


def rows_of(dump: str) -> list[Row]:
    found = []
    for line in dump.splitlines():
        at, data, kind, value, field = re.split(r"\s{2,}", line, maxsplit=4)
        found.append(Row(int(at), bytes.fromhex(data), kind, value, field))
    return found


REQUEST, ANSWER, FAILURE = map(rows_of, DUMPS)


def bytes_of(rows: list[Row]) -> bytes:
    return b"".join(row.data for row in rows)


def table_rows(start: str) -> Iterator[list[str]]:
    """Yield the rows of the page's tables whose first cell is a number, behind a heading."""
    for line in TEXT[TEXT.index(start) :].splitlines()[1:]:
        if line.startswith("#"):
            return
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0].isdigit():
            yield cells


# -- the numbers -----------------------------------------------------------------------------------------------


def test_the_header() -> None:
    at = 0
    rows = list(table_rows("## Transport"))[: len(wire.Header._fields)]
    for name, cells in zip(wire.Header._fields, rows, strict=True):
        assert cells[:3] == [str(at), cells[1], f"`{name}`"]
        at += struct.calcsize("<" + FORMS[cells[1]])
    assert at == wire.HEADER.size
    assert f"at most 2^{wire.MAX_PAYLOAD.bit_length() - 1}" in rows[0][3]
    assert rows[1][3] == str(wire.VERSION)
    assert "<" + "".join(FORMS[cells[1]] for cells in rows) == wire.HEADER.format


@pytest.mark.parametrize(
    ("section", "numbers"), [("## Transport", Operation), ("## Statuses", Status), ("### DRAFT", Tag)]
)
def test_every_operation_status_and_tag_has_its_number(section: str, numbers: Any) -> None:
    found = {cells[1]: int(cells[0]) for cells in table_rows(section)}
    for member in numbers:
        assert found[f"`{member.name}`"] == member
    if numbers is Status:
        assert len(found) == len(Status)


def test_flags() -> None:
    assert {cells[1]: int(cells[0]) for cells in table_rows("## Flags")} == {"`CLOSING`": wire.CLOSING}
    assert f"{wire.ANSWER:#x} added" in TEXT


def test_limits_and_times() -> None:
    limits = Limits()
    example = re.findall(r"^```json\n(.+?)^```", TEXT, re.MULTILINE | re.DOTALL)[0]
    assert json.loads(example) == {"version": wire.VERSION, "limits": limits.public(limits.budget)}
    assert f"`budget` is {limits.shared_budget} over TCP" in LINES
    assert f"`HELLO` within {limits.hello_seconds:g} s" in LINES
    assert f"than {limits.greeting:,} bytes where tokens" in LINES
    assert f"cut off after {limits.stall_seconds:g} s" in LINES
    assert f"for some seconds ({limits.drain_seconds:g} unless told otherwise)" in LINES
    assert f"`n` at most {codec.MAX_NODES:,}" in LINES


def test_places(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"port {addresses.DEFAULT_PORT}" in LINES
    assert addresses.DEFAULT_PORT == DRAFT_PORT
    monkeypatch.setenv("DRAFTSTORE_SOCKET", "/a/socket")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert str(addresses.default_socket()) == "/a/socket"
    monkeypatch.delenv("DRAFTSTORE_SOCKET")
    assert str(addresses.default_socket()) == "/run/user/7/draftstore.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert addresses.default_socket().name == "lookup.sock"
    assert addresses.default_socket().parent.name.startswith("draftstore-")
    assert "`$XDG_RUNTIME_DIR/draftstore.sock`, else `draftstore-UID/lookup.sock`" in LINES


def test_the_grid() -> None:
    assert "level `q` stands for 2^(-q/16), rounded to f32" in LINES
    assert [np.float32(2 ** (-q / 16)) for q in range(256)] == tree.LEVEL_PROBS.tolist()
    assert f"255 is {tree.LEVEL_PROBS[255]:.6f}" in LINES
    for level, prob in enumerate(tree.LEVEL_PROBS.tolist()):
        assert tree.highest_level(struct.unpack("<f", struct.pack("<f", prob))[0]) == level


# -- the bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [REQUEST, ANSWER, FAILURE])
def test_every_line_of_a_dump_is_its_type_and_value(rows: list[Row]) -> None:
    at = 0
    for row in rows:
        assert row.at == at
        assert row.data == row.packed(), row
        at += len(row.data)
    assert rows[0].packed() == struct.pack("<I", at - wire.HEADER.size)


def test_the_request() -> None:
    sections = {
        int(Tag.HIDDEN): np.array([[1.5, -0.25], [np.nan, np.nan]], "<f4").tobytes(),
        int(Tag.PROJECTION): struct.pack("<Q", 0x7C11D0D5F24A3B96),
    }
    assert bytes_of(REQUEST) == wire.encode_request(1, "chat", CHAT, 8, 1 / 32, "wide", sections)
    assert "these 40 bytes are left out" in LINES
    assert (
        sum(
            len(row.data)
            for row in REQUEST
            if row.field.startswith(("section", "first query", "second query"))
        )
        == 40
    )
    assert tree.level_of(1 / 32) == 80
    found = wire.decode_request(bytes_of(REQUEST)[16:])
    assert np.array_equal(found.contexts, CHAT)
    assert found.sections == sections


def test_the_answer() -> None:
    batch = batch_of([ANIMALS.prefix(3), DraftTree.empty()], 3)._replace(
        match_lengths=np.array([2, 0], np.int32), match_counts=np.array([31, 0], np.int64)
    )
    data = bytes_of(ANSWER)
    assert data == wire.encode_answer(1, 0x9D3C5A1B7E2F4860, 0x35963F0B5926E1EB, 57, batch)
    probs = wire.decode_answer(data[16:]).drafts[0].tree.probs
    assert "`300` with {:.2f}, followed by `7` with {:.2f} or `9` with {:.2f},".format(*probs) in LINES
    header = wire.HEADER.unpack_from(data)
    assert header[2:] == (Operation.DRAFT | wire.ANSWER, Status.OK, 0, 1)


def test_the_longest_answer() -> None:
    limits = Limits()
    assert "24 + `batch` x (16 + 7 x `budget`)" in TEXT
    assert limits.longest_answer == 24 + limits.batch * (16 + 7 * limits.budget)


# -- a running service -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stores(small_store: Path, small_crest: Path, wide_store: Path, small_dense: Path) -> dict[str, Path]:
    return {"rest": small_store, "crest": small_crest, "wide": wide_store, "dense": small_dense}


@pytest.fixture(scope="module")
def lookups(stores: dict[str, Path]) -> Iterator[Lookups]:
    with serving(stores, limits=Limits(shared_budget=600)) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(stores: dict[str, Path]) -> Iterator[Lookups]:
    """Run a service that asks for tokens."""
    grants = [
        Grant("all", frozenset(["*"]), hash_token(TOKEN)),
        Grant("one", frozenset(["rest"]), hash_token("other")),
    ]
    with serving(stores, permissions=Permissions(grants)) as running:
        yield running


@pytest.fixture
def caller(lookups: Lookups) -> Iterator[Caller]:
    with lookups.caller() as caller:
        yield caller


@pytest.fixture(scope="module")
def client() -> dict[str, Any]:
    """Return the names that the client of the page defines."""
    names: dict[str, Any] = {}
    exec(compile(CLIENT, "docs/frames.md", "exec"), names)
    return names


def open_dense(path: Path) -> "closing[DresdStore]":
    return closing(DresdStore.open(path))


def as_lists(contexts: NDArray[np.int32]) -> list[list[int]]:
    return [[token for token in row if token >= 0] for row in contexts.tolist()]


def nodes_of(draft: DraftTree) -> list[tuple[int, int, float]]:
    return list(zip(draft.tokens.tolist(), draft.parents.tolist(), draft.probs.tolist(), strict=True))


@pytest.mark.parametrize("name", ["rest", "crest", "wide"])
@pytest.mark.parametrize("tcp", [False, True])
def test_the_client_of_the_page_gets_the_trees_of_the_local_store(
    client: dict[str, Any], lookups: Lookups, stores: dict[str, Path], name: str, tcp: bool
) -> None:
    store = open_store(stores[name])
    nodes = 0
    with lookups.caller(tcp=tcp) as caller:
        for number, (batch, budget, least) in enumerate([(1, 8, 0.0), (40, 64, 0.01), (3, 600, 0.0)], 1):
            contexts = contexts_of(stores[name], batch, seed=number)
            found = client["draft"](caller.socket, number, name, as_lists(contexts), budget, least)
            expected = store.drafter().draft(contexts, budget, least)
            assert [[node[:2] for node in draft] for draft in found] == [
                [node[:2] for node in nodes_of(draft.tree)] for draft in expected
            ]
            for one, other in zip(found, expected, strict=True):
                assert np.array_equal(np.array([node[2] for node in one], np.float32), other.tree.probs)
            nodes += sum(map(len, found))
    store.close()
    assert nodes > 100


@pytest.mark.parametrize("parents", [256, 257, 600])
def test_the_client_of_the_page_reads_both_widths(client: dict[str, Any], parents: int) -> None:
    n = parents
    for first in (0, 65_535 - n, 70_000):
        wanted = DraftTree(
            np.arange(first, first + n, dtype=np.int32),
            np.arange(-1, n - 1).astype(np.int16),
            np.zeros(n, np.uint8),
        )
        assert client["read_tree"](wanted.to_bytes()) == nodes_of(wanted)
    assert client["read_tree"](b"\1\0\0\0") == []
    with pytest.raises(ValueError, match="later version"):
        client["read_tree"](b"\2\0\0\0")


def test_the_client_of_the_page_tells_failures(client: dict[str, Any], caller: Caller) -> None:
    with pytest.raises(RuntimeError, match="status 4: nothing is served under the name 'chat'") as raised:
        client["draft"](caller.socket, 1, "chat", [[1]])
    assert raised.value.args[1] == 0
    assert client["draft"](caller.socket, 2, "rest", [[1]])
    caller.send(b"x" * 16)
    with pytest.raises(RuntimeError, match="status 1"):
        client["ask"](caller.socket, 3, 3, b"")
    with pytest.raises(OSError, match=r"closed|reset|Broken pipe"):
        client["ask"](caller.socket, 3, 4, b"")


def test_the_client_is_used_as_the_page_shows(
    client: dict[str, Any], guarded: Lookups, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(CLIENT.splitlines()) < 60
    names = {**client, "PATH": str(guarded.socket), "TOKEN": TOKEN, "NAME": "rest"}
    exec(compile(USE, "docs/frames.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(client_draft(client, guarded, [[15, 27, 4], [9]])[0])


def client_draft(client: dict[str, Any], running: Lookups, contexts: list[list[int]]) -> Any:
    with running.caller() as caller:
        client["ask"](caller.socket, 1, 0, TOKEN.encode())
        return client["draft"](caller.socket, 1, "rest", contexts, budget=8)


def test_the_failure_of_the_page_is_that_of_the_service(caller: Caller) -> None:
    caller.send(bytes_of(REQUEST))
    frame = caller.receive()
    assert frame
    assert wire.HEADER.pack(*frame.header) + frame.payload == bytes_of(FAILURE)


def test_releases_have_the_keys_of_the_page(caller: Caller, stores: dict[str, Path]) -> None:
    releases = json.loads(caller.ask(wire.frame(Operation.RELEASES, 5)).payload)["releases"]
    section = TEXT[TEXT.index("### RELEASES") : TEXT.index("### PROJECTION")]
    inner = {"fingerprint", "digest", "dims", "hidden_size"}
    named = set(re.findall(r"`([a-z_]+)`", section)) - {"rest", "crest", "dresd"}
    for release in releases:
        assert release.keys() == named - inner
        assert release["tokenizer"].keys() == {"name", "fingerprint"}
        assert (
            (release["projection"] is None)
            == (release["kind"] != "dresd")
            == (release["target_model"] is None)
        )
        assert f"`{release['kind']}`" in section
        answer = caller.draft(release["name"], np.zeros((1, 4), np.int32))
        assert f"{answer.build:016x}" == release["build"]
        assert f"{answer.tokenizer:016x}" == release["tokenizer"]["fingerprint"][:16]
        assert release["context_size"] <= 16
    assert len(releases) == len(stores)


def test_the_projection(caller: Caller, stores: dict[str, Path]) -> None:
    told = {
        entry["name"]: entry
        for entry in json.loads(caller.ask(wire.frame(Operation.RELEASES, 5)).payload)["releases"]
    }
    payload = caller.ask(wire.frame(Operation.PROJECTION, 5, b"dense")).payload
    dims, size = struct.unpack_from("<II", payload)
    assert told["dense"]["projection"] == {
        "digest": hashlib.sha256(struct.pack("<qq", dims, size) + payload[8:]).hexdigest(),
        "dims": dims,
        "hidden_size": size,
    }
    weights = np.frombuffer(payload, "<f4", dims * size, 8).reshape(dims, size)
    bias = np.frombuffer(payload, "<f4", dims, 8 + weights.nbytes)
    assert len(payload) == 8 + weights.nbytes + bias.nbytes
    state = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    with open_dense(stores["dense"]) as store:
        assert np.allclose(weights @ state + bias, store.projection.apply(state), atol=1e-5)
    for name in (b"rest", b"none"):
        assert failure(caller.ask(wire.frame(Operation.PROJECTION, 5, name))).status == Status.NOT_FOUND


def test_queries(caller: Caller, stores: dict[str, Path]) -> None:
    with open_dense(stores["dense"]) as store:
        contexts, queries = store.samples(20)
        assert queries is not None
        expected = store.drafter().draft(contexts, queries=queries)
    digest = store.projection.digest
    head = {int(Tag.PROJECTION): struct.pack("<Q", int(digest[:16], 16))}

    def ask(sections: dict[int, bytes]) -> wire.Frame:
        return caller.ask(wire.encode_request(3, "dense", contexts, 64, sections=sections))

    def trees(rows: NDArray[np.float32]) -> list[DraftTree]:
        answer = wire.decode_answer(ask({**head, int(Tag.HIDDEN): rows.astype("<f4").tobytes()}).payload)
        return [draft.tree for draft in answer.drafts]

    assert trees(queries) == trees(queries * 1000) == [draft.tree for draft in expected]
    assert sum(map(len, trees(queries))) > 100
    some = queries.copy()
    some[::2, 1] = np.nan
    assert trees(some)[1::2] == trees(queries)[1::2]
    assert not sum(map(len, trees(some)[::2]))
    for sections in ({}, head):
        drafts = wire.decode_answer(ask(sections).payload).drafts
        assert [len(draft.tree) for draft in drafts] == [0] * 20
    hidden = {int(Tag.HIDDEN): queries.astype("<f4").tobytes()}
    assert failure(ask(hidden)).status == Status.BAD_REQUEST
    assert failure(ask({**head, int(Tag.HIDDEN): bytes(8)})).status == Status.BAD_REQUEST
    other = failure(ask({**hidden, int(Tag.PROJECTION): bytes(8)}))
    assert other.status == Status.OTHER_PROJECTION
    assert digest[:16] in other.message
    assert "0" * 16 in other.message


def test_what_gives_empty_drafts(caller: Caller) -> None:
    for name in ("rest", "crest"):
        for contexts, budget in (
            (np.full((2, 16), -1, np.int32), 8),
            (np.zeros((2, 0), np.int32), 8),
            (np.zeros((2, 16), np.int32), 0),
            (np.full((2, 16), 2**31 - 1, np.int32), 8),
        ):
            drafts = caller.draft(name, contexts, budget).drafts
            assert [len(draft.tree) for draft in drafts] == [0, 0]
        assert caller.draft(name, np.zeros((0, 16), np.int32)).drafts == []


def test_tokens_before_the_context_size_are_ignored(caller: Caller, stores: dict[str, Path]) -> None:
    contexts = contexts_of(stores["rest"], 40, width=40)[:, 24:]
    contexts = contexts[contexts[:, 0] >= 0]
    longer = np.hstack([np.full((len(contexts), 9), 7, np.int32), contexts])
    for name in ("rest", "crest"):
        assert caller.draft(name, contexts).drafts == caller.draft(name, longer).drafts
    assert len(contexts) > 10


def test_sections(caller: Caller) -> None:
    def ask(*sections: tuple[int, int, bytes]) -> wire.Frame:
        data = b"".join(struct.pack("<HHI", tag, zero, len(data)) + data + bytes(-len(data) % 4)
                        for tag, zero, data in sections)  # fmt: skip
        head = struct.pack("<HHfBBHI", 1, 8, 0.0, 4, 0, 1, len(data))
        return caller.ask(wire.frame(Operation.DRAFT, 3, head + struct.pack("<i", 5) + data + b"rest"))

    plain = ask().payload[24:]
    unused = ((900, 0, b"abc"), (2, 0, b"not four bytes"), (1, 0, b""), (3, 0, b"no hash"))
    assert ask(*unused).payload[24:] == plain
    assert failure(ask((900, 1, b""))).status == Status.BAD_REQUEST
    assert failure(ask((900, 0, b""), (900, 0, b""))).status == Status.BAD_REQUEST


def test_hello_goes_in_the_same_send_and_may_come_again(guarded: Lookups) -> None:
    request = wire.encode_request(1, "crest", np.zeros((200, 16), np.int32), 8)
    assert len(request) > Limits().greeting
    with guarded.caller() as caller:
        caller.send(wire.frame(Operation.HELLO, 0, TOKEN.encode()) + request)
        frames = [caller.receive(), caller.receive()]
        assert [frame and (frame.header.request_id, frame.header.status) for frame in frames] == [
            (0, 0),
            (1, 0),
        ]
        caller.send(wire.frame(Operation.HELLO, 0, b"other") + request)
        frames = [caller.receive(), caller.receive()]
        assert [frame and frame.header.status for frame in frames] == [Status.OK, Status.FORBIDDEN]


def test_what_ends_a_connection(guarded: Lookups) -> None:
    hello = wire.frame(Operation.HELLO, 0, TOKEN.encode())
    ends = [
        (wire.HEADER.pack(0, 2, 2, 0, 0, 7), Status.BAD_REQUEST, 0, 0x80),
        (wire.HEADER.pack(4097, 1, 3, 0, 0, 7), Status.TOO_LARGE, 7, 0x83),
        (hello + wire.HEADER.pack((1 << 20) + 1, 1, 2, 0, 0, 7), Status.TOO_LARGE, 7, 0x82),
        (wire.frame(Operation.HELLO, 7, b"wrong"), Status.UNAUTHORIZED, 7, 0x81),
    ]
    for data, status, number, operation in ends:
        with guarded.caller() as caller:
            caller.send(data)
            if data.startswith(hello):
                caller.receive()
            frame = caller.receive()
            assert failure(frame).status == status
            assert frame
            assert (frame.header.request_id, frame.header.operation) == (number, operation)
            assert caller.ended()


@pytest.mark.parametrize(
    ("limits", "status"),
    [(Limits(hello_seconds=0.1), Status.UNAUTHORIZED), (Limits(connections=1), Status.BUSY)],
)
def test_failures_of_the_whole_connection_have_the_id_0(
    stores: dict[str, Path], limits: Limits, status: Status
) -> None:
    permissions = Permissions([]) if status == Status.UNAUTHORIZED else None
    with (
        serving({"rest": stores["rest"]}, permissions=permissions, limits=limits) as running,
        running.caller() as first,
        running.caller() as second,
    ):
        if status == Status.BUSY:
            assert first.hello().header.status == Status.OK
        frame = second.receive()
        assert failure(frame).status == status
        assert frame
        assert (frame.header.request_id, frame.header.operation) == (0, 0x80)
        assert second.ended()


def test_other_failures_leave_the_connection_and_keep_the_id(guarded: Lookups) -> None:
    draft = wire.encode_request(7, "rest", np.zeros((1, 4), np.int32), 8)
    with guarded.caller() as caller:
        for data, status in (
            (draft, Status.UNAUTHORIZED),
            (wire.frame(Operation.RELEASES, 7), Status.UNAUTHORIZED),
            (wire.frame(100, 7), Status.BAD_REQUEST),
        ):
            frame = caller.ask(data)
            assert failure(frame).status == status
            assert (frame.header.request_id, frame.header.operation) == (7, data[5] | 0x80)
        caller.hello(TOKEN)
        assert caller.ask(draft).header.status == Status.OK


def test_ids_are_not_minded(caller: Caller) -> None:
    data = [wire.encode_request(number, "rest", CHAT, 8) for number in (2**64 - 1, 5, 5)]
    caller.send(b"".join(data))
    frames = [caller.receive() for _ in data]
    assert sorted(frame.header.request_id for frame in frames if frame) == [5, 5, 2**64 - 1]


def test_shutting_down_the_sending_side_counts_as_leaving(lookups: Lookups, stores: dict[str, Path]) -> None:
    contexts = np.repeat(contexts_of(stores["rest"], 64), 8, axis=0)
    gate = threading.Event()
    with lookups.caller() as caller:
        assert caller.draft("rest", CHAT)
        lookups.loop.call_soon_threadsafe(gate.wait)  # the service finds request and end at the same time
        caller.send(b"".join(wire.encode_request(number, "rest", contexts, 600) for number in (1, 2)))
        caller.socket.shutdown(socket.SHUT_WR)
        gate.set()
        answers = 0
        while caller.receive() is not None:
            answers += 1
        assert answers < 2
    until(lambda: lookups.server.waiting == 0)


def test_closing(stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_QUIET_LOOKS", 10**9)  # this thread may be held up before its next request
    with serving({"rest": stores["rest"]}) as running, running.caller() as caller:
        assert caller.draft_frame("rest", CHAT).header.flags == 0
        done = running.start_drain(SECONDS)
        until(lambda: running.server.flags)
        assert caller.draft_frame("rest", CHAT).header.flags == wire.CLOSING  # still answered
        with pytest.raises(OSError, match="refused"):
            running.caller()
        monkeypatch.undo()
        assert caller.ended()  # once it is quiet
        done.result(SECONDS)  # type: ignore[call-arg]
