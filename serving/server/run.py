"""`twinfer serve`: starts the engine's process and the HTTP server, and ends both in order.

Exit codes: 0 after a signal, 1 the start failed, 2 wrong input, 70 the engine failed or hung, 71 it
ran out of memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import uvicorn

from ...shared.chat import check_variables
from ...shared.config import EngineConfig
from ...shared.errors import ConfigError, RequestError
from ...shared.generation_config import default_params
from ...shared.models.config_json import load_config
from ...shared.models.locate import model_folder
from ...shared.models.shapes import check_weights
from ...shared.progress import Progress, silent
from ...shared.tokenizer import Tokenizer
from ..conversations import read_template
from ..flags import engine_options
from ..formats.detect import detect_format
from ..formats.marks import missing_marks
from ..formats.table import FORMATS, Format, find_format
from ..progress import StartBar
from ..serve_flags import KEY_VARIABLE
from .admin import build_admin
from .app import build_app
from .cors import cors_options
from .doors import Load
from .engine import EngineProcess, Limits
from .http import BoundedHttp
from .logs import configure_logging
from .metrics import Metrics
from .replicas import Engines, Replicas, devices_of_replicas
from .server import Settings
from .sockets import bind_admin_socket, bind_socket
from .traces import Traces

LOG = logging.getLogger("twinfer.server")
STATUS_S = 10.0
OTHER_KEY_VARIABLE = "VLLM_API_KEY"
"""Whoever has set it expects that nobody enters without it."""


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers: what a signal means is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves them alone."""
        yield


def run(arguments: argparse.Namespace) -> int:
    """`twinfer serve`. Raises ConfigError, ModelError."""
    options = engine_options(arguments)
    config = EngineConfig.from_options(
        {"model": arguments.model, "backend": arguments.backend, **options}
    )
    check_weights(config.model, config.load_format)
    template = read_template(arguments.chat_template)
    folder = model_folder(config.model)
    model = load_config(folder)  # what cannot be served is said before a process is started
    defaults, changes = default_params(
        folder, arguments.generation_config, arguments.override_generation_config
    )
    try:
        variables = check_variables(arguments.default_chat_template_kwargs)
    except RequestError as error:
        raise ConfigError(f"default-chat-template-kwargs: {error.reason}") from None
    configure_logging(arguments.log_format, verbose=arguments.verbose)
    for change in changes if arguments.verbose else ():
        LOG.info("%s", change)
    names = arguments.served_model_name or [arguments.model]
    named = os.environ.get(KEY_VARIABLE)
    keys = arguments.api_key or ([] if named is None else [named])
    if any(not key for key in keys):
        # A secret that is empty by mistake would let everybody in.
        raise ConfigError(
            f"api-key, {KEY_VARIABLE}: got an empty one; where both are left out, all may enter"
        )
    if not all(key.isascii() and key.isprintable() and key == key.strip() for key in keys):
        # Such as the end of a line from a file of a secret: every call would get 401.
        raise ConfigError(
            f"api-key, {KEY_VARIABLE}: got one that no client can send; allowed are characters of "
            "printable ASCII, with no space at the ends"
        )
    if not keys and os.environ.get(OTHER_KEY_VARIABLE):
        LOG.warning("%s is not read, so all may enter; %s is", OTHER_KEY_VARIABLE, KEY_VARIABLE)
    if (arguments.ssl_keyfile is None) != (arguments.ssl_certfile is None):
        raise ConfigError("ssl-keyfile, ssl-certfile: both are needed, or none")
    _allow_connections()
    tokenizer = Tokenizer.load(folder)
    form = _format(arguments.tool_call_parser, tokenizer, template)
    settings = Settings(
        names,
        tokenizer,
        defaults,
        form,
        template,
        variables,
        keys,
        arguments.max_body_size,
        draw_seeds=not arguments.fixed_seed,
        page=arguments.page,
        log_requests=arguments.log_requests,
        bounds_answers=any(change.field == "max_tokens" for change in changes),
        stream_interval=arguments.stream_interval,
        load=Load() if arguments.enable_server_load_tracking else None,
        cors=cors_options(arguments),
        end_token_ids=_ends(form, tokenizer, model.eos_token_ids),
    )
    with contextlib.ExitStack() as held:
        if arguments.otlp_traces_endpoint is not None:
            settings.traces = held.enter_context(Traces(arguments.otlp_traces_endpoint))
        door = held.enter_context(bind_socket(arguments.host, arguments.port, arguments.uds))
        admin = None
        if arguments.uds:
            held.callback(Path(arguments.uds).unlink, missing_ok=True)
        if arguments.admin_uds:
            admin = held.enter_context(bind_admin_socket(arguments.admin_uds))
            held.callback(Path(arguments.admin_uds).unlink, missing_ok=True)
        runner = held.enter_context(asyncio.Runner(loop_factory=_new_loop()))
        return runner.run(_serve(arguments, config.model, options, settings, door, admin))


def _allow_connections() -> None:
    """As many open files as the system lets this process have; shells give it few of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _new_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's, where it is installed: a streamed token takes a fifth less."""
    try:
        new: Callable[[], asyncio.AbstractEventLoop] = import_module("uvloop").new_event_loop
        return new
    except ModuleNotFoundError:
        return asyncio.new_event_loop


def _format(name: str, tokenizer: Tokenizer | None, template: str | None) -> Format:
    if tokenizer is None or name == "none":
        return FORMATS["none"]
    if name == "auto":
        return detect_format(tokenizer, template)
    form = find_format(name)
    if missing := missing_marks(form, tokenizer):
        raise ConfigError(
            f"tool-call-parser: got {name}, but {missing[0]} is no special token of this model"
        )
    return form


def _ends(form: Format, tokenizer: Tokenizer | None, known: Sequence[int]) -> tuple[int, ...]:
    """The tokens that end an answer in a format, but for those that the model's config knows."""
    if form.messages is None or tokenizer is None:
        return ()
    ids = (tokenizer.token_id(mark) for mark in form.messages.stops)
    return tuple(token for token in ids if token is not None and token not in known)


async def _serve(
    arguments: argparse.Namespace,
    model: str,
    options: dict[str, Any],
    settings: Settings,
    door: socket.socket,
    admin: socket.socket | None,
) -> int:
    metrics = Metrics()
    with StartBar("starting", shown=True) as bar:
        options = {"model": model, "backend": arguments.backend, **options}
        engine = _make_engines(arguments, options, settings.tokenizer, metrics, bar.update)
        metrics.engine = engine
        signals = _Signals()
        http = _Uvicorn(_http_config(arguments, build_app(settings, engine, metrics)))
        doors = [(http, door)]
        if admin is not None:
            routes = build_admin(engine, signals.first.set)
            doors.append((_Uvicorn(_http_config(arguments, routes, public=False)), admin))
        engine.start()
        tasks = [asyncio.create_task(one.serve([at])) for one, at in doors]
        serving = tasks[0]
        try:
            await _first(engine.started, engine.ended, signals.first, serving)
        except BaseException:
            await engine.close()
            raise
    # What is here now stays: no search for garbage has to go through it again.
    gc.collect()
    gc.freeze()
    status = asyncio.create_task(_tell_status(engine))
    try:
        if engine.ready is not None and not signals.first.is_set():
            _tell_start(engine, arguments, door)
            await _first(engine.ended, signals.first, serving)
        if signals.first.is_set() and engine.ready is not None and engine.exit_code is None:
            await _drain(engine, signals, arguments.drain_timeout)
    finally:
        status.cancel()
        code = engine.exit_code
        if code is not None:
            LOG.error("%s", engine.why)
            await asyncio.sleep(0.2)  # streams get their error event
        await engine.close()
        for one, _ in doors:
            one.should_exit = True
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
    return code or 0


def _make_engines(
    arguments: argparse.Namespace,
    options: dict[str, Any],
    tokenizer: Tokenizer | None,
    metrics: Metrics,
    progress: Progress,
) -> Engines:
    """The engine, or the replicas with the devices of each; the first one's start is shown."""
    count = arguments.data_parallel_size
    environments: list[dict[str, str]] = [{}]
    if count > 1:
        environments = devices_of_replicas(
            count, options.get("tensor_parallel_size", 1), options.get("device", "auto")
        )
    engines = [
        EngineProcess(
            options,
            tokenizer,
            limits=Limits(arguments.max_num_queued_reqs, arguments.max_num_queued_tokens),
            hang_s=arguments.hang_timeout,
            progress=silent if number else progress,
            on_tokens=metrics.tokens,
            on_end=metrics.end,
            log_format=arguments.log_format,
            environment=environment,
        )
        for number, environment in enumerate(environments)
    ]
    return engines[0] if len(engines) == 1 else Replicas(engines)


def _http_config(arguments: argparse.Namespace, app: Any, *, public: bool = True) -> uvicorn.Config:
    """Raises ConfigError for a certificate that cannot be read."""
    config = uvicorn.Config(
        app,
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=arguments.access_log,
        ssl_keyfile=arguments.ssl_keyfile if public else None,
        ssl_certfile=arguments.ssl_certfile if public else None,
        root_path=arguments.root_path if public else "",
        timeout_keep_alive=60,
        timeout_graceful_shutdown=5,
        server_header=False,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one too
        raise ConfigError(f"ssl-certfile, ssl-keyfile: {error}") from None
    return config


class _Signals:
    """SIGINT and SIGTERM: the first asks to drain, the second not to wait for it."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._take)

    def _take(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _first(*what: asyncio.Event | asyncio.Task[Any]) -> None:
    """Wait until one of several things has happened."""
    tasks = [
        asyncio.create_task(one.wait()) if isinstance(one, asyncio.Event) else one for one in what
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, one in zip(tasks, what, strict=True):
            if isinstance(one, asyncio.Event):
                task.cancel()


async def _drain(engine: Engines, signals: _Signals, seconds: float) -> None:
    """Take no more requests and let those that are there end."""
    engine.draining = True
    LOG.info("going down: %d requests have up to %.0f s", engine.num_live, seconds)
    end = time.monotonic() + seconds
    while engine.num_live and time.monotonic() < end and engine.exit_code is None:
        if signals.second.is_set():
            break
        await asyncio.sleep(0.05)


def _tell_start(engine: Engines, arguments: argparse.Namespace, door: socket.socket) -> None:
    ready = engine.ready
    if ready is None:
        return
    if arguments.verbose:
        for line in ready.report:
            LOG.info("%s", line)
    phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in ready.seconds.items())
    model = ready.model
    LOG.info(
        "%s on %s %s, %s", model["backend"], model["platform"], model["device"], model["dtype"]
    )
    LOG.info(
        "%s; %d programs; KV cache for %d tokens", phases, ready.programs, model["cached_tokens"]
    )
    kind = "https" if arguments.ssl_certfile else "http"
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    where = arguments.uds or f"{kind}://{host}:{door.getsockname()[1]}"
    LOG.info("ready: %s", where)


async def _tell_status(engine: Engines) -> None:
    """A line every ten seconds while there is something to say."""
    generated, prompted, last = 0, 0, time.monotonic()
    while True:
        await asyncio.sleep(STATUS_S)
        now, counters, gauges = time.monotonic(), engine.counters, engine.gauges
        out = (counters.generation_tokens - generated) / (now - last)
        into = (counters.prompt_tokens - prompted) / (now - last)
        generated, prompted, last = counters.generation_tokens, counters.prompt_tokens, now
        if not (out or into or engine.num_live):
            continue
        found = gauges.prefix_hits / max(1, gauges.prefix_queries)
        LOG.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
            "Running: %d reqs, Waiting: %d reqs, KV cache usage: %.1f%%, "
            "Prefix cache hit rate: %.1f%%",
            into, out, gauges.running, gauges.waiting, 100 * gauges.cache_usage, 100 * found,
        )  # fmt: skip
