"""How an engine used our drafts: counts by corpus, source and position, for Prometheus."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.outcomes import NOT_WANTED
from draftstore.drafting.slots import Slots, enlarged
from draftstore.engines.load import Load
from draftstore.engines.texts import CORPUS, DRAFTS, Texts
from draftstore.errors import EngineError, needs_extra
from draftstore.jit import kernel

PREFIX = "draftstore_engine"
Counts = dict[tuple[str, ...], int]


class DraftFigures:
    """Counts of an engine's steps.

    Attributes:
        engine: name of the engine.
        failures: number of texts whose drafter failed.
        strangers: number of texts of an unknown corpus.
        steps: int64 [corpora, 3 + nodes], steps, drafted and accepted tokens, and those by position.
        sources: int64 [corpora, sources, 2 + reasons], drafted and matched tokens, and empty drafts by reason.
        load: what was learned of passes; None with fixed budgets.
    """

    def __init__(self, engine: str, corpora: Sequence[str] = ("",), nodes: int = 0) -> None:
        """Start from zero, for drafts of at most `nodes` nodes."""
        self.engine, self.corpora = engine, [*corpora]
        self.failures = self.strangers = 0
        self.load: Load | None = None
        self.steps = np.zeros((len(self.corpora), 3 + nodes), np.int64)
        self.sources = np.zeros((len(self.corpora), 0, 2), np.int64)
        self._labels: list[str] = []
        self._reasons: list[str] = []

    def places(self, labels: Sequence[str]) -> list[int]:
        """Return the numbers of sources by their labels."""
        self._labels += [label for label in dict.fromkeys(labels) if label not in self._labels]
        return [self._labels.index(label) for label in labels]

    def count_sources(
        self, slots: Slots, texts: Texts, labels: NDArray[np.int64], learned: NDArray[np.int64]
    ) -> None:
        """Count the results of the last step.

        Args:
            slots: the results.
            texts: the texts.
            labels: int64 [slots, sources], the numbers of each text's sources, and -1 behind them.
            learned: int64 [any], the texts whose results are known.
        """
        if self.sources.shape[1:] != (len(self._labels), 3 + len(slots.reason_names)):
            self._reasons = [NOT_WANTED.reason, *slots.reason_names]
            self.sources = enlarged(self.sources, 1, len(self._labels), 2 + len(self._reasons))
        _count_sources(
            self.sources, labels, texts.state, slots.wanted, slots.drafted, slots.matched, slots.reasons, learned
        )  # fmt: skip

    def _read(self, name: str, corpus: int) -> Counts:
        steps, sources = self.steps[corpus].tolist(), self.sources[corpus].tolist()
        if name == "accepted_tokens_per_position":
            return {(str(place),): count for place, count in enumerate(steps[3:]) if count}
        if name in _STEPS:
            return {(): steps[_STEPS.index(name)]} if steps[0] else {}
        rows = [(label, row) for label, row in zip(self._labels, sources, strict=False) if any(row)]
        if name in _SOURCES:
            return {(label,): row[_SOURCES.index(name)] for label, row in rows}
        reasons = {
            (label, why): count for label, row in rows for why, count in zip(self._reasons, row[2:], strict=False)
        } | {("", "unknown_corpus"): 0 if corpus else self.strangers}  # fmt: skip
        return {labels: count for labels, count in reasons.items() if count}

    def total(self, name: str, corpus: str = "") -> int:
        """Return a count summed over all its labels."""
        return sum(self._read(name, self.corpora.index(corpus)).values())

    def by_label(self, name: str, corpus: str = "") -> dict[str, int]:
        """Return a count by its labels: position, source, or source and reason."""
        found = self._read(name, self.corpora.index(corpus))
        return {" ".join(labels): count for labels, count in found.items()}

    def collect(self) -> Iterable[Any]:
        """Yield the counts as metrics of `prometheus_client`."""
        from prometheus_client.core import CounterMetricFamily

        for name, text, *labels in _METRICS:
            family = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=["engine", "corpus", *labels])
            for place, corpus in enumerate(self.corpora):
                for values, count in self._read(name, place).items():
                    family.add_metric([self.engine, corpus, *values], count)
            yield family
        failures = CounterMetricFamily(f"{PREFIX}_failures", "Texts whose drafter failed.", labels=["engine"])
        failures.add_metric([self.engine], self.failures)
        yield failures
        if self.load is not None:
            yield from self._collect_load(self.load)

    def _collect_load(self, load: Load) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for (name, text), count in zip(_LOAD, [*load.passes, *load.estimate], strict=True):
            family = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=["engine"])
            family.add_metric([self.engine], count)
            yield family
        costs = GaugeMetricFamily(
            f"{PREFIX}_pass_seconds", "Learned time of a pass.", labels=["engine", "texts", "rows"]
        )
        for texts, rows, seconds in load.costs.table():
            costs.add_metric([self.engine, str(texts), str(rows)], seconds)
        yield costs


@kernel
def _count_sources(counts, labels, state, wanted, drafted, matched, reasons, learned):
    for slot in learned:
        for source in range(labels.shape[1] if state[DRAFTS, slot] > 0 else 0):
            if labels[slot, source] < 0:
                break
            row = counts[state[CORPUS, slot], labels[slot, source]]
            if not wanted[slot]:
                row[2] += 1
            else:
                row[0] += drafted[slot, source]
                row[1] += matched[slot, source]
                if drafted[slot, source] == 0:
                    row[3 + reasons[slot, source]] += 1


_STEPS = ("steps", "drafted_tokens", "accepted_tokens")
_SOURCES = ("source_drafted_tokens", "source_matched_tokens")
_METRICS: tuple[tuple[str, ...], ...] = (
    ("steps", "Steps of requests."),
    ("drafted_tokens", "Draft tokens that were verified."),
    ("accepted_tokens", "Draft tokens that became part of an answer."),
    ("accepted_tokens_per_position", "Accepted draft tokens by position in the draft, from 0.", "position"),
    ("source_drafted_tokens", "Tokens of a source's own drafts, verified or not.", "source"),
    ("source_matched_tokens", "Tokens of a source's own drafts in an answer, verified or not.", "source"),
    ("source_empty_drafts", "Steps in which a source drafted nothing, by reason.", "source", "reason"),
)
_LOAD = (
    ("passes", "Steps of the engine with requests."),
    ("passes_without_drafts", "Steps of the engine without a drafted token to verify."),
    ("plain_seconds", "Estimated time of measured passes if their tokens had been decoded without drafts."),
    ("drafted_seconds", "Estimated time of the same passes as they were, with the time to draft."),
)


def serve_metrics(figures: DraftFigures, address: str) -> int:
    """Serve metrics in the text format of Prometheus; return the port."""
    with needs_extra("prometheus-client", "services"):
        from prometheus_client import CollectorRegistry, start_http_server
    host, _, digits = address.rpartition(":")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(figures)
    try:
        server, _ = start_http_server(int(digits), host.strip("[]") or "127.0.0.1", registry)
    except (OSError, ValueError, OverflowError) as error:
        raise EngineError(f"no metrics at {address!r} ({error}): expected HOST:PORT or a free port") from None
    return int(server.server_port)
