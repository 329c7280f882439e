"""Live stores behind the protocol: who may append and read, what is refused, and a service that is down."""

from pathlib import Path

import numpy as np
import pytest

from draftstore.drafting.slots import Slots, start
from draftstore.errors import LookupServiceError
from draftstore.live.log import LiveDocument, documents, hash_prompt, segments
from draftstore.live.memory import warm_up
from draftstore.live.recall import RecallDrafter
from draftstore.live.store import LiveTarget
from draftstore.remote import wire
from draftstore.remote.client import RemoteStore
from draftstore.remote.wire import AppendRequest, Status
from draftstore.storage.manifest import TokenizerIdentity
from services.common.permissions import Grant, Permissions, hash_token
from tests.fakes.lookups import Caller, Lookups, failure, serving

OURS, OTHERS = TokenizerIdentity("ours", "0a" * 32), TokenizerIdentity("others", "0b" * 32)
TEXT = np.arange(20, dtype=np.int32)
RIGHTS: dict[str, tuple[list[str], list[str]]] = {
    "writes": ([], ["team"]), "reads": (["team"], []), "both": (["team"], ["team"])
}  # fmt: skip
"""What tokens may draft from, and append to."""
GRANTS = [
    Grant(name, frozenset(reads), hash_token(name), appends=frozenset(appends))
    for name, (reads, appends) in RIGHTS.items()
]


def append(
    caller: Caller,
    name: str = "team",
    ids: np.ndarray = TEXT,
    owner: TokenizerIdentity = OURS,
    size: int = 50,
    digest: bytes = b"",
) -> wire.Frame:
    request = AppendRequest(name, size, owner.fingerprint, [LiveDocument(ids, min(2, len(ids)), digest)])
    return caller.ask(wire.encode_append(caller.next_id(), request))


def drafted(running: Lookups, name: str = "team", **client: object) -> list[int]:
    """Return the draft for the text up to its tenth token, by a client."""
    warm_up()
    with RemoteStore(running.socket, name, deadline=1.0, **client) as store:  # type: ignore[arg-type]
        found: list[int] = store.drafter("sole").session(TEXT[:10]).propose(4).tokens.tolist()
        return found


def test_appended_documents_draft_only_under_their_name(tmp_path: Path) -> None:
    live = [LiveTarget("team", tmp_path / "team"), LiveTarget("others")]
    with serving({}, live=live) as running, running.caller() as caller:
        assert append(caller, ids=TEXT[:0], owner=OTHERS, size=7).header.status == Status.OK
        nothing = AppendRequest("team", 7, OTHERS.fingerprint, [])
        assert caller.ask(wire.encode_append(caller.next_id(), nothing)).header.status == Status.OK
        assert drafted(running, tokenizer=OURS) == [], "of an empty live store, which has no vocabulary yet"
        assert append(caller).header.status == Status.OK
        assert append(caller, digest=b"d" * 16).header.status == Status.OK
        assert drafted(running) == [10, 11, 12, 13]
        assert drafted(running, "others") == []
        assert failure(append(caller, "unknown")).status == Status.NOT_FOUND
    with serving({}, live=live) as again:
        assert drafted(again) == [10, 11, 12, 13], "from the log"
    written = [found.digest for path in segments(tmp_path / "team") for _, found in documents(path)]
    assert written == [b"", b"d" * 16]


def test_another_vocabulary_is_refused() -> None:
    with serving({}, live=[LiveTarget("team")]) as running, running.caller() as caller:
        assert append(caller).header.status == Status.OK
        for owner, size, ids in (
            (OTHERS, 50, TEXT),
            (OURS, 51, TEXT),
            (OURS, 50, TEXT + 40),
            (OURS, 50, -TEXT),
        ):
            assert failure(append(caller, ids=ids, owner=owner, size=size)).status == Status.BAD_REQUEST
        many = AppendRequest("team", 50, OURS.fingerprint, [LiveDocument(TEXT[:0])] * 40_000)
        assert failure(caller.ask(wire.encode_append(9, many))).status == Status.BAD_REQUEST
        assert drafted(running, tokenizer=OURS) == [10, 11, 12, 13]
        assert drafted(running, tokenizer=OTHERS) == []


def test_tokens_permit_appends_and_reads() -> None:
    with serving({}, live=[LiveTarget("team")], permissions=Permissions(GRANTS)) as running:
        for name, (reads, appends) in RIGHTS.items():
            with running.caller() as caller:
                caller.hello(name)
                status = append(caller).header.status
                assert status == (Status.OK if appends else Status.FORBIDDEN)
                status = caller.draft_frame("team", TEXT[None, :10]).header.status
                assert status == (Status.OK if reads else Status.FORBIDDEN)


def test_a_client_counts_losses_and_never_raises() -> None:
    client = {"tokenizer": OURS, "vocab_size": 50, "deadline": 1.0}
    with serving({}, live=[LiveTarget("team")]) as running:
        store = RemoteStore(running.socket, "team", **client)  # type: ignore[arg-type]
        store.check_append()
        assert store.append(TEXT, 2)
        assert not store.append(TEXT + 40)
        with RemoteStore(running.socket, "unknown", **client) as wrong:  # type: ignore[arg-type]
            with pytest.raises(LookupServiceError, match="--live unknown"):
                wrong.check_append()
            assert not wrong.append(TEXT)
    assert not any(store.append(TEXT) for _ in range(5))
    assert [store.counters[name] for name in ("appended", "lost")] == [1, 6]


def test_answers_of_one_client_are_recalled_by_another() -> None:
    client = {"tokenizer": OURS, "vocab_size": 50, "deadline": 1.0}
    prompt = TEXT[:10]
    with serving({}, live=[LiveTarget("team")]) as running:
        mine, other = (RemoteStore(running.socket, "team", **client) for _ in range(2))  # type: ignore[arg-type]
        text = RecallDrafter(mine, 50, 16).session([*prompt, 10])
        assert text.propose(4).tokens.tolist() == []
        assert other.append_many(prompt, [TEXT[10:], TEXT[5:]] * 40, version=3) == 80
        assert text.propose(4).tokens.tolist() == [], "it asks when a text of the prompt begins, or ends here"
        later = RecallDrafter(mine, 50, 16).session([*prompt, 10])
        assert later.propose(4).tokens.tolist() == [11, 12, 13, 14]
        assert mine.append_many(prompt, [[10, 40, 41]], version=4) == 1
        assert 40 in text.propose(64).tokens.tolist()
        other.forget(before=4)
        assert mine.append_many(prompt, [[10, 40, 42]], version=4) == 1
        assert sorted(later.propose(3).tokens.tolist()) == [40, 41, 42]
        assert len(other.recall(hash_prompt(prompt), 16) or ()) == 2
    assert mine.recall(hash_prompt(prompt), 16) is None
    assert sorted(later.propose(3).tokens.tolist()) == [40, 41, 42], (
        "the service is gone, what it said remains"
    )


def test_running_texts_draft_no_more_from_what_their_client_made_the_service_forget() -> None:
    client = {"tokenizer": OURS, "vocab_size": 50, "deadline": 1.0}
    with serving({}, live=[LiveTarget("team")]) as running:
        store = RemoteStore(running.socket, "team", **client)  # type: ignore[arg-type]
        store.append_many(TEXT[:10], [TEXT[10:]], version=1)
        text = RecallDrafter(store, 50).session(TEXT[:11])
        assert len(text.propose(4)) == 4
        store.forget(before=-1)
        assert len(text.propose(4)) == 4
        store.forget(before=2)
        assert len(text.propose(4)) == 0


def test_tokens_permit_recall_and_forgetting() -> None:
    with serving({}, live=[LiveTarget("team")], permissions=Permissions(GRANTS)) as running:
        for name, (reads, appends) in RIGHTS.items():
            with running.caller() as caller:
                caller.hello(name)
                status = caller.ask(wire.encode_recall(5, "team", 1, 1)).header.status
                assert status == (Status.OK if reads else Status.FORBIDDEN)
                status = caller.ask(wire.encode_forget(6, "team", 1)).header.status
                assert status == (Status.OK if appends else Status.FORBIDDEN)
                assert caller.ask(wire.encode_recall(7, "unknown", 1, 1)).header.status == Status.FORBIDDEN


def test_a_later_text_of_a_running_prompt_recalls_what_others_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = {"tokenizer": OURS, "vocab_size": 50, "deadline": 1.0}
    with serving({}, live=[LiveTarget("team")]) as running:
        mine, other = (RemoteStore(running.socket, "team", **client) for _ in range(2))  # type: ignore[arg-type]
        slots, drafter = Slots(), RecallDrafter(mine, 50)
        texts = [start(drafter, TEXT[:11], slots=slots)]
        assert other.append_many(TEXT[:10], [TEXT[10:]]) == 1
        texts.append(start(drafter, TEXT[:11], slots=slots))
        assert [len(text.propose(4)) for text in texts] == [0, 0], "a moment later it does not ask again"
        monkeypatch.setattr("draftstore.live.recall.FRESH_SECONDS", 0.0)
        texts.append(start(drafter, TEXT[:11], slots=slots))
        assert [text.propose(4).tokens.tolist() for text in texts] == [[11, 12, 13, 14]] * 3
