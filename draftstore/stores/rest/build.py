"""Building a REST store from text: tokenize, lay out segments, sort each; resumable at every step.

In the working directory (draftstore.storage.staging) lie the token shards (draftstore.text.tokenizing) and

    layout.json, sorted-00000, ...   markers of draftstore.stores.rest.segments

A build that is run again goes on after the last marker; one that fails before the first token shard is finished leaves
nothing. The arrays are the same bytes for the same input, whatever the number of processes and interruptions.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from draftstore.errors import BuildError
from draftstore.search.sorting import MAX_SEGMENT_TOKENS
from draftstore.storage.report import ReadReport
from draftstore.storage.staging import STORE, BuildResult, build_store
from draftstore.stores.rest.segments import lay_out, read_segments, sort_segments
from draftstore.stores.rest.store import KIND
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokenizing import CorpusOptions, corpus_plan, finish_store, tokenize_into

SEGMENT_TOKENS = 1 << 28
"""Tokens of a segment by default: sorting one takes nine bytes of memory a token, so 2.4 GB."""


@dataclasses.dataclass
class Progress:
    """Where a build reports to; each is called many times with totals so far.

    Attributes:
        tokenized: documents, tokens, characters.
        sorted: tokens sorted, tokens in all.
        hashed: bytes hashed, bytes in all.
    """

    tokenized: Callable[[int, int, int], None] = lambda _documents, _tokens, _characters: None
    sorted: Callable[[int, int], None] = lambda _tokens, _all: None
    hashed: Callable[[int, int], None] = lambda _bytes, _all: None


@dataclasses.dataclass(frozen=True)
class RestOptions(CorpusOptions):
    """What is built, and from what.

    Attributes:
        segment_tokens: most tokens of a segment.
    """

    segment_tokens: int = SEGMENT_TOKENS


def build_rest(
    options: RestOptions,
    tokenizer: TextTokenizer,
    out: Path,
    *,
    tokens: Path | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> BuildResult:
    """Build a REST store, or go on with an interrupted build of the same.

    Args:
        options: what to build.
        tokenizer: makes the token ids; a copy goes into the store.
        out: directory of the store; its parent is made if absent.
        tokens: a store of the corpus's token shards (`tokenizing.build_tokens`), so that it is not tokenized again.
        overwrite: replace a store that is there, even one of this very build.
        workers: processes that sort segments; all cores by default.
        progress: told how far the build is.

    Raises:
        BuildError: `out` holds something else, another build is at work there, no space, a worker died.
        CorpusError: the corpus cannot be read, or holds no text.
    """
    if not 2 <= options.segment_tokens <= MAX_SEGMENT_TOKENS:
        raise BuildError(
            f"segments of {options.segment_tokens:,} tokens: expected 2 to {MAX_SEGMENT_TOKENS:,}"
        )
    plan = {"kind": KIND, **corpus_plan(options, tokenizer), "segment_tokens": options.segment_tokens}

    told = progress or Progress()

    def fill(partial: Path) -> ReadReport:
        texts = tokenize_into(partial, options, tokenizer, plan, taken=tokens, on_progress=told.tokenized)
        store, vocab_size = partial / STORE, texts.shards.vocab_size
        lay_out(texts.shards, store, partial, options.segment_tokens)
        sort_segments(store, partial, vocab_size, workers or os.cpu_count() or 1, told.sorted)
        segments = read_segments(store)
        counts = {"entries": int(segments[:, 1].sum()), "segments": len(segments)}
        finish_store(
            store, texts, plan, {"segment_tokens": options.segment_tokens}, counts, on_bytes=told.hashed
        )
        return texts.report

    return build_store(out, plan, options.name, overwrite, fill)
