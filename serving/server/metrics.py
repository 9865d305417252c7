"""What a server tells Prometheus, under the names that vLLM uses, behind `twinfer:`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from .live import Live
from .replicas import Engines

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)


class Metrics:
    """Histograms of requests, counted as they happen, and readings of an engine's gauges.

    `engine` is set once there is one.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine: Engines | None = None
        self.registry.register(_Readings(self))
        self._first = self._seconds(
            "time_to_first_token_seconds", "from a request to its first token"
        )
        self._between = self._seconds("inter_token_latency_seconds", "between tokens of a request")
        self._per_token = self._seconds(
            "request_time_per_output_token_seconds", "mean between tokens, by request"
        )
        self._whole = self._seconds(
            "e2e_request_latency_seconds", "from a request to its last token"
        )
        self._queue = self._seconds(
            "request_queue_time_seconds", "from a request to its place in the batch"
        )
        self._prefill = self._seconds(
            "request_prefill_time_seconds", "from its place in the batch to its first token"
        )
        self._decode = self._seconds(
            "request_decode_time_seconds", "from its first token to its last"
        )
        self._inference = self._seconds(
            "request_inference_time_seconds", "from its place in the batch to its last token"
        )
        self._prompts = self._tokens("request_prompt_tokens", "tokens of a prompt")
        self._outputs = self._tokens("request_generation_tokens", "tokens of a completion")
        self._ended = self._counter(
            "request_success", "completions by why they ended", "finished_reason"
        )
        self._aborted = self._counter("requests_aborted", "requests whose client left", None)
        self._unknown = self._counter("unknown_fields", "fields of bodies that nobody knows", None)

    def _seconds(self, name: str, help: str) -> Histogram:
        return Histogram(f"twinfer:{name}", help, buckets=SECONDS, registry=self.registry)

    def _tokens(self, name: str, help: str) -> Histogram:
        return Histogram(f"twinfer:{name}", help, buckets=TOKENS, registry=self.registry)

    def _counter(self, name: str, help: str, label: str | None) -> Counter:
        labels = () if label is None else (label,)
        return Counter(f"twinfer:{name}", help, labels, registry=self.registry)

    def tokens(self, live: Live, count: int, now: float) -> None:
        """A step has brought so many tokens to a request."""
        if not count:
            return
        if live.first_token is None:
            live.first_token = now
            self._first.observe(now - live.created)
        elif live.last_token is not None:
            self._between.observe((now - live.last_token) / count)
        live.last_token = now

    def end(self, live: Live) -> None:
        """A request has ended by itself."""
        for output in live.outputs:
            self._ended.labels(output.finish_reason).inc()
            self._outputs.observe(len(output.token_ids))
        self._prompts.observe(len(live.prompt_ids))
        first, last = live.first_token, live.last_token
        if first is None or last is None:
            return
        self._whole.observe(last - live.created)
        begun = min(at for at in (*live.begun, first) if at is not None)
        self._queue.observe(begun - live.created)
        self._prefill.observe(first - begun)
        self._decode.observe(last - first)
        self._inference.observe(last - begun)
        most = max(len(output.token_ids) for output in live.outputs)
        if most > 1:
            self._per_token.observe((last - first) / (most - 1))

    def abort(self) -> None:
        """A client has left."""
        self._aborted.inc()

    def unknown_field(self, count: int) -> None:
        """So many fields of a body are known to nobody."""
        self._unknown.inc(count)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)


class _Readings(Collector):
    """What is read off an engine when somebody asks."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Any]:
        """As prometheus_client has it."""
        engine = self._metrics.engine
        if engine is None:
            return
        gauges, counters = engine.gauges, engine.counters
        for name, help, value in (
            ("num_requests_running", "requests with a row in the batch", gauges.running),
            ("num_requests_waiting", "requests in the scheduler's queue", gauges.waiting),
            ("kv_cache_usage_perc", "pages held over all pages, from 0 to 1", gauges.cache_usage),
            ("padded_share", "tokens computed for padding over all", gauges.padded_share),
            ("engine_up", "1 while the engine is heard of", float(engine.alive)),
        ):
            yield GaugeMetricFamily(f"twinfer:{name}", help, value)
        for name, help, value in (
            ("prompt_tokens", "tokens of prompts that were taken", counters.prompt_tokens),
            ("generation_tokens", "tokens that were generated", counters.generation_tokens),
            (
                "prompt_tokens_cached",
                "tokens that the prefix cache supplied",
                counters.cached_tokens,
            ),
            ("prefix_cache_queries", "tokens looked up in the prefix cache", gauges.prefix_queries),
            ("prefix_cache_hits", "tokens found there", gauges.prefix_hits),
            ("num_preemptions", "requests that gave way to others", gauges.preemptions),
            ("corrupted_requests", "requests whose logits were not finite", gauges.errors),
            ("spec_decode_num_drafts", "how often a request had guesses in a step", gauges.drafts),
            ("spec_decode_num_draft_tokens", "tokens that were guessed", gauges.draft_tokens),
            ("spec_decode_num_accepted_tokens", "guesses that were right", gauges.accepted_tokens),
            ("engine_steps", "steps that brought something", counters.steps),
            (
                "recompiles_after_ready",
                "programs compiled after the start: more than 0 is a bug",
                gauges.late_compilations,
            ),
        ):
            yield CounterMetricFamily(f"twinfer:{name}", help, value)
        rejected = CounterMetricFamily(
            "twinfer:admission_rejections", "requests refused for load", labels=["reason"]
        )
        for reason, value in counters.rejected.items():
            rejected.add_metric([reason], value)
        yield rejected
        if engine.ready is not None:
            start = GaugeMetricFamily(
                "twinfer:startup_time_seconds", "seconds of the start", labels=["phase"]
            )
            for phase, seconds in engine.ready.seconds.items():
                start.add_metric([phase], seconds)
            yield start
            about = {key: str(value) for key, value in engine.ready.model.items()}
            yield InfoMetricFamily("twinfer:cache_config", "the engine's sizes", about)
