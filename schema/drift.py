"""Drift: what decoders accept of a release's drafts now, beside what its recordings said when it was published.

Recordings are some outputs, and traffic is others: their accepted lengths differ from the start. So a warning takes a
fall of more than the small share that the gate allows (`schema.recordings.TOLERANCE`).
"""

from typing import NamedTuple
from urllib.error import URLError
from urllib.request import Request, urlopen

from sqlalchemy.orm import Session

from draftstore.errors import DraftstoreError
from schema.builds import CatalogueError
from schema.releases import get_release, last_lengths

FALL = 0.2
"""Default share of the recorded accepted length that traffic may lack."""
PATIENCE = 10.0
"""Seconds to wait for metrics."""
WORKER = "draftstore_decoding_accepted_length"
ENGINE_STEPS, ENGINE_ACCEPTED = "draftstore_engine_steps_total", "draftstore_engine_accepted_tokens_total"


class DriftError(DraftstoreError):
    """Decoders accept less of a release's drafts than was measured when it was published."""

    exit_code = 5


class Seen(NamedTuple):
    """What metrics tell of accepted lengths: the sum of `number` of them, of requests or of passes."""

    total: float
    number: float

    def since(self, before: "Seen") -> "Seen":
        """Return what came after an earlier reading; all, if the process has started again since."""
        if self.number < before.number:
            return self
        return Seen(self.total - before.total, self.number - before.number)

    @property
    def accepted_length(self) -> float | None:
        """Mean accepted length; None without any."""
        return self.total / self.number if self.number else None


def recorded_length(session: Session, release: str, recording: str | None = None) -> tuple[str, float]:
    """Return a recording and its accepted length when a release last moved: the named one, or the one of the lowest.

    Raises:
        CatalogueError: no such release, or nothing was replayed then.
    """
    lengths = last_lengths(session, release, get_release(session, release).build_id)
    if recording is not None:
        lengths = {name: length for name, length in lengths.items() if name == recording}
    if not lengths:
        which = f"the recording {recording!r}" if recording else "no recording"
        raise CatalogueError(
            f"{which} was {'not ' * bool(recording)}replayed when {release} was published: register one with "
            "`draftstore replays add`, and publish the next build"
        )
    return min(lengths.items(), key=lambda item: item[1])


def read_metrics(url: str, token: str | None = None) -> str:
    """Return the metrics of a worker or an engine, in the text format of Prometheus.

    Raises:
        DraftstoreError: no address of the web, or no answer.
    """
    if not url.startswith(("http://", "https://")):
        raise DraftstoreError(f"{url!r} is no address of metrics: expected http://HOST:PORT/metrics")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urlopen(Request(url, headers=headers), timeout=PATIENCE) as answer:  # noqa: S310 - checked above
            return str(answer.read().decode(errors="replace"))
    except (URLError, OSError, ValueError) as error:
        raise DraftstoreError(f"no metrics from {url} ({error}): see whether it runs") from None


def seen_in(text: str, release: str) -> Seen:
    """Return what metrics tell of a release: of a worker by its label, of an engine all that it drafted.

    Raises:
        DraftstoreError: these are no metrics, or those of something that does not decode.
    """
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.labels.get("release", release) == release:
                    sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
                else:
                    sums.setdefault(sample.name, 0.0)
    except ValueError as error:
        raise DraftstoreError(f"these are no metrics in the text format of Prometheus: {error}") from None
    if f"{WORKER}_count" in sums:
        return Seen(sums[f"{WORKER}_sum"], sums[f"{WORKER}_count"])
    if ENGINE_STEPS in sums:
        steps = sums[ENGINE_STEPS]
        return Seen(steps + sums.get(ENGINE_ACCEPTED, 0.0), steps)
    if f"# TYPE {WORKER} " in text or f"# HELP {ENGINE_STEPS}" in text:
        return Seen(0.0, 0.0)  # nothing was decoded yet
    raise DraftstoreError(
        "these metrics tell no accepted length: name those of `draftstore worker` or of an engine"
    )
