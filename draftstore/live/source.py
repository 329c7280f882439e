"""A live log as a source of a collection: the answers of its segments.

An answer whose conversation is in a response log has the same digest there, so that the collection has it once.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from draftstore.errors import CorpusError, TokenizerError
from draftstore.live import log
from draftstore.live.log import LIVE, REST, LiveDocument, documents, segments
from draftstore.live.shared import settings_of
from draftstore.storage.files import publish, remove
from draftstore.storage.locks import lock
from draftstore.storage.manifest import TOKENIZER_FOLDER
from draftstore.text.digests import Identity, answer_digest, identify
from draftstore.text.records import CorpusFile, Document, Render
from draftstore.text.selecting import RecordOptions
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer

THOUGHT = "</think>"
"""Ends what a model thinks, which servers leave out of an answer."""


@dataclasses.dataclass(frozen=True)
class LiveTexts:
    """How the segments of a log are found and read; see `draftstore.text.corpus.Source`."""

    folder: Path
    tokenizer: TextTokenizer

    def find(self) -> list[CorpusFile]:
        """Return its segments; a live one by both names, since it may be put to rest in the meantime.

        CorpusError if the folder does not exist; TokenizerError if it holds ids of another tokenizer.
        """
        if not (self.folder / TOKENIZER_FOLDER).is_dir():
            raise CorpusError(
                f"no live log in {self.folder}: the disk may not be mounted; `draftstore corpus add` creates a new one"
            )
        _require_own(self.folder, self.tokenizer)
        return [
            CorpusFile(path.with_suffix(suffix), path.stem, "live")
            for path in segments(self.folder)
            for suffix in ((REST, LIVE) if path.suffix == LIVE else (REST,))
        ]

    def read(self, file: CorpusFile, _records: RecordOptions, _render: Render) -> Iterator[Document]:
        """Stream the answers of a segment, even if it has been put to rest since."""
        path = file.path if file.path.exists() else file.path.with_suffix(REST)
        for place, document in documents(path):
            text = self.tokenizer.decode(document.ids[document.prompt_size :])
            found = identified(document, self.tokenizer)
            # Of a conversation, the log has only the last answer: its text is not that of the document.
            known = Identity(found.digest, identify(text).text if found.alone else None)
            yield Document(f"{file.name}#{place}", text, known)


def answer_of(document: LiveDocument, tokenizer: TextTokenizer) -> tuple[str, bool]:
    """Return an answer's text without the special tokens that end it, and whether every log has the same one."""
    ids = document.ids[document.prompt_size :].tolist()
    end = len(ids)
    while end and ids[end - 1] in tokenizer.special_ids:
        end -= 1
    text = tokenizer.decode(ids[:end])
    whole = (
        end < len(ids)
        and tokenizer.special_ids.isdisjoint(ids[:end])
        and len(document.ids) < log.MAX_DOCUMENT
    )
    return text, whole and "\ufffd" not in text and THOUGHT not in text


def identified(document: LiveDocument, tokenizer: TextTokenizer) -> LiveDocument:
    """Return a document with its digest, computed from the answer's text if the writer gave none."""
    if document.digest:
        return document
    return document._replace(digest=answer_digest(answer_of(document, tokenizer)[0]), alone=True)


def tokenizer_of(folder: Path) -> TextTokenizer:
    """Return the tokenizer of a log that a collection reads."""
    return load_tokenizer(folder.resolve() / TOKENIZER_FOLDER)


def adopt(folder: Path, tokenizer: TextTokenizer) -> None:
    """Make a log, which need not exist yet, a source of a collection, so that its writers can apply take-downs.

    TokenizerError if it holds ids of another tokenizer; OSError if it cannot be written.
    """
    _require_own(folder, tokenizer)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock(folder):
        with suppress(TokenizerError):
            if tokenizer_of(folder).fingerprint == tokenizer.fingerprint:
                return
        filling, replaced = folder / f".{TOKENIZER_FOLDER}.partial", folder / f".{TOKENIZER_FOLDER}.replaced"
        remove(filling)
        remove(replaced)
        filling.mkdir()
        tokenizer.save(filling)
        publish(filling, folder / TOKENIZER_FOLDER, replaced)
        remove(replaced)


def _require_own(folder: Path, tokenizer: TextTokenizer) -> None:
    found = settings_of(folder).vocabulary
    if found is not None and found.fingerprint != tokenizer.fingerprint:
        raise TokenizerError(
            f"the live log {folder} holds ids of the tokenizer {found.fingerprint[:12]}, but {tokenizer.name!r} is "
            f"{tokenizer.fingerprint[:12]}: pass the tokenizer of the model that answers, or another log"
        )
