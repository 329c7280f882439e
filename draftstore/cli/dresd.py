"""`draftstore build dresd`: a store of one model's hidden states."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from draftstore.cli.build import (
    Bar,
    column_option,
    corpus_option,
    glob_option,
    name_option,
    out_option,
    overwrite_option,
    rehash_option,
    report_build,
    strict_option,
    truncated_option,
)
from draftstore.cli.common import ManyValues, count_progress, json_option, printable, status
from draftstore.cli.sources import device_option, model_option
from draftstore.errors import needs_extra
from draftstore.hf.loading import DTYPES as MODEL_DTYPES
from draftstore.hf.loading import EXTRA, load_model
from draftstore.stores.dresd.build import DIMS, MAX_LENGTH, SAMPLE, DresdOptions, DresdProgress, build_dresd
from draftstore.stores.dresd.kernels.quantised import DTYPES
from draftstore.text.corpus import SOURCE_PATTERNS


@click.command(cls=ManyValues)
@model_option
@corpus_option
@out_option
@click.option(
    "--dims",
    type=click.IntRange(min=1),
    default=DIMS,
    show_default=True,
    help="Dimensions of a stored vector.",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default=DTYPES[0],
    show_default=True,
    help="Data type of the stored vectors.",
)
@click.option(
    "--model-dtype",
    type=click.Choice(MODEL_DTYPES),
    help="Data type of the weights. [default: auto; on CPUs float32]",
)
@device_option
@click.option(
    "--batch-tokens",
    type=click.IntRange(min=1),
    help="Number of tokens that the model reads at once; fewer take less memory. "
    "[default: 2,048 on CPUs, 16,384 on GPUs]",
)
@click.option(
    "--max-length",
    type=click.IntRange(min=2),
    default=MAX_LENGTH,
    show_default=True,
    help="Tokens in a window; longer documents are read in several windows.",
)
@click.option(
    "--sample",
    type=click.IntRange(min=2),
    default=SAMPLE,
    show_default=True,
    help="Number of hidden states that the projection is fitted to; they take disk space during the build.",
)
@name_option
@column_option
@glob_option
@strict_option
@truncated_option
@rehash_option
@overwrite_option
@json_option
def dresd(
    model: str,
    corpus: tuple[Path, ...],
    out: Path,
    dims: int,
    dtype: str,
    model_dtype: str | None,
    device: str | None,
    batch_tokens: int | None,
    max_length: int,
    sample: int,
    name: str | None,
    column: str,
    glob: tuple[str, ...],
    strict: bool,
    allow_truncated: bool,
    rehash: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Build a DReSD store: the hidden states that one model has over a corpus, and what came next.

    The best corpus is the model's own answers, see `draftstore responses`. The model reads all of it once: on a CPU
    that takes long for more than a few million tokens. A killed build goes on where it stopped when the same command
    runs again.

    \b
    Example:
      draftstore build dresd --model ./model --corpus answers.jsonl --out stores/chat-dresd
    """
    options = DresdOptions(
        corpus=corpus,
        name=name or out.name,
        column=column,
        glob=glob or SOURCE_PATTERNS,
        strict=strict,
        allow_truncated=allow_truncated,
        rehash=rehash,
        dims=dims,
        dtype=dtype,
        max_length=max_length,
        sample=sample,
    )
    options.check()
    begin = time.perf_counter()
    with needs_extra("torch", EXTRA):
        from draftstore.hf.states import ModelStates
    with status(f"loading {printable(model)}"):
        loaded = load_model(model, device=device, dtype=model_dtype)
        source = ModelStates(loaded, batch_tokens=batch_tokens)
    with dresd_bars() as progress:
        result = build_dresd(options, loaded.text, source, out, overwrite=overwrite, progress=progress)
    report_build(result, time.perf_counter() - begin, as_json)


@contextmanager
def dresd_bars() -> Iterator[DresdProgress]:
    """Show one progress bar for each step of a build, on stderr."""
    with count_progress("") as bars:
        yield DresdProgress(
            tokenized=Bar(bars, "tokenizing", "tokens").tokenized,
            sampled=Bar(bars, "sampling", "tokens").amount,
            fitted=Bar(bars, "fitting", "states").amount,
            embedded=Bar(bars, "embedding", "tokens").amount,
            grouped=Bar(bars, "grouping", "entries").amount,
            hashed=Bar(bars, "hashing", "bytes").amount,
        )
