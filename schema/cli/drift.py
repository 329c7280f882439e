"""`draftstore releases drift`: whether drafts are still accepted as they were when a release was published."""

import time
from collections.abc import Iterator, Sequence

import click
from rich.table import Table

from draftstore.cli.common import json_option, print_json, printable, status, stdout_console
from draftstore.cli.sources import TOKEN_VARIABLE
from schema.cli.common import catalogue_session
from schema.drift import FALL, DriftError, read_metrics, recorded_length, seen_in


@click.command()
@click.argument("name")
@click.option(
    "--m", "given", type=click.FloatRange(min=0), metavar="M", help="Accepted length that was seen."
)
@click.option(
    "--metrics",
    "urls",
    multiple=True,
    metavar="URL",
    help="Read it from the metrics of a decoding worker or an engine; may be repeated.",
)
@click.option(
    "--over",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Read metrics twice, so long apart, and take what came between. [default: since the process started]",
)
@click.option(
    "--recording", metavar="R", help="Compare with this recording. [default: the one of the lowest M]"
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1, max_open=True),
    default=FALL,
    show_default=True,
    metavar="SHARE",
    help="Warn if the accepted length is more than this share below the recorded one.",
)
@click.option(
    "--token", envvar=TOKEN_VARIABLE, show_envvar=True, metavar="TOKEN", help="Bearer token for the metrics."
)
@json_option
def drift(
    name: str,
    given: float | None,
    urls: tuple[str, ...],
    over: float,
    recording: str | None,
    tolerance: float,
    token: str | None,
    as_json: bool,
) -> None:
    """Compare what decoders accept of a release's drafts with what was recorded when it was published.

    Ends with status 5 if the accepted length is too far below. A worker tells it by release, an engine over all that it
    drafted. Run it every hour, or after a release moved.

    \b
    Examples:
      draftstore releases drift chat-vicuna --metrics http://127.0.0.1:8000/metrics --over 600
      draftstore releases drift chat-vicuna --m 1.9 --tolerance 0.1
    """
    if (given is None) == (not urls):
        raise click.UsageError("Give either --m with an accepted length, or --metrics with addresses.")
    with catalogue_session() as session:
        recorded, expected = recorded_length(session, name, recording)
    seen = [("given", given)] if given is not None else list(_seen(urls, name, over, token))
    least = (1 - tolerance) * expected
    low = [(source, length) for source, length in seen if length is not None and length < least]
    if as_json:
        rows = [{"source": source, "accepted_length": length} for source, length in seen]
        base = {"release": name, "recording": recorded, "recorded": expected, "least": least}
        print_json(base | {"seen": rows, "drifted": bool(low)})
    else:
        table = Table("source", "accepted length")
        table.add_row(f"recorded: {printable(recorded)}", f"{expected:.3f}")
        for source, length in seen:
            table.add_row(printable(source), "nothing decoded" if length is None else f"{length:.3f}")
        stdout_console().print(table)
    if low:
        source, length = min(low, key=lambda each: each[1])
        raise DriftError(
            f"drafts of {name} have an accepted length of {length:.2f} ({source}), more than {tolerance:.0%} below the "
            f"{expected:.2f} of {recorded}: build a store from newer text, or `draftstore releases rollback {name}`"
        )


def _seen(
    urls: Sequence[str], release: str, over: float, token: str | None
) -> Iterator[tuple[str, float | None]]:
    """Yield the addresses with the accepted length that each tells.

    Raises:
        DraftstoreError: one does not answer, or tells none.
    """
    before = {url: seen_in(read_metrics(url, token), release) for url in urls}
    if over:
        with status(f"waiting {over:g} seconds"):
            time.sleep(over)
    for url, earlier in before.items():
        now = seen_in(read_metrics(url, token), release).since(earlier) if over else earlier
        yield url, now.accepted_length
