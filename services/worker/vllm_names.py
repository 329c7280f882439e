"""The worker's metrics once more, under vLLM's names, which dashboards know.

vllm:spec_decode_num_drafts_total{model_name="small"} 12
"""

from collections.abc import Iterable, Mapping

from prometheus_client import Metric
from prometheus_client.registry import Collector

PREFIX = "vllm:"


class VllmNames(Collector):
    """Repeats metrics under other names, with the name of the model as a label.

    Attributes:
        model: name of the model; nothing is repeated before it is known.
    """

    def __init__(self, own: Mapping[str, Collector]) -> None:
        """Repeat metrics.

        Args:
            own: metrics by vLLM's names, without prefix and endings.
        """
        self.model: str | None = None
        self._own = own

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics with their present values."""
        if self.model is None:
            return
        for name, collector in self._own.items():
            for own in collector.collect():
                metric = Metric(PREFIX + name, own.documentation, own.type)
                for sample in own.samples:
                    renamed = metric.name + sample.name.removeprefix(own.name)
                    labels = {"model_name": self.model, **sample.labels}
                    metric.samples.append(sample._replace(name=renamed, labels=labels))
                yield metric
