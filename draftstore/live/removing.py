"""Documents taken down from a live log, which neither log nor memory may hold, now or later.

    {"state": 1767225600000, "identity": 2, "documents": ["9c1f..."], "answers": ["04be..."],
     "containing": [{"length": 16, "roll": 1234, "digest": "...", "folded": false}]}

`take_down` overwrites matching documents, and waits until every process that uses the log has removed them from memory.
The removed texts are not stored, see `draftstore.text.fragments`. Documents are compared by digest. Where a writer did
not know the conversation (an engine's plug-in), the digest of the answer's decoded text stands for it: that of an
answer which ends by a stop string, inside a character, or has a special token inside differs from any log's.
"""

import dataclasses
import time
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from draftstore.errors import DraftstoreError
from draftstore.live import log, shared
from draftstore.live.log import LIVE, LiveDocument, documents, is_open, segments
from draftstore.live.source import answer_of, identified, tokenizer_of
from draftstore.storage.locks import lock
from draftstore.storage.manifest import TOKENIZER_FOLDER
from draftstore.text.fragments import Finder, Fragment
from draftstore.text.tokenizer import TextTokenizer

SILENT_SECONDS = 10.0
"""Seconds without a sign of life after which a process is no longer waited for."""


@dataclasses.dataclass(frozen=True)
class TakeDowns:
    """Documents that a log may not hold, by their digests; `state` grows with each change.

    `answers` are digests of their last answers, for documents whose writer did not know the conversation; no document
    may contain a text of `containing`.
    """

    state: int = dataclasses.field(default=0, compare=False)
    documents: frozenset[bytes] = frozenset()
    answers: frozenset[bytes] = frozenset()
    containing: tuple[Fragment, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> "TakeDowns":
        """Return the take-downs of a log; see `shared.load` for errors."""

        def made(found: dict[str, Any]) -> TakeDowns:
            digests = {key: frozenset(map(bytes.fromhex, found[key])) for key in ("documents", "answers")}
            fragments = tuple(Fragment(**each) for each in found["containing"])
            return cls(int(found["state"]), containing=fragments, **digests)

        return (
            shared.load(folder, "removed.json", made, "remove the documents again, then this file") or cls()
        )

    @property
    def empty(self) -> bool:
        """Whether any document may be held."""
        return not (self.documents or self.answers or self.containing)

    def refuse(self, document: LiveDocument, tokenizer: TextTokenizer) -> bool:
        """Return True if a document is among the take-downs."""
        found = identified(document, tokenizer)
        if found.digest in self.documents or (found.alone and found.digest in self.answers):
            return True
        return bool(self.containing) and self._finder(tokenizer.decode(document.ids.tolist()))

    @cached_property
    def _finder(self) -> Finder:
        return Finder(self.containing)

    def unclear(self, document: LiveDocument, tokenizer: TextTokenizer) -> bool:
        """Return True if a document may hold a removed answer that its digest does not tell."""
        if not self.answers or (document.digest and not document.alone):
            return False
        text, whole = answer_of(document, tokenizer)
        return bool(text.strip()) and not whole


class Held(NamedTuple):
    """What a live log in a folder, `place`, and its processes may still hold of removed documents."""

    place: str
    log: int = 0  # removed documents in it
    memory: int = 0  # running processes that may hold some
    unclear: int = 0  # documents that cannot be compared (`TakeDowns.unclear`), except those vouched for
    damaged: int = 0  # bytes that cannot be read
    vouched: str | None = (
        None  # when somebody vouched for what cannot be compared or read, since the last removal
    )

    @property
    def clean(self) -> bool:
        """Whether it holds none."""
        return not (self.log or self.memory or self.unclear or (self.damaged and not self.vouched))


def last_change(folder: Path) -> tuple[int, ...]:
    """Return values that change with the take-downs, the settings or the tokenizer of a log, without reading them."""
    found: list[int] = []
    for name in ("removed.json", "live.json", TOKENIZER_FOLDER):
        with suppress(FileNotFoundError):
            status = (folder / name).stat()
            found += [status.st_ino, status.st_mtime_ns]
    return tuple(found)


def take_down(folder: Path, wanted: TakeDowns) -> int:
    """Put take-downs in force instead of earlier ones; return how many documents were in the log.

    On return, the memory of all processes is free of them. There is no time limit for processes that are at work; one
    that gives no sign of life is a DraftstoreError.
    """
    with lock(folder):
        rules = before = TakeDowns.read(folder)
        if wanted != before:
            # Higher than any state that a process may have applied, even if the file was deleted.
            rules = dataclasses.replace(wanted, state=max(before.state + 1, int(1000 * time.time())))
        # Erase before the rules are written: processes that read these also overwrite documents, without counting them.
        erased = _erase(folder, rules)
        if rules is not before:
            digests = {key: sorted(map(bytes.hex, getattr(rules, key))) for key in ("documents", "answers")}
            shared.save(folder / "removed.json", dataclasses.asdict(rules) | digests)
    _wait(folder, rules.state)
    # Once more: a process may have ended after the first pass, before it saw the rules.
    return erased + _erase(folder, rules)


def _erase(folder: Path, rules: TakeDowns) -> int:
    if rules.empty:
        return 0
    tokenizer = tokenizer_of(folder)
    return sum(log.erase(path, lambda found: rules.refuse(found, tokenizer)) for path in segments(folder))


def _wait(folder: Path, state: int) -> None:
    """Wait until all processes have applied a state of take-downs, as long as they are at work."""
    since: dict[tuple[Path, int], float] = {}
    pause = 0.02
    while late := memory_behind(folder, state):
        now = time.monotonic()
        for sign in late.items():
            if now - since.setdefault(sign, now) > SILENT_SECONDS:
                raise DraftstoreError(
                    f"the documents are removed from the live log {folder}, but the process that writes {sign[0].name} "
                    f"has given no sign of life for {SILENT_SECONDS:g} s and may hold them: stop it, then run "
                    "`draftstore corpus prove-removed`"
                )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def memory_behind(folder: Path, state: int) -> dict[Path, int]:
    """Return the segments of running processes whose memory has not applied a state, with their signs of life."""
    behind = {}
    for path in segments(folder, LIVE):
        with suppress(FileNotFoundError):
            if is_open(path) and (found := log.applied(path))[0] < state:
                behind[path] = found[1]
    return behind


def still_held(folder: Path, wanted: TakeDowns, vouched: str | None = None) -> Held:
    """Return what a log and its processes may still hold of given take-downs and those in force.

    Documents that somebody vouched for, at a time in ISO form, are those written before.
    """
    own, paths = TakeDowns.read(folder), segments(folder)
    since = datetime.fromisoformat(vouched).timestamp() if vouched else 0.0
    held = Held(str(folder), damaged=sum(map(log.damage, paths)), vouched=vouched)
    if rules := {own, wanted} - {TakeDowns()}:
        tokenizer = tokenizer_of(folder)
        held = held._replace(memory=len(memory_behind(folder, own.state)))
        for _, found in (each for path in paths for each in documents(path)):
            refused = any(each.refuse(found, tokenizer) for each in rules)
            new = not refused and found.created > since
            unclear = new and any(each.unclear(found, tokenizer) for each in rules)
            held = held._replace(log=held.log + refused, unclear=held.unclear + unclear)
    return held
