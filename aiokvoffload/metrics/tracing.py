"""Spans of OpenTelemetry around the calls of an offloader; they join the trace of whoever calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.offloader.machine import OffloaderMachine
from aiokvoffload.specs import ReqContext

try:
    from opentelemetry import trace
except ImportError as exc:
    raise ConfigurationError("spans need the package opentelemetry-api: pip install 'aiokvoffload[otel]'") from exc

_PREFIX = "aiokvoffload."


class OpenTelemetrySpan:
    """One call as a span.

    Args:
        span: The span.
    """

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def note(self, **counts: int) -> None:
        """Add attributes."""
        self._span.set_attributes({_PREFIX + name: count for name, count in counts.items()})


class OpenTelemetryTracing:
    """Makes a span of each call, `aiokvoffload.load` and so on, a child of the caller's current span.

    Args:
        tracer_provider: Where the spans go; by default the global one.
    """

    def __init__(self, tracer_provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("aiokvoffload", tracer_provider=tracer_provider)

    @contextmanager
    def span(self, name: str, block_count: int, ctx: ReqContext | None) -> Iterator[OpenTelemetrySpan]:
        """Return the span of a call; an error is recorded in it, and a cancellation as an attribute."""
        attributes: dict[str, str | int] = {_PREFIX + "blocks": block_count}
        if ctx is not None and ctx.req_id:
            attributes[_PREFIX + "request_id"] = ctx.req_id
        with self._tracer.start_as_current_span(_PREFIX + name, attributes=attributes) as span:
            try:
                yield OpenTelemetrySpan(span)
            except BaseException as exc:
                if not isinstance(exc, Exception):
                    span.set_attribute(_PREFIX + "is_cancelled", True)
                raise


def trace_calls(offloader: OffloaderMachine, tracer_provider: trace.TracerProvider | None = None) -> None:
    """Make spans of the calls of an offloader from now on."""
    offloader.tracing = OpenTelemetryTracing(tracer_provider)
