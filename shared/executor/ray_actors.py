"""Ranks that Ray places: an actor on each chosen machine starts a rank as a process of its own and
says how it ends.

Ray places, carries the public keys and watches. It never carries a step: calls and reports go over
tcp with CURVE between the driver and the ranks, as `driver.py` has it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import msgspec
import ray
import zmq
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..config import parse_device
from ..errors import BackendUnavailable, ConfigError
from ..models.spec import Place, Shard
from ..starvation import Silence
from ..waiting import waiting
from .curve import CurveServer
from .driver import COMMAND, ENVIRONMENT, STANDARD_ERROR, STOPPED_S, Doors, ending, give
from .messages import Job, Keys

LOG = logging.getLogger("twinfer.ray")
PATIENCE_S = 300.0
"""How long a place for all ranks is waited for."""
LOOK_S = 0.2
"""Between two looks of an actor at its rank."""
FAREWELL_S = 5.0
"""How long the ends of actors are waited for."""
CARRIED = ("XLA_", "JAX_", "LIBTPU_", "TORCH", "TRITON_", "TWINFER_", "NCCL_", "GLOO_", "OMP_")
"""The variables of the driver that ranks get too: those of Ray's processes are the cluster's."""
AS_NICE_AS_RAY = {"env_vars": {"RAY_worker_niceness": "0"}}
"""The priority of a node's own processes. Ray adds 15 for workers, and a rank whose machine is busy
hardly runs then.
"""
ADDRESS_OF_INTERFACE = 0x8915
"""SIOCGIFADDR of ioctl."""
OWN = "local"
"""The RAY_ADDRESS of a cluster that is started for this process, on this machine."""
ADDRESSES = "HOST:PORT of a cluster, auto (the one that runs on this machine) and local (a new one)"
VIRTUAL_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


@dataclass(frozen=True, slots=True)
class Site:
    """What an actor says of where it is. `worker` is the place of a TPU host in its slice."""

    node: str
    ip: str
    gpus: tuple[str, ...]
    worker: int
    pid: int
    public_key: str


class Actor:
    """Starts one rank and waits for its end. It is killed with its process, which Ray ends with
    the driver, the machine or the placement.
    """

    def __init__(self) -> None:
        self._public, self._secret = zmq.curve_keypair()

    def site(self) -> Site:
        """Where it is."""
        return Site(
            node=ray.get_runtime_context().get_node_id(),
            ip=address(),
            gpus=tuple(str(gpu) for gpu in ray.get_gpu_ids()),
            worker=int(os.environ.get("TPU_WORKER_ID") or 0),
            pid=os.getpid(),
            public_key=self._public.decode(),
        )

    def free_port(self) -> int:
        """A port of this machine that is free now."""
        with socket.socket() as probe:
            probe.bind((address(), 0))
            return int(probe.getsockname()[1])

    def run(
        self, job: bytes, driver_key: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> str:
        """Be a rank until it ends; how it has ended."""
        told = msgspec.json.decode(job, type=Job)
        told.keys = Keys(self._public.decode(), self._secret.decode(), driver_key)
        own = dict(environment)
        if name := interface_of(address()):
            own = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name} | own
        process = subprocess.Popen(
            [*(command or COMMAND)],
            stdin=subprocess.PIPE,
            stdout=STANDARD_ERROR,
            env=os.environ | own,
        )
        give(process, told)
        try:
            return watched(process)
        finally:
            process.kill()
            process.wait()


def watched(process: subprocess.Popen[bytes]) -> str:
    """How a process has ended, or that it was stopped for too long."""
    silence, node = Silence(), os.getppid()
    while True:
        if os.getppid() != node:
            # Ray would notice later; the rank ends with this process.
            os._exit(1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return ending(process.wait(LOOK_S))
        silence.look(process.pid, inf)
        if silence.stopped > STOPPED_S:
            return f"was stopped for {STOPPED_S:.0f} s"


def interface_of(ip: str) -> str | None:
    """The name of the network interface of this machine that has an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), ADDRESS_OF_INTERFACE, asked)
                if socket.inet_ntoa(found[20:24]) == ip:
                    return name
    return None


def address() -> str:
    """That of this machine in its cluster."""
    return str(ray.util.get_node_ip_address())


def nodes() -> list[dict[str, Any]]:
    """Those of the cluster, as Ray describes them."""
    return list(ray.nodes())


def resources_of_cluster() -> dict[str, float]:
    """What all nodes have together."""
    return dict(ray.cluster_resources())


def connect() -> None:
    """Join the Ray cluster that RAY_ADDRESS names, or start one on this machine where it names
    none: a cluster that happens to run here may be somebody else's. A program that has joined one
    by `ray.init` stays there.

    Raises ConfigError, BackendUnavailable.
    """
    if ray.is_initialized():
        return
    address = named_address()
    options: dict[str, Any] = {"address": address, "log_to_driver": False}
    if address == OWN:
        # A cluster that runs has its dashboard, or none.
        options["include_dashboard"] = False
    try:
        with waiting(lambda: f"the Ray cluster at {address} (RAY_ADDRESS)"):
            ray.init(**options, logging_level=logging.ERROR)
    except ValueError as error:
        raise ConfigError(
            f"RAY_ADDRESS: got {address!r}, allowed are {ADDRESSES}: {first_line(error)}"
        ) from error
    except Exception as error:  # several kinds, by what is not there
        raise BackendUnavailable(
            f"distributed_executor_backend: ray: no cluster at {address!r} (RAY_ADDRESS): "
            f"{first_line(error)}"
        ) from error
    how = "started" if address == OWN else "joined"
    LOG.info("ray: %s %s (RAY_ADDRESS names another)", how, cluster_name())


def named_address() -> str:
    """What RAY_ADDRESS says, `local` if nothing. Raises ConfigError for one of Ray's clients."""
    address = os.environ.get("RAY_ADDRESS") or OWN
    if "://" in address:
        raise ConfigError(
            f"RAY_ADDRESS: got {address!r}, allowed are {ADDRESSES}: what starts the ranks has to "
            "be on a machine of the cluster"
        )
    return address


def cluster_name() -> str:
    """Which cluster this process is in, in words."""
    return f"the cluster at {ray.get_runtime_context().gcs_address}"


def first_line(error: BaseException) -> str:
    """An error of Ray's, whose words go on for pages."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@dataclass(frozen=True, slots=True)
class Slice:
    """TPU hosts that are wired to each other, by the labels that Ray gives them."""

    topology: str
    generation: str
    devices: int
    hosts: int


def slices_of(members: Sequence[Mapping[str, Any]]) -> list[Slice]:
    """The TPU slices among the nodes of a cluster, without those of which a host is missing."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for node in members:
        name = node["Labels"].get("ray.io/tpu-slice-name")
        if node["Alive"] and name:
            found.setdefault(name, []).append(node)
    slices = []
    for hosts in found.values():
        labels = hosts[0]["Labels"]
        generation = labels["ray.io/tpu-pod-type"].partition("-")[0]
        chips = sum(int(node["Resources"].get("TPU", 0)) for node in hosts)
        per_chip = 2 if generation.endswith("7x") else 1
        topology = labels["ray.io/tpu-topology"]
        if chips == prod(map(int, topology.split("x"))):
            slices.append(Slice(topology, generation, chips * per_chip, len(hosts)))
    return slices


def slice_for(shards: int, members: Sequence[Mapping[str, Any]]) -> Slice:
    """A slice of as many devices as there are shards. Raises ConfigError."""
    found = slices_of(members)
    for one in found:
        if one.devices == shards:
            return one
    sizes = ", ".join(sorted({f"{one.devices} ({one.topology})" for one in found})) or "none"
    raise ConfigError(
        f"tensor_parallel_size: got {shards}, allowed in this Ray cluster (RAY_ADDRESS names "
        f"another) are the sizes of its TPU slices: {sizes}"
    )


def is_tpu(device: str) -> bool:
    """Whether ranks of the JAX backend go to TPUs: they are asked for, or the cluster has some."""
    kind, _ = parse_device(device)
    return kind == "tpu" or (kind == "auto" and resources_of_cluster().get("TPU", 0) > 0)


def number_of_ranks(backend: str, device: str, shards: int) -> int:
    """How many processes `shards` shards need: one a shard of the torch backend, one a host of a
    slice for JAX on TPUs, else one for as many devices as JAX has on a CPU. Joins the cluster.
    Raises BackendUnavailable, ConfigError.
    """
    connect()
    if backend == "torch":
        return shards
    if is_tpu(device):
        return slice_for(shards, nodes()).hosts
    found = VIRTUAL_DEVICES.search(os.environ.get("XLA_FLAGS", ""))
    each = int(found[1]) if found else 1
    if shards % each:
        raise ConfigError(
            f"tensor_parallel_size: got {shards}, allowed are multiples of the {each} devices that "
            "each process has (XLA_FLAGS)"
        )
    return shards // each


class Actors:
    """See `driver.Launcher`."""

    def __init__(self, shards: int, command: Sequence[str] = ()) -> None:
        """Of a model of so many shards. `command` starts a rank instead of the usual one."""
        self.processes: list[int] = []
        self._shards = shards
        self._command = list(command)
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        self._sites: list[Site] = []
        self._ends: dict[int, str] = {}
        self._group: Any = None
        self._slice: Any = None
        self._server: CurveServer | None = None

    def begin(self, context: Any, backend: str, device: str, count: int) -> Doors:
        """See `Launcher`."""
        connect()
        try:
            self._place(backend, device, count)
            return self._start(context, backend, device)
        except ray.exceptions.RayError as error:
            raise BackendUnavailable(
                f"distributed_executor_backend: ray: {first_line(error)}"
            ) from error

    def _place(self, backend: str, device: str, count: int) -> None:
        kind, _ = parse_device(device)
        resources = {"CPU": 1.0}
        strategy = "PACK"
        if backend == "jax" and is_tpu(device):
            from ray.util.tpu import slice_placement_group

            chosen = slice_for(self._shards, nodes())
            self._slice = slice_placement_group(chosen.topology, chosen.generation)
            self._group = self._slice.placement_group
            resources = self._slice.bundle_resources
        else:
            if kind == "cuda" or (kind == "auto" and resources_of_cluster().get("GPU", 0) > 0):
                # Ranks of the torch backend read each other's memory.
                resources, strategy = {"CPU": 1.0, "GPU": 1.0}, "STRICT_PACK"
            self._group = placement_group([resources] * count, strategy)
        with waiting(lambda: f"Ray's place for {count} ranks with {resources} each", PATIENCE_S):
            placed = self._group.wait(PATIENCE_S)
        if not placed:
            raise BackendUnavailable(
                f"distributed_executor_backend: ray has no place for {count} ranks with "
                f"{resources} each ({strategy}) in {cluster_name()} after {PATIENCE_S:.0f} s "
                "(RAY_ADDRESS names another)"
            )
        kind_of = ray.remote(Actor)
        extra = {name: n for name, n in resources.items() if name not in ("CPU", "GPU")}
        for index in range(count):
            where = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            )
            self._actors.append(
                kind_of.options(
                    num_cpus=resources.get("CPU", 0),
                    num_gpus=resources.get("GPU", 0),
                    resources=extra,
                    scheduling_strategy=where,
                    runtime_env=AS_NICE_AS_RAY,
                ).remote()
            )
        with waiting(lambda: f"the {count} actors of the ranks"):
            sites = ray.get([actor.site.remote() for actor in self._actors])
        both = sorted(
            zip(sites, self._actors, strict=True), key=lambda one: (one[0].worker, one[0].node)
        )
        self._sites = [site for site, _ in both]
        self._actors = [actor for _, actor in both]
        self.processes = [site.pid for site in self._sites]

    def _start(self, context: Any, backend: str, device: str) -> Doors:
        count = len(self._actors)
        self._server = CurveServer(context)
        public_key = self._server.allow(site.public_key for site in self._sites)
        ip = address()
        reports, reports_at = self._server.bind(zmq.PULL, ip)
        beats, beats_at = self._server.bind(zmq.PUB, ip)
        doors = Doors([], reports, beats)
        meeting = f"tcp://{self._sites[0].ip}:{ray.get(self._actors[0].free_port.remote())}"
        for rank, actor in enumerate(self._actors):
            inbox, calls_at = self._server.bind(zmq.PUSH, ip)
            doors.inboxes.append(inbox)
            place = Place(Shard(rank, count), here(self._sites, rank), meeting)
            job = Job(place, backend, device, calls_at, reports_at, beats_at)
            environment = environment_of(self._sites, rank)
            self._runs.append(
                actor.run.remote(msgspec.json.encode(job), public_key, self._command, environment)
            )
        return doors

    def ended(self, rank: int) -> str | None:
        """See `Launcher`."""
        if rank not in self._ends:
            done, _ = ray.wait([self._runs[rank]], timeout=0)
            if done:
                self._ends[rank] = self._how(rank)
        return self._ends.get(rank)

    def _how(self, rank: int) -> str:
        where = f"on {self._sites[rank].ip}"
        try:
            return f"{where} {ray.get(self._runs[rank])}"
        except ray.exceptions.RayError:
            return f"{where} was lost: its Ray actor or its node has died"

    def process(self, rank: int) -> None:
        """See `Launcher`: the actors look."""

    def kill(self) -> None:
        """See `Launcher`."""
        for actor in self._actors:
            with contextlib.suppress(Exception):  # a cluster that is gone has ended it too
                ray.kill(actor)
        with contextlib.suppress(Exception):
            ray.wait(self._runs, num_returns=len(self._runs), timeout=FAREWELL_S)
        with contextlib.suppress(Exception):
            if self._slice is not None:
                self._slice.shutdown()
            elif self._group is not None:
                remove_placement_group(self._group)
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """See `Launcher`. The connection to the cluster stays, for the next ranks."""


def here(sites: Sequence[Site], rank: int) -> Shard:
    """Which of the ranks of its node a rank is."""
    same = [index for index, site in enumerate(sites) if site.node == sites[rank].node]
    return Shard(same.index(rank), len(same))


def environment_of(sites: Sequence[Site], rank: int) -> dict[str, str]:
    """The variables that a rank gets: those of the driver that are about what it runs, and the GPUs
    of all ranks of its node, since peers read each other's memory.
    """
    # Which interface to take is the machine's own matter, and the actor's.
    own = {name: value for name, value in ENVIRONMENT.items() if not name.endswith("IFNAME")}
    own |= {name: value for name, value in os.environ.items() if name.startswith(CARRIED)}
    gpus = [gpu for site in sites if site.node == sites[rank].node for gpu in site.gpus]
    return own | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
