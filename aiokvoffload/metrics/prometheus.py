"""A Prometheus collector that reads `offloader.statistics()` at the moment of the scrape, so nothing counts twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.metrics.catalogue import METRICS
from aiokvoffload.metrics.metric import Metric
from aiokvoffload.offloader.machine import OffloaderMachine

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as exc:
    raise ConfigurationError(
        "metrics for Prometheus need the package prometheus-client: pip install 'aiokvoffload[prometheus]'"
    ) from exc

Family = CounterMetricFamily | GaugeMetricFamily
SCRAPE_SECONDS = 1.0
_OFFLOADER_LABEL = "offloader"


class OffloaderCollector(Collector):
    """Reports all metrics of the offloaders that it is given, each under a label `offloader`.

    Scraped in the thread that owns an offloader, it reads the numbers of this moment. In another thread, such as that
    of `prometheus_client.start_http_server`, it asks the owner, who takes them at its next poll; one that does not poll
    in time leaves those it took last, and `aiokvoffload_statistics_age_seconds` says how old they are.

    Args:
        offloaders: By the name that tells them apart.
        timeout_seconds: How long a scrape waits for all owners together.
    """

    def __init__(
        self, offloaders: Mapping[str, OffloaderMachine] | None = None, *, timeout_seconds: float = SCRAPE_SECONDS
    ) -> None:
        self._offloaders = dict(offloaders or {})
        self._timeout_seconds = timeout_seconds

    def add(self, name: str, offloader: OffloaderMachine) -> None:
        """Report one more offloader.

        Raises:
            ConfigurationError: Another one has that name.
        """
        if name in self._offloaders:
            raise ConfigurationError(f"an offloader is reported as {name!r} already; give each a name of its own")
        self._offloaders[name] = offloader

    def remove(self, name: str) -> None:
        """Report an offloader no longer; one that is closed reports its last numbers until then."""
        self._offloaders.pop(name, None)

    def describe(self) -> Iterator[Family]:
        """Return the metrics without numbers, for a registry that looks for names given twice."""
        return map(_family, METRICS)

    def collect(self) -> Iterator[Family]:
        """Return the metrics.

        Raises:
            WrongThreadError: The process was forked after an offloader was opened.
        """
        offloaders = dict(self._offloaders)
        seconds = self._timeout_seconds / max(1, len(offloaders))
        snapshots = {name: each.read_statistics(timeout_seconds=seconds) for name, each in offloaders.items()}
        for metric in METRICS:
            family = _family(metric)
            for name, snapshot in snapshots.items():
                for labels, value in metric.read(snapshot):
                    family.add_metric((name, *labels), float(value))
            yield family


def _family(metric: Metric) -> Family:
    family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return family(metric.name, metric.help, labels=(_OFFLOADER_LABEL, *metric.labels))
