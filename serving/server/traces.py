"""Spans of calls for OpenTelemetry: how long each waited, read its prompt and wrote its answer.

They are made at the end of a call, of the times that were kept, so that nothing is paid for while
tokens come. No span holds a prompt or an output.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import MutableMapping, Sequence
from typing import Any

from ... import __version__
from ...shared.errors import ConfigError
from ...shared.models.fields import show
from .live import Live

FLAG = "otlp-traces-endpoint"
PARENTS = ("traceparent", "tracestate")
"""Headers that say which trace a call belongs to (W3C Trace Context)."""
LAST_S = 2
"""How long the last spans may take on their way when the server ends."""


class Traces:
    """Sends spans to `endpoint`, a URL of OTLP over HTTP. Raises ConfigError where the extra is
    missing or the URL is none.
    """

    def __init__(self, endpoint: str) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"{FLAG}: got {show(endpoint)}, allowed is a URL of http or https")
        try:
            from opentelemetry import propagate, trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"{FLAG}: needs opentelemetry ({error}): pip install 'twinfer[traces]'"
            ) from None
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        named = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "twinfer")}
        self._spans = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=LAST_S))
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(self._spans)
        self._tracer = self._provider.get_tracer("twinfer", __version__)
        self._trace, self._extract = trace, propagate.extract

    def __enter__(self) -> Traces:
        return self

    def __exit__(self, *error: object) -> None:
        self._provider.shutdown()

    def call(
        self, scope: MutableMapping[str, Any], status: int, lives: Sequence[Live], start: float
    ) -> None:
        """Tell of a call that has ended. `start` is of the monotonic clock, in seconds."""
        end = time.monotonic()
        epoch = time.time() - end
        headers = {key.decode("latin-1"): value for key, value in scope["headers"]}
        parents = {name: headers[name].decode("latin-1") for name in PARENTS if name in headers}
        trace, outputs = self._trace, [output for live in lives for output in live.outputs]
        span = self._tracer.start_span(
            f"POST {scope['path']}" if lives else "POST",
            self._extract(parents),
            trace.SpanKind.SERVER,
            {
                "http.request.method": "POST",
                "url.path": scope["path"],
                "http.response.status_code": status,
                "twinfer.request_id": scope["twinfer.name"],
                "gen_ai.usage.input_tokens": sum(len(live.prompt_ids) for live in lives),
                "gen_ai.usage.output_tokens": sum(len(output.token_ids) for output in outputs),
            },
            start_time=_ns(epoch + start),
        )
        if status >= 500 or any(live.error is not None for live in lives):
            span.set_status(trace.StatusCode.ERROR)
        within = trace.set_span_in_context(span)
        for live in lives:
            for index, output in enumerate(live.outputs):
                marks: dict[str, Any] = {
                    "twinfer.completion": index,
                    "gen_ai.response.finish_reasons": [output.finish_reason or "abort"],
                }
                for name, first, last in _phases(live, index, end):
                    part = self._tracer.start_span(
                        name, within, attributes=marks, start_time=_ns(epoch + first)
                    )
                    part.end(_ns(epoch + last))
        span.end(_ns(epoch + end))


def _phases(live: Live, index: int, end: float) -> list[tuple[str, float, float]]:
    """The phases of a completion that it has reached, with their times."""
    begun = live.begun[index]
    if begun is None:
        return [("queue", live.created, end)]
    found = [("queue", live.created, begun)]
    first = live.first_token
    if first is None or not live.outputs[index].token_ids:
        return [*found, ("prefill", begun, end)]
    first = max(first, begun)
    return [*found, ("prefill", begun, first), ("decode", first, live.last_token or end)]


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
