"""Documents taken down from a live log, which neither log nor memory may hold, now or later.

    {"state": 1767225600000, "digests": ["9c1f..."], "containing": [{"length": 16, "roll": 1234, "digest": "..."}]}

`take_down` overwrites matching documents, and waits until every process that uses the log has removed them from memory.
The removed texts are not stored, see `draftstore.text.fragments`.
"""

import dataclasses
import json
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from draftstore.errors import DraftstoreError
from draftstore.live.log import LIVE, Document, applied, documents, erase, is_open, segments
from draftstore.storage.files import replacing
from draftstore.storage.locks import lock
from draftstore.storage.manifest import TOKENIZER_FOLDER
from draftstore.text.digests import text_digest
from draftstore.text.fragments import Fragment
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer

SECONDS = 10.0
"""Seconds in which running processes must forget documents."""
TAIL = 32
"""Characters at the end of an answer that serve as a key to find texts that end with it."""


@dataclasses.dataclass(frozen=True)
class TakeDowns:
    """Documents that a log may not hold: `state` grows with each change, `digests` are of answers, in hexadecimal."""

    state: int = 0
    digests: frozenset[str] = frozenset()
    containing: tuple[Fragment, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> "TakeDowns":
        """Return the take-downs of a log; DraftstoreError if they cannot be read."""
        try:
            found = json.loads((folder / "removed.json").read_text(encoding="utf-8"))
            fragments = tuple(Fragment(**each) for each in found["containing"])
            return cls(int(found["state"]), frozenset(found["digests"]), fragments)
        except FileNotFoundError:
            return cls()
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise DraftstoreError(
                f"{folder / 'removed.json'} cannot be read ({error}): remove the documents again, then this file"
            ) from None

    def joined(self, digests: Iterable[str], containing: Iterable[Fragment]) -> "TakeDowns":
        """Return these take-downs combined with others: the same object if nothing is new, else with the next state."""
        more = self.digests | set(digests)
        fragments = tuple({fragment.key: fragment for fragment in (*self.containing, *containing)}.values())
        if (len(more), len(fragments)) == (len(self.digests), len(self.containing)):
            return self
        # Higher than any state that a process may have applied, even if the file was deleted.
        return TakeDowns(max(self.state + 1, int(1000 * time.time())), more, fragments)

    def refuse(self, document: Document, tokenizer: TextTokenizer) -> bool:
        """Return True if a document is among the take-downs."""
        if text_digest(answer_text(document, tokenizer)).hex() in self.digests:
            return True
        text = tokenizer.decode(document.ids.tolist()) if self.containing else ""
        return any(fragment.occurs_in(text) for fragment in self.containing)


def last_change(folder: Path) -> tuple[int, int]:
    """Return values that change whenever the take-downs of a log do, without reading them; zeros if there are none."""
    try:
        found = (folder / "removed.json").stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def answer_text(document: Document, tokenizer: TextTokenizer) -> str:
    """Return the text of an answer, by which collections know it."""
    return tokenizer.decode(document.ids[document.lead :].tolist())


def tokenizer_of(folder: Path) -> TextTokenizer:
    """Return the tokenizer of a log that a collection reads."""
    return load_tokenizer(folder.resolve() / TOKENIZER_FOLDER)


def take_down(folder: Path, digests: Iterable[str], containing: Iterable[Fragment]) -> int:
    """Take documents down, and return how many were in the log; on return, memory is free of them.

    Raises:
        DraftstoreError: a process that uses the log did not forget them in time.
    """
    with lock(folder):
        before = TakeDowns.read(folder)
        rules = before.joined(digests, containing)
        tokenizer = tokenizer_of(folder)
        # Erase before the rules are written: processes that read these also overwrite documents, without counting them.
        erased = sum(
            erase(path, lambda document: rules.refuse(document, tokenizer)) for path in segments(folder)
        )
        if rules is not before:
            with replacing(folder / "removed.json", 0o600) as temporary:
                fields = dataclasses.asdict(rules) | {"digests": sorted(rules.digests)}
                temporary.write_text(json.dumps(fields), encoding="utf-8")
    end = time.monotonic() + SECONDS
    while late := memory_behind(folder, rules.state):
        if time.monotonic() > end:
            raise DraftstoreError(
                f"the documents are removed from the live log {folder}, but the process that writes {late[0].name} did "
                f"not forget them within {SECONDS:g} s: stop it, then run `draftstore corpus prove-removed`"
            )
        time.sleep(0.02)
    # Once more: a process may have ended after the first pass, before it saw the rules.
    return erased + sum(
        erase(path, lambda found: rules.refuse(found, tokenizer)) for path in segments(folder)
    )


def answers_of(folder: Path, texts: Iterable[str]) -> set[str]:
    """Return the digests, in hexadecimal, of answers in a live log that also end one of these response log texts.

    A text of a response log ends with its answer, apart from white space and special tokens.
    """
    tokenizer = tokenizer_of(folder)
    specials = tuple(tokenizer.token_text(token) for token in tokenizer.special_ids)
    answers: dict[str, dict[str, set[str]]] = {}
    for path in segments(folder):
        for _, document in documents(path):
            if document.elsewhere and (bare := _bare(text := answer_text(document, tokenizer), specials)):
                ends = answers.setdefault(bare[-TAIL:], {})
                ends.setdefault(bare, set()).add(text_digest(text).hex())
    found: set[str] = set()
    for text in texts if answers else ():
        whole = _bare(text, specials)
        for length in range(1, TAIL + 1):
            for bare, digests in answers.get(whole[-length:], {}).items():
                found |= digests if whole.endswith(bare) else set()
    return found


def _bare(text: str, specials: tuple[str, ...]) -> str:
    """Return a text without trailing white space and special tokens."""
    text = text.rstrip()
    while text.endswith(specials):
        text = text.removesuffix(next(filter(text.endswith, specials))).rstrip()
    return text


def memory_behind(folder: Path, state: int) -> list[Path]:
    """Return the segments of running processes whose memory has not applied a state of take-downs."""
    behind = []
    for path in segments(folder, LIVE):
        with suppress(FileNotFoundError):
            if is_open(path) and applied(path) < state:
                behind.append(path)
    return behind


def still_held(folder: Path, digests: Iterable[str], containing: Iterable[Fragment]) -> tuple[int, int]:
    """Return how many given or taken-down documents a log holds, and how many processes may hold some in memory."""
    rules = TakeDowns.read(folder).joined(digests, containing)
    if not rules.state:
        return 0, 0
    tokenizer = tokenizer_of(folder)
    held = sum(rules.refuse(found, tokenizer) for path in segments(folder) for _, found in documents(path))
    return held, len(memory_behind(folder, rules.state))
