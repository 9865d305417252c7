"""Starts that fail, wherever that is: the worker is closed, and the error is the one that the start
met.
"""

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest

from twinfer.shared import engine
from twinfer.shared.config import DeviceInfo, EngineConfig
from twinfer.shared.engine import Engine
from twinfer.shared.errors import ConfigError
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.locate import model_folder
from twinfer.shared.progress import silent

from .conftest import GREEDY_ONLY

WORKERS = {"jax": ("tpu", "JaxWorker"), "torch": ("gpu", "TorchWorker")}
PHASES = ("load", "measure", "page_bytes", "allocate_kv", "warm_up")


class Fault(Exception):
    """The device is on fire."""


def raising(error):
    def fail(*arguments, **options):
        raise error

    return fail


def start(backend, progress=silent, model=None, **options):
    small = {
        "dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16,
        "page_size": 16,
    }  # fmt: skip
    if backend == "jax":  # which compiles for seconds for each program
        small |= {"decode_sizes": (2,), "mixed_sizes": (16,)}
    config = EngineConfig(model="demo", backend=backend, device="cpu", **(small | options))
    folder = model_folder("demo")
    return Engine(config, model or load_config(folder), folder, progress, GREEDY_ONLY)


@pytest.fixture(params=WORKERS)
def backend(request):
    return request.param


@pytest.fixture
def kind(backend):
    """The class of the backend's workers."""
    room, name = WORKERS[backend]
    return getattr(import_module(f"twinfer.{room}.worker"), name)


@pytest.fixture
def closed(kind, monkeypatch):
    """The workers that were closed, and all the way."""
    found, close = [], kind.close

    def noted(worker):
        close(worker)
        found.append(worker)

    monkeypatch.setattr(kind, "close", noted)
    return found


def check_closed(closed, backend):
    """One worker, and it holds neither weights nor a cache."""
    (worker,) = closed
    assert worker._kv is None
    assert worker._module is None if backend == "torch" else not worker._weights


@pytest.mark.parametrize("what", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_that_fails_closes_the_worker(backend, kind, closed, phase, what, monkeypatch):
    error = what()
    monkeypatch.setattr(kind, phase, raising(error))
    with pytest.raises(what) as caught:
        start(backend)
    assert caught.value is error
    check_closed(closed, backend)


def test_loops_that_a_worker_does_not_run_close_it(backend, kind, closed, monkeypatch):
    monkeypatch.setattr(kind, "multi_step", False)
    with pytest.raises(ConfigError, match="decode_steps: got 2"):
        start(backend, decode_steps=2)
    check_closed(closed, backend)


def test_a_cache_without_room_closes_the_worker(backend, kind, closed, monkeypatch):
    monkeypatch.setattr(kind, "measure", lambda worker: 1)
    with pytest.raises(ConfigError, match="max_model_len: 64 tokens need"):
        start(backend)
    check_closed(closed, backend)


def test_a_length_without_room_is_refused_before_tables_of_it_are_made(
    backend, kind, closed, monkeypatch
):
    """That of Llama 4 Scout, whose rotary tables alone take gigabytes."""
    most = 10_485_760
    model = replace(load_config(model_folder("demo")), max_position_embeddings=most)
    monkeypatch.setattr(kind, "load", raising(Fault()))
    with pytest.raises(ConfigError, match=f"max_model_len: {most} tokens need 655360 pages"):
        start(backend, model=model, max_model_len=most)
    check_closed(closed, backend)


@pytest.mark.parametrize(
    ("backend", "part"),
    [
        ("jax", "Scheduler"),  # what comes later is behind what JAX takes long to compile
        ("torch", "Scheduler"),
        ("torch", "Grammars"),
        ("torch", "attach_camera"),
    ],
    indirect=["backend"],
)
def test_what_fails_around_the_worker_closes_it(backend, closed, part, monkeypatch):
    fault = Fault()
    monkeypatch.setattr(engine, part, raising(fault))
    with pytest.raises(Fault) as caught:
        start(backend, capture="kept,step=1" if part == "attach_camera" else None)
    assert caught.value is fault
    check_closed(closed, backend)


def test_an_interrupt_while_programs_are_built_closes_the_worker(backend, closed):
    """JAX's are compiled by threads."""

    def interrupted(what, done, total):
        if what.startswith("programs"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(backend, interrupted)
    check_closed(closed, backend)


def test_a_worker_that_does_not_close_either_hides_nothing(backend, kind, monkeypatch):
    fault = Fault()
    monkeypatch.setattr(kind, "load", raising(fault))
    monkeypatch.setattr(kind, "close", raising(RuntimeError("the device is gone")))
    with pytest.raises(Fault) as caught:
        start(backend)
    assert caught.value is fault


def test_programs_that_were_compiled_to_measure_go_with_the_worker(monkeypatch):
    """As on a TPU, where a start may fail between them and those that run."""
    kind = import_module("twinfer.tpu.worker").JaxWorker
    found, close = [], kind.close
    monkeypatch.setattr(kind, "measure", lambda worker: worker._built.update(a="program") or 1)
    monkeypatch.setattr(kind, "close", lambda worker: (close(worker), found.append(worker)))
    with pytest.raises(ConfigError, match="max_model_len"):
        start("jax")
    assert not found[0]._built


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("place", ["make_worker", "load"])
def test_ranks_are_closed_once(place, hidden, monkeypatch):
    """They are the worker."""
    closes = []

    def close():
        closes.append("ranks")
        if hidden:
            raise RuntimeError("a rank is gone")

    fault = Fault()
    worker = SimpleNamespace(
        changes=[], multi_step=True, page_bytes=lambda: 1, load=raising(fault), close=close
    )

    def make_worker(model, config, folder):
        worker.config = config
        return worker

    ranks = SimpleNamespace(
        device=DeviceInfo("cpu", "cpu", 1 << 40),
        make_worker=raising(fault) if place == "make_worker" else make_worker,
        close=close,
    )
    monkeypatch.setattr(engine, "start_ranks", lambda *_: ranks)
    with pytest.raises(Fault) as caught:
        start("torch", tensor_parallel_size=2)
    assert caught.value is fault
    assert closes == ["ranks"]
