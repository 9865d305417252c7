"""The ranks as one worker: what the engine calls is done by all of them, and rank 0 answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...bucketing import Table
from ...ops import Plans
from ..config import DeviceInfo, ResolvedConfig
from ..errors import BackendUnavailable, ConfigError
from ..models.config import ModelConfig
from ..progress import Progress
from ..step import StepInput, StepOutput
from ..worker import ProgramReport, Worker
from .driver import Ranks
from .messages import Made, Make


def start(backend: str, device: str, shards: int, progress: Progress, launcher: str) -> Processes:
    """Processes that run one model together, as `shared/worker.py` asks for them."""
    if launcher == "mp":
        return Processes(Ranks(backend, device, shards, progress=progress))
    # Needs Ray, which not every machine has.
    from .ray_actors import Actors, number_of_ranks

    count = number_of_ranks(backend, device, shards)
    return Processes(Ranks(backend, device, count, Actors(shards), progress))


@dataclass(frozen=True, slots=True)
class Processes:
    """See `RankProcesses`."""

    ranks: Ranks

    @property
    def device(self) -> DeviceInfo:
        """See `RankProcesses`."""
        return self.ranks.device

    def make_worker(self, model: ModelConfig, config: ResolvedConfig, folder: str) -> Worker:
        """See `RankProcesses`."""
        return RanksWorker(self.ranks, model, config, folder)

    def close(self) -> None:
        """See `RankProcesses`."""
        self.ranks.close()


@dataclass(slots=True)
class Handle:
    """A step that the ranks have started."""

    ranks: Ranks
    number: int

    def result(self) -> StepOutput:
        """Wait for the step."""
        return self.ranks.output(self.number)


class RanksWorker:
    """See `shared/worker.py` for the contract of each method."""

    def __init__(
        self, ranks: Ranks, model: ModelConfig, config: ResolvedConfig, folder: str
    ) -> None:
        """Makes the worker of each rank. Raises ConfigError if they differ in what they run."""
        self.device, self._ranks = ranks.device, ranks
        made = ranks.call("make", Make(model, config, folder), Made)
        first = made[0]
        for rank, other in enumerate(made):
            for name, digest in other.digests.items():
                if digest != first.digests[name]:
                    raise ConfigError(
                        f"{name}: rank {rank} has {digest}, rank 0 has {first.digests[name]}; "
                        "all ranks must have the same"
                    )
        self.config, self.changes, self.multi_step = first.config, first.changes, first.multi_step
        self._digests: dict[str, str] = first.digests

    @property
    def processes(self) -> tuple[int, ...]:
        """The ranks' process ids, in order."""
        return self._ranks.processes

    def load(self, progress: Progress) -> None:
        """See `Worker`."""
        self._ranks.call("load", progress=progress)

    def measure(self) -> int:
        """See `Worker`: what the rank with the least has."""
        room: list[int] = self._ranks.call("measure", kind=int)
        return min(room)

    def page_bytes(self) -> int:
        """See `Worker`: on each rank."""
        sizes: list[int] = self._ranks.call("page_bytes", kind=int)
        return max(sizes)

    def allocate_kv(self, num_pages: int) -> None:
        """See `Worker`."""
        self._ranks.call("allocate_kv", num_pages)

    def warm_up(self, table: Table, progress: Progress) -> list[ProgramReport]:
        """See `Worker`."""
        reports: list[ProgramReport] = self._ranks.call(
            "warm_up", table, list[ProgramReport], progress
        )[0]
        self._ranks.steps_begin()
        return reports

    def execute(self, step: StepInput) -> Handle:
        """See `Worker`."""
        return Handle(self._ranks, self._ranks.start("execute", step))

    def sample(self, masks: np.ndarray) -> None:
        """See `Worker`."""
        self._ranks.start("sample", masks)

    def logits(self, step: StepInput) -> np.ndarray:
        """See `Worker`."""
        found: np.ndarray = self._ranks.call("logits", step, np.ndarray | None)[0]
        return found

    def read_pages(self, layer: int, pages: Sequence[int]) -> np.ndarray:
        """Not of several ranks: none holds whole pages."""
        raise BackendUnavailable("read_pages: each rank holds its own heads")

    def write_pages(self, layer: int, pages: Sequence[int], content: np.ndarray) -> None:
        """Not of several ranks: none holds whole pages."""
        raise BackendUnavailable("write_pages: each rank holds its own heads")

    def read_weights(self, layer: int) -> Mapping[str, np.ndarray]:
        """Not of several ranks: none holds whole weights."""
        raise BackendUnavailable("read_weights: each rank holds its own part")

    def read_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """See `Worker`."""
        found: tuple[np.ndarray, np.ndarray] = self._ranks.call(
            "read_tables", kind=tuple[np.ndarray, np.ndarray]
        )[0]
        return found

    def read_page_tables(self) -> np.ndarray:
        """See `Worker`."""
        found: np.ndarray = self._ranks.call("read_page_tables", kind=np.ndarray)[0]
        return found

    def plans(self) -> Plans:
        """Not here: what they name is in the ranks' processes."""
        raise BackendUnavailable("plans: they are made in the ranks' processes")

    def plan_hash(self) -> str:
        """See `Worker`: the same on all ranks."""
        return self._digests["plan"]

    def compilations_after_ready(self) -> int:
        """See `Worker`: on the rank with the most. Raises if a rank was lost."""
        self._ranks.check()
        return self._ranks.late

    def close(self) -> None:
        """See `Worker`."""
        self._ranks.close()
