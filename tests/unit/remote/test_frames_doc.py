"""What docs/frames.md promises is true: its numbers, its bytes, its client, and the rules of a connection."""

import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftstore.remote import wire
from draftstore.remote.sections import Tag
from draftstore.remote.wire import Operation, Status
from draftstore.stores.dresd.store import DresdStore
from draftstore.stores.registry import open_store
from draftstore.trees.tree import DraftTree
from services.common.permissions import Grant, Permissions, hash_token
from services.lookup.limits import Limits
from tests import ROOT
from tests.fakes.lookups import Caller, Lookups, contexts_of, failure, serving
from tests.fakes.waiting import until
from tests.unit.trees.test_batch import batch_of
from tests.unit.trees.test_tree import ANIMALS

TEXT = (ROOT / "docs" / "frames.md").read_text(encoding="utf-8")
CLIENT, USE = re.findall(r"^```python\n(.+?)^```", TEXT, re.MULTILINE | re.DOTALL)
REQUEST, ANSWER = map(bytes.fromhex, re.findall(r"^```hex\n(.+?)^```", TEXT, re.MULTILINE | re.DOTALL))
CHAT = np.array([[-1, -1, 15, 27], [15, 27, 4, 9]], np.int32)
TOKEN = "secret"


@pytest.fixture(scope="module")
def stores(small_store: Path, small_crest: Path, wide_store: Path, small_dense: Path) -> dict[str, Path]:
    return {"rest": small_store, "crest": small_crest, "wide": wide_store, "dense": small_dense}


@pytest.fixture(scope="module")
def lookups(stores: dict[str, Path]) -> Iterator[Lookups]:
    with serving(stores, limits=Limits(shared_budget=600)) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(stores: dict[str, Path]) -> Iterator[Lookups]:
    """Run a service that requires tokens."""
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


def nodes_of(tree: DraftTree) -> list[tuple[int, int, float]]:
    return list(zip(tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist(), strict=True))


@pytest.mark.parametrize(
    ("heading", "numbers"),
    [("## Transport", Operation), ("## Statuses", Status), ("## Operations", Tag)],
)
def test_operations_statuses_and_tags_have_their_numbers(heading: str, numbers: Any) -> None:
    section = TEXT[TEXT.index(heading) :].split("\n## ", 1)[0]
    found = re.findall(r"^\| (\d+) \| `([A-Z_]+)` \|", section, re.MULTILINE)
    assert {name: int(number) for number, name in found} == {member.name: member.value for member in numbers}


def test_the_bytes_of_the_example() -> None:
    assert wire.encode_request(1, "chat", CHAT, 8, 1 / 32, "wide") == REQUEST
    batch = batch_of([ANIMALS.prefix(3), DraftTree.empty()], 3)._replace(
        match_lengths=np.array([2, 0], np.int32), match_counts=np.array([31, 0], np.int64)
    )
    assert wire.encode_answer(1, 0x9D3C5A1B7E2F4860, 0x35963F0B5926E1EB, 57, batch) == ANSWER


@pytest.mark.parametrize("name", ["rest", "wide"])
def test_the_client_of_the_page_gets_the_trees_of_the_local_store(
    client: dict[str, Any], stores: dict[str, Path], caller: Caller, name: str
) -> None:
    nodes = 0
    with closing(open_store(stores[name])) as store, caller.socket.makefile("rwb") as stream:
        for number, (batch, budget, least) in enumerate([(1, 8, 0.0), (40, 64, 0.01), (3, 600, 0.0)], 1):
            contexts = contexts_of(stores[name], batch, seed=number)
            rows = [[token for token in row if token >= 0] for row in contexts.tolist()]
            found = client["draft"](stream, number, name, rows, budget, least)
            expected = [nodes_of(each.tree) for each in store.drafter().draft(contexts, budget, least)]
            assert [[node[:2] for node in draft] for draft in found] == [
                [node[:2] for node in draft] for draft in expected
            ]
            for one, other in zip(found, expected, strict=True):
                assert np.array_equal(
                    np.array([n[2] for n in one], "f4"), np.array([n[2] for n in other], "f4")
                )
            nodes += sum(map(len, found))
    assert nodes > 100


def test_the_client_of_the_page_reports_failures(client: dict[str, Any], caller: Caller) -> None:
    with caller.socket.makefile("rwb") as stream:
        with pytest.raises(RuntimeError, match="status 4: nothing is served under the name 'chat'"):
            client["draft"](stream, 1, "chat", [[1]])
        assert client["draft"](stream, 2, "rest", [[1]])


def test_the_client_is_used_as_the_page_shows(
    client: dict[str, Any], guarded: Lookups, stores: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    contexts = contexts_of(stores["rest"], 40)
    with closing(open_store(stores["rest"])) as store:
        drafts = store.drafter().draft(contexts)
    known = next(row for row, draft in zip(contexts.tolist(), drafts, strict=True) if len(draft.tree))
    with guarded.caller() as caller:
        names = {**client, "connection": caller.socket, "TOKEN": TOKEN, "NAME": "rest"}
        exec(compile(USE.replace("[15, 27, 4]", str(known)), "docs/frames.md", "exec"), names)
        names["stream"].close()
    assert capsys.readouterr().out


def test_releases_have_the_keys_of_the_page(caller: Caller) -> None:
    releases = json.loads(caller.ask(wire.frame(Operation.RELEASES, 5)).payload)["releases"]
    section = TEXT[TEXT.index("**RELEASES**") : TEXT.index("**PROJECTION**")]
    inner = {"fingerprint", "digest", "dims", "hidden_size"}
    named = set(re.findall(r"`([a-z_]+)`", section)) - inner
    for release in releases:
        assert named <= release.keys()
        assert release["tokenizer"].keys() == {"name", "fingerprint"}
        assert (release["projection"] is None) == (release["kind"] != "dresd")
        answer = caller.draft(release["name"], np.zeros((1, 4), np.int32))
        assert f"{answer.build:016x}" == release["build"]
        assert f"{answer.tokenizer:016x}" == release["tokenizer"]["fingerprint"][:16]


def test_the_projection(caller: Caller, stores: dict[str, Path]) -> None:
    payload = caller.ask(wire.frame(Operation.PROJECTION, 5, b"dense")).payload
    dims, size = struct.unpack_from("<II", payload)
    weights = np.frombuffer(payload, "<f4", dims * size, 8).reshape(dims, size)
    bias = np.frombuffer(payload, "<f4", dims, 8 + weights.nbytes)
    state = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    with closing(DresdStore.open(stores["dense"])) as store:
        digest = hashlib.sha256(struct.pack("<qq", dims, size) + payload[8:]).hexdigest()
        assert digest == store.projection.digest
        assert np.allclose(weights @ state + bias, store.projection.apply(state), atol=1e-5)


def test_queries(caller: Caller, stores: dict[str, Path]) -> None:
    with closing(DresdStore.open(stores["dense"])) as store:
        contexts, queries = store.samples(20)
        assert queries is not None
        expected = [draft.tree for draft in store.drafter().draft(contexts, queries=queries)]
        head = {int(Tag.PROJECTION): struct.pack("<Q", int(store.projection.digest[:16], 16))}

    def ask(sections: dict[int, bytes]) -> wire.Frame:
        return caller.ask(wire.encode_request(3, "dense", contexts, 64, sections=sections))

    hidden = {int(Tag.HIDDEN): queries.astype("<f4").tobytes()}
    assert [draft.tree for draft in wire.decode_answer(ask({**head, **hidden}).payload).drafts] == expected
    queries[::2, 1] = np.nan
    some = {int(Tag.HIDDEN): queries.astype("<f4").tobytes()}
    found = [draft.tree for draft in wire.decode_answer(ask({**head, **some}).payload).drafts]
    assert found[1::2] == expected[1::2]
    assert not sum(map(len, found[::2]))
    assert failure(ask(hidden)).status == Status.BAD_REQUEST
    assert failure(ask({**head, int(Tag.HIDDEN): bytes(8)})).status == Status.BAD_REQUEST
    assert failure(ask({**hidden, int(Tag.PROJECTION): bytes(8)})).status == Status.OTHER_PROJECTION


def test_tokens_before_the_context_size_are_ignored(caller: Caller, stores: dict[str, Path]) -> None:
    contexts = contexts_of(stores["rest"], 40, width=40)[:, 24:]
    contexts = contexts[contexts[:, 0] >= 0]
    longer = np.hstack([np.full((len(contexts), 9), 7, np.int32), contexts])
    for name in ("rest", "crest"):
        assert caller.draft(name, contexts).drafts == caller.draft(name, longer).drafts
    assert len(contexts) > 10


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
        assert (frame.header.request_id, frame.header.operation) == (0, wire.ANSWER)
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
            assert frame.header.request_id == 7
        caller.hello(TOKEN)
        assert caller.ask(draft).header.status == Status.OK


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
