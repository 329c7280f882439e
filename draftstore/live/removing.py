"""Documents taken down from a live log, which neither log nor memory may hold, now or later.

    {"state": 1767225600000, "identity": 2, "documents": ["9c1f..."], "answers": ["04be..."],
     "containing": [{"length": 16, "roll": 1234, "digest": "...", "folded": false}]}

`take_down` overwrites matching documents, and waits until every process that uses the log has removed them from memory.
The removed texts are not stored, see `draftstore.text.fragments`. Documents are compared by digest. Where a writer did
not know the conversation (an engine's plug-in), the digest of the answer's decoded text stands for it: that of an
answer which ends by a stop string, inside a character, or has a special token inside differs from any log's.
"""

import dataclasses
import json
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from draftstore.errors import DraftstoreError
from draftstore.live.log import (
    LIVE,
    Document,
    applied,
    damage,
    documents,
    erase,
    is_open,
    require_identity,
    segments,
)
from draftstore.storage.files import replacing
from draftstore.storage.locks import lock
from draftstore.storage.manifest import TOKENIZER_FOLDER
from draftstore.text.digests import IDENTITY, answer_digest
from draftstore.text.fragments import Finder, Fragment
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer

SILENT_SECONDS = 10.0
"""Seconds without a sign of life after which a process is no longer waited for."""


@dataclasses.dataclass(frozen=True)
class TakeDowns:
    """Documents that a log may not hold; `state` grows with each change.

    Attributes:
        documents: their digests, in hexadecimal.
        answers: digests of their last answers, compared with documents whose writer did not know the conversation.
        containing: texts that no document may contain.
    """

    state: int = 0
    documents: frozenset[str] = frozenset()
    answers: frozenset[str] = frozenset()
    containing: tuple[Fragment, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> "TakeDowns":
        """Return the take-downs of a log.

        Raises:
            EarlierVersionError: they are of an earlier version.
            DraftstoreError: they cannot be read.
        """
        try:
            found = json.loads((folder / "removed.json").read_text(encoding="utf-8"))
            require_identity(folder, found)
            fragments = tuple(Fragment(**each) for each in found["containing"])
            digests = frozenset(found["documents"]), frozenset(found["answers"])
            return cls(int(found["state"]), *digests, fragments)
        except FileNotFoundError:
            return cls()
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise DraftstoreError(
                f"{folder / 'removed.json'} cannot be read ({error}): remove the documents again, then this file"
            ) from None

    def replaced_by(self, rules: "TakeDowns") -> "TakeDowns":
        """Return other take-downs in the next state: these, if nothing differs."""
        if dataclasses.replace(rules, state=self.state) == self:
            return self
        # Higher than any state that a process may have applied, even if the file was deleted.
        return dataclasses.replace(rules, state=max(self.state + 1, int(1000 * time.time())))

    def refuse(self, document: Document, tokenizer: TextTokenizer) -> bool:
        """Return True if a document is among the take-downs."""
        found = identified(document, tokenizer)
        if (digest := found.digest.hex()) in self.documents or (found.alone and digest in self.answers):
            return True
        return bool(self.containing) and self._finder(tokenizer.decode(document.ids.tolist()))

    @cached_property
    def _finder(self) -> Finder:
        return Finder(self.containing)

    def unclear(self, document: Document, tokenizer: TextTokenizer) -> bool:
        """Return True if a document may hold a removed answer that its digest does not tell."""
        if not self.answers or not identified(document, tokenizer).alone:
            return False
        ids = document.ids[document.lead :].tolist()
        whole = _without_ends(ids, tokenizer)
        text = tokenizer.decode(whole)
        told = len(whole) < len(ids) and tokenizer.special_ids.isdisjoint(whole) and "\ufffd" not in text
        return bool(text.strip()) and not told


class Held(NamedTuple):
    """What a live log and its processes may still hold of removed documents.

    Attributes:
        place: its folder.
        log: number of removed documents in it.
        memory: number of running processes that may hold some.
        unclear: number of documents that cannot be compared, see `TakeDowns.unclear`.
        damaged: bytes that cannot be read.
    """

    place: str
    log: int = 0
    memory: int = 0
    unclear: int = 0
    damaged: int = 0


def last_change(folder: Path) -> tuple[int, ...]:
    """Return values that change with the take-downs or the tokenizer of a log, without reading them."""
    found: list[int] = []
    for name in ("removed.json", TOKENIZER_FOLDER):
        with suppress(FileNotFoundError):
            status = (folder / name).stat()
            found += [status.st_ino, status.st_mtime_ns]
    return tuple(found)


def _without_ends(ids: list[int], tokenizer: TextTokenizer) -> list[int]:
    """Return the ids of an answer without the special tokens that end it."""
    end = len(ids)
    while end and ids[end - 1] in tokenizer.special_ids:
        end -= 1
    return ids[:end]


def answer_text(document: Document, tokenizer: TextTokenizer) -> str:
    """Return the text of an answer, with the special tokens that end it."""
    return tokenizer.decode(document.ids[document.lead :].tolist())


def identified(document: Document, tokenizer: TextTokenizer) -> Document:
    """Return a document with its digest, computed from the answer's text if the writer gave none."""
    if document.digest:
        return document
    ids = _without_ends(document.ids[document.lead :].tolist(), tokenizer)
    return document._replace(digest=answer_digest(tokenizer.decode(ids)), alone=True)


def tokenizer_of(folder: Path) -> TextTokenizer:
    """Return the tokenizer of a log that a collection reads."""
    return load_tokenizer(folder.resolve() / TOKENIZER_FOLDER)


def take_down(folder: Path, wanted: TakeDowns) -> int:
    """Put take-downs in force instead of earlier ones; return how many documents were in the log.

    On return, the memory of all processes is free of them. There is no time limit for processes that are at work.

    Raises:
        DraftstoreError: a process that uses the log gives no sign of life.
    """
    with lock(folder):
        before = TakeDowns.read(folder)
        rules = before.replaced_by(wanted)
        # Erase before the rules are written: processes that read these also overwrite documents, without counting them.
        erased = _erase(folder, rules)
        if rules is not before:
            with replacing(folder / "removed.json", 0o600) as temporary:
                sets = {"documents": sorted(rules.documents), "answers": sorted(rules.answers)}
                fields = dataclasses.asdict(rules) | sets | {"identity": IDENTITY}
                temporary.write_text(json.dumps(fields), encoding="utf-8")
    _wait(folder, rules.state)
    # Once more: a process may have ended after the first pass, before it saw the rules.
    return erased + _erase(folder, rules)


def _erase(folder: Path, rules: TakeDowns) -> int:
    if not (rules.documents or rules.answers or rules.containing):
        return 0
    tokenizer = tokenizer_of(folder)
    return sum(erase(path, lambda found: rules.refuse(found, tokenizer)) for path in segments(folder))


def _wait(folder: Path, state: int) -> None:
    """Wait until all processes have applied a state of take-downs, as long as they are at work."""
    seen: dict[Path, tuple[int, float]] = {}
    pause = 0.02
    while late := memory_behind(folder, state):
        for path, signs in late.items():
            known, since = seen.setdefault(path, (signs, time.monotonic()))
            if signs != known:
                seen[path] = signs, time.monotonic()
            elif time.monotonic() - since > SILENT_SECONDS:
                raise DraftstoreError(
                    f"the documents are removed from the live log {folder}, but the process that writes {path.name} "
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
            if is_open(path) and (found := applied(path))[0] < state:
                behind[path] = found[1]
    return behind


def still_held(folder: Path, wanted: TakeDowns) -> Held:
    """Return what a log and its processes may still hold of given take-downs and those in force."""
    own, paths = TakeDowns.read(folder), segments(folder)
    rules = [own, wanted]
    damaged = sum(map(damage, paths))
    if not any(each.documents or each.answers or each.containing for each in rules):
        return Held(str(folder), damaged=damaged)
    tokenizer, log, unclear = tokenizer_of(folder), 0, 0
    for path in paths:
        for _, found in documents(path):
            refused = any(each.refuse(found, tokenizer) for each in rules)
            log += refused
            unclear += not refused and any(each.unclear(found, tokenizer) for each in rules)
    return Held(str(folder), log, len(memory_behind(folder, own.state)), unclear, damaged)
