"""How an engine used our drafts: counts by corpus, source and position, for Prometheus."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from draftstore.errors import EngineError, needs_extra
from draftstore.trees.tree import DraftTree

PREFIX = "draftstore_engine"


class DraftFigures:
    """Counts of an engine's steps.

    Attributes:
        engine: name of the engine.
        failures: number of texts whose drafter failed.
    """

    def __init__(self, engine: str) -> None:
        """Start from zero."""
        self.engine = engine
        self.failures = 0
        self._counts: defaultdict[tuple[str, str], Counter[tuple[str, ...]]] = defaultdict(Counter)

    def add(self, corpus: str, tree: DraftTree, path: Sequence[int]) -> None:
        """Count a step of one request."""
        self._count("steps", corpus, 1)
        self._count("drafted_tokens", corpus, len(tree))
        self._count("accepted_tokens", corpus, len(path))
        for place in range(len(path)):
            self._count("accepted_tokens_per_position", corpus, 1, str(place))

    def add_sources(self, corpus: str, counts: Mapping[tuple[str, str], int]) -> None:
        """Count the results of a request's sources in a step, see `draftstore.drafting.outcomes.counted`."""
        for (source, what), count in counts.items():
            if what in ("drafted", "matched"):
                self._count(f"source_{what}_tokens", corpus, count, source)
            else:
                self._count("source_empty_drafts", corpus, count, source, what)

    def _count(self, name: str, corpus: str, count: int, *labels: str) -> None:
        self._counts[name, corpus][labels] += count

    def total(self, name: str, corpus: str = "") -> int:
        """Return a count summed over all its labels."""
        return sum(self._counts.get((name, corpus), Counter()).values())

    def by_label(self, name: str, corpus: str = "") -> dict[str, int]:
        """Return a count by its labels: position, source, or source and reason."""
        return {" ".join(labels): count for labels, count in self._counts.get((name, corpus), {}).items()}

    def collect(self) -> Iterable[Any]:
        """Yield the counts as metrics of `prometheus_client`."""
        from prometheus_client.core import CounterMetricFamily

        for name, text, *labels in _METRICS:
            family = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=["engine", "corpus", *labels])
            for (counted, corpus), counts in list(self._counts.items()):
                for values, count in list(counts.items()) if counted == name else ():
                    family.add_metric([self.engine, corpus, *values], count)
            yield family
        failures = CounterMetricFamily(f"{PREFIX}_failures", "Texts whose drafter failed.", labels=["engine"])
        failures.add_metric([self.engine], self.failures)
        yield failures


_METRICS: tuple[tuple[str, ...], ...] = (
    ("steps", "Steps of requests."),
    ("drafted_tokens", "Draft tokens that were verified."),
    ("accepted_tokens", "Draft tokens that became part of an answer."),
    ("accepted_tokens_per_position", "Accepted draft tokens by position in the draft, from 0.", "position"),
    ("source_drafted_tokens", "Tokens of a source's own drafts, verified or not.", "source"),
    ("source_matched_tokens", "Tokens of a source's own drafts in an answer, verified or not.", "source"),
    ("source_empty_drafts", "Steps in which a source drafted nothing, by reason.", "source", "reason"),
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
