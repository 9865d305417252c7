"""The worker protocol: what runs steps on a device. `tpu/` and `gpu/` implement it; nothing here
knows a framework.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np

from ..bucketing import Table
from ..ops import Plans
from .config import BACKENDS, Change, DeviceInfo, ResolvedConfig, host_memory
from .errors import BackendUnavailable, ConfigError
from .models.caches import CacheLayout
from .models.config import ModelConfig
from .models.decoder import parameters_of
from .models.table import weight_bytes
from .progress import Progress, silent
from .step import StepInput, StepOutput
from .weights import check_memory

HOST_MEMORY_FOR_KV = 1 << 30
"""Bytes of KV cache on a CPU unless the user says otherwise: a host's memory belongs to others
too.
"""


RANK_MEMORY = 200 << 20
"""Bytes of host memory that a rank takes at least: four of the bundled model had 212 MiB each, what
they share counted once.
"""


def kv_page_bytes(layout: CacheLayout, itemsize: int) -> int:
    """Bytes of one KV page over all layers of a group, for entries of `itemsize` bytes."""
    return layout.stripe * layout.page_entries * itemsize


MOST_PAGES = 1 << 20
"""Pages of a cache unless the user says otherwise. With more, the host's own books of them would
take a gigabyte.
"""


def cache_pages(config: ResolvedConfig, room: int, page: int, per_request: int) -> int:
    """Pages of `page` bytes that the KV cache takes of `room` bytes unless the user says otherwise.
    A request holds at most `per_request` pages.

    All that there are: what requests do not use holds prefixes. Without a prefix cache, and on a
    CPU, whose memory belongs to others too, at most what all requests can use. Where programs are
    stored, `room` is that of their cache.
    """
    if config.aot_folder is not None:
        return max(0, room // page)
    pages = min(room // page, MOST_PAGES)
    if config.platform == "cpu" or not config.enable_prefix_caching:
        pages = min(pages, config.max_num_seqs * per_request)
    return max(0, pages)


def most_room(model: ModelConfig, config: ResolvedConfig, device: DeviceInfo) -> int | None:
    """Bytes that the KV cache may have on each device at most, as far as they are known before
    anything is loaded: what the engine may take, but for the weights. None where JAX cannot say how
    much memory a device has.
    """
    if device.platform == "cpu":
        return HOST_MEMORY_FOR_KV
    if not device.memory:
        return None
    weights = weight_bytes(parameters_of(model), 4 if config.dtype == "float32" else 2)
    # A device has its share at least: what is not dealt out lies on each.
    share = weights // config.tensor_parallel_size
    return int(device.memory * config.memory_utilization) - share


def step_temporaries(model: ModelConfig, config: ResolvedConfig) -> int:
    """Bytes to leave for the largest step where nobody knows: widest hidden states and logits in
    float32, twice.
    """
    width = max(model.intermediate_size * 2, model.hidden_size * 4)
    return 8 * (config.max_num_batched_tokens * width + config.max_num_seqs * model.vocab_size)


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """One program that was built before *ready*. `code` and `temporaries` in bytes, where the
    compiler says so.
    """

    name: str
    seconds: float
    code: int = 0
    temporaries: int = 0


class StepHandle(Protocol):
    """A step that was started. `result()` waits for it; it may be called once, in the order of
    the steps.
    """

    def result(self) -> StepOutput:
        """The step's tokens and log-probabilities."""
        ...


class Worker(Protocol):
    """Runs steps on one device. Calls come in the order load, measure, allocate_kv, warm_up,
    execute..., close. `close` may follow each of them: a start can fail anywhere.
    """

    device: DeviceInfo
    config: ResolvedConfig
    """The options as this worker runs them."""
    changes: list[Change]
    """Which of the options it was given its plan could not have, and what it runs instead."""
    multi_step: bool
    """Whether steps may be loops (docs/adr/0005)."""

    def load(self, progress: Progress) -> None:
        """Read or make the weights. Raises ModelError."""
        ...

    def measure(self) -> int:
        """Bytes that the KV cache may take beside its scratch page, after the weights and the
        steps' temporaries.
        """
        ...

    def page_bytes(self) -> int:
        """Bytes of one KV page over all layers."""
        ...

    def allocate_kv(self, num_pages: int) -> None:
        """Allocate `num_pages` pages and one scratch page."""
        ...

    def warm_up(self, table: Table, progress: Progress) -> list[ProgramReport]:
        """Build every program of the table. Afterwards nothing compiles, and a shape outside the
        table raises.
        """
        ...

    def execute(self, step: StepInput) -> StepHandle:
        """Start a step and return at once. Of a step whose requests wait for masks only the
        backbone starts, and `sample` comes before the next step. Raises OutsideTable.

        In a decode step each request reads slots that earlier steps wrote, and of those that this
        one writes its own alone; in a mixed step also those of others.
        """
        ...

    def sample(self, masks: np.ndarray) -> None:
        """Start the sampler of the step that waits: `masks` [k, W] int32 are those of its requests
        `StepInput.waiting`. Raises InternalError if none waits.

        A worker may have `new_masks(count, words)`: memory for them that it sends as it is.
        """
        ...

    def logits(self, step: StepInput) -> np.ndarray:
        """Run a step and return its logits at every token, [T, vocab] float32. Slow; for
        comparing backends.
        """
        ...

    def read_pages(self, layer: int, pages: Sequence[int]) -> np.ndarray:
        """What pages hold of a layer, [page slot 2*kvhead hdim], after the steps that were started.
        Slow; for comparing backends. One shard only.
        """
        ...

    def write_pages(self, layer: int, pages: Sequence[int], content: np.ndarray) -> None:
        """Let pages hold `content` [page slot 2*kvhead hdim] of a layer, before the next step.
        Slow; for comparing backends. One shard only.
        """
        ...

    def read_weights(self, layer: int) -> Mapping[str, np.ndarray]:
        """The weights of a layer as the programs get them, by name; -1: those outside of layers.
        Slow; for comparing with the checkpoint. One shard only.
        """
        ...

    def read_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """The rotary tables [position r] float32 as the programs get them: cos and sin."""
        ...

    def read_page_tables(self) -> np.ndarray:
        """The page tables on the device, [group row, P] int32 as `StepShape` has them, after the
        steps that were started. Slow; for comparing with those of a step.
        """
        ...

    def plans(self) -> Plans:
        """The implementation of each op, by kind of program."""
        ...

    def plan_hash(self) -> str:
        """The hash of `plans`."""
        ...

    def compilations_after_ready(self) -> int:
        """Programs compiled by steps since warm_up returned: 0, or a bug. What others compile
        does not count.
        """
        ...

    def close(self) -> None:
        """Free the device."""
        ...


ROOMS = {"jax": "tpu", "torch": "gpu", "torch-xla": "xla"}
FRAMEWORKS = {
    "jax": ("jax", "jaxlib"),
    "torch": ("torch",),
    "torch-xla": ("torch", "torch_xla"),
}
"""What a backend needs beyond what the package installs by itself."""
INSTALL = {
    "jax": "pip install 'twinfer[jax]' (on TPUs 'twinfer[tpu]', on NVIDIA GPUs 'twinfer[cuda]')",
    "torch": "pip install 'twinfer[torch]'",
    "torch-xla": "pip install 'twinfer[torch-xla]', in an environment of its own",
}
"""What brings it: extras of pyproject.toml."""


def is_installed(backend: str) -> bool:
    """Whether a backend's framework is there. Imports nothing."""
    return all(find_spec(name) for name in FRAMEWORKS[backend])


def check_installed(backend: str) -> None:
    """Raise BackendUnavailable, with what to install, if a backend's framework is not there."""
    if not is_installed(backend):
        raise BackendUnavailable(f"backend {backend}: it is not installed: {INSTALL[backend]}")


def backend_module(backend: str, name: str = "worker") -> Any:
    """A module of a backend's room, loaded by name so that one process imports one framework.

    `worker` offers `find_device(device) -> DeviceInfo`, `make_plans(model, config) -> Plans` (which
    loads nothing) and `make_worker(model, config, device, folder) -> Worker`; `limits` offers
    `measure_limits(device, dtype) -> Limits`.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend: got {backend!r}, allowed are {', '.join(BACKENDS)}")
    package = __package__.rpartition(".")[0]
    try:
        return import_module(f"{package}.{ROOMS[backend]}.{name}")
    # OSError: a framework whose shared libraries do not load
    except (ImportError, OSError) as error:
        check_installed(backend)
        raise BackendUnavailable(f"backend {backend}: {error}") from error


def attach_camera(engine: Any, config: Any, folder: str) -> None:
    """Let an engine keep the steps that its option `capture` names. Raises ConfigError."""
    # By name: comparing backends is a room above this one, which nothing needs that does not ask
    # for it.
    import_module(f"{__package__.rpartition('.')[0]}.numerics.questions.live").attach(
        engine, config, folder
    )


class RankProcesses(Protocol):
    """Processes that run one model together (`executor/`); each has its device already."""

    @property
    def device(self) -> DeviceInfo:
        """That of rank 0, with the memory of the one that has least."""
        ...

    def make_worker(self, model: ModelConfig, config: ResolvedConfig, folder: str) -> Worker:
        """All of them as one worker."""
        ...

    def close(self) -> None:
        """End the processes."""
        ...


def start_ranks(
    backend: str, device: str, count: int, progress: Progress, launcher: str = "mp"
) -> RankProcesses | None:
    """The processes that `count` shards of a model need, started by `launcher`: `mp` or `ray`; None
    where one process runs them all.

    Raises BackendUnavailable, ConfigError.
    """
    if launcher == "ray":
        check_ray(backend, count)
    elif backend != "torch" or count == 1:
        return None
    elif count * RANK_MEMORY > host_memory():
        raise ConfigError(
            f"tensor_parallel_size: got {count}, allowed is at most "
            f"{host_memory() // RANK_MEMORY} here: each rank is a process of {RANK_MEMORY >> 20} "
            f"MiB or more, and this machine has {host_memory() >> 30} GiB"
        )
    check_installed(backend)
    try:
        ranks: RankProcesses = import_module(f"{__package__}.executor.worker").start(
            backend, device, count, progress, launcher
        )
    except ImportError as error:
        asked = f"tensor_parallel_size: got {count}"
        if launcher == "ray":
            asked = "distributed_executor_backend: got ray"
        extra = "ray" if launcher == "ray" else "ranks"
        raise BackendUnavailable(f"{asked}: {error}: pip install 'twinfer[{extra}]'") from error
    return ranks


def check_ray(backend: str, count: int) -> None:
    """Raise ConfigError where Ray has nothing to place."""
    if count == 1 or backend == "torch-xla":
        raise ConfigError(
            "distributed_executor_backend: got ray, allowed with a tensor_parallel_size above 1 "
            f"and the backends jax and torch; got {count} and {backend}"
        )


def create_worker(
    model: ModelConfig, config: ResolvedConfig, device: DeviceInfo, folder: str
) -> Worker:
    """A worker in this process, or several ranks as one.

    Raises ConfigError where one process is to hold more weights than the machine has memory.
    """
    ranks = start_ranks(
        config.backend,
        device.platform,
        config.tensor_parallel_size,
        silent,
        config.distributed_executor_backend,
    )
    if ranks is not None:
        try:
            return ranks.make_worker(model, config, folder)
        except BaseException:
            ranks.close()
            raise
    check_memory(model, config, device)
    worker: Worker = backend_module(config.backend).make_worker(model, config, device, folder)
    return worker
