"""What was taken down from a live log: documents that neither log nor memory may hold, now and later.

    {"state": 3, "digests": ["9c1f..."], "containing": [{"length": 16, "roll": 1234, "digest": "..."}]}

`take_down` overwrites the documents that it hits, and waits until the memory of every process that holds the log is
without them. Texts are not kept, see `draftstore.text.fragments`.
"""

import dataclasses
import json
import time
from collections.abc import Iterable
from pathlib import Path

from draftstore.errors import DraftstoreError
from draftstore.live.log import LIVE, Document, applied, erase, is_open, read_since, segments
from draftstore.storage.files import replacing
from draftstore.storage.locks import lock
from draftstore.text.digests import text_digest
from draftstore.text.fragments import Fragment
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer

SECONDS = 10.0
"""Time that running processes have to forget."""


@dataclasses.dataclass(frozen=True)
class TakeDowns:
    """The documents that a log may not hold: `state` counts the changes, `digests` are of answers, in hexadecimal."""

    state: int = 0
    digests: frozenset[str] = frozenset()
    containing: tuple[Fragment, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> "TakeDowns":
        """Return those of a log; DraftstoreError if they cannot be read."""
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

    def refuse(self, document: Document, tokenizer: TextTokenizer) -> bool:
        """Return True if a document was taken down, now or before."""
        if text_digest(answer_text(document, tokenizer)).hex() in self.digests:
            return True
        text = tokenizer.decode(document.ids.tolist()) if self.containing else ""
        return any(fragment.occurs_in(text) for fragment in self.containing)


def answer_text(document: Document, tokenizer: TextTokenizer) -> str:
    """Return the text of an answer, by which collections know it."""
    return tokenizer.decode(document.ids[document.lead :].tolist())


def tokenizer_of(folder: Path) -> TextTokenizer:
    """Return the tokenizer of a log that a collection reads."""
    return load_tokenizer(folder / "tokenizer")


def take_down(folder: Path, digests: Iterable[str], containing: Iterable[Fragment]) -> int:
    """Take documents down, and return how many the log held; memory is without them when this returns.

    Raises:
        DraftstoreError: a process that holds the log did not forget in time.
    """
    with lock(folder):
        before = TakeDowns.read(folder)
        fragments = {fragment.key: fragment for fragment in (*before.containing, *containing)}
        rules = TakeDowns(before.state + 1, before.digests | set(digests), tuple(fragments.values()))
        with replacing(folder / "removed.json", 0o600) as temporary:
            fields = dataclasses.asdict(rules) | {"digests": sorted(rules.digests)}
            temporary.write_text(json.dumps(fields), encoding="utf-8")
        tokenizer = tokenizer_of(folder)
        erased = sum(
            erase(path, lambda document: rules.refuse(document, tokenizer)) for path in segments(folder)
        )
    end = time.monotonic() + SECONDS
    while late := memory_behind(folder, rules.state):
        if time.monotonic() > end:
            raise DraftstoreError(
                f"the log {folder} is without the documents, but the process that writes {late[0].name} may hold them "
                "in memory: stop it, then remove them again"
            )
        time.sleep(0.02)
    return erased


def memory_behind(folder: Path, state: int) -> list[Path]:
    """Return the segments of running processes whose memory has not applied a state of take-downs."""
    return [path for path in segments(folder, LIVE) if is_open(path) and applied(path) < state]


def still_held(folder: Path) -> tuple[int, int]:
    """Return how many taken-down documents a log holds, and how many running processes may hold some in memory."""
    rules = TakeDowns.read(folder)
    if not rules.state:
        return 0, 0
    tokenizer = tokenizer_of(folder)
    held = sum(rules.refuse(found, tokenizer) for path in segments(folder) for found in read_since(path)[0])
    return held, len(memory_behind(folder, rules.state))
