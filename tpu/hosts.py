"""Several hosts, one worker: a process on each, `jax.distributed` to join their devices, and the
same calls on all.

Every host runs the same command. On the first, the worker that the engine gets sends each call that
starts device work to the other hosts and then makes it itself; there, the command never gets past
making its worker: `host_link.follow` makes the calls in the order in which they come, until the
first host closes. Programs, shapes and steps are the same everywhere, which is compared when they
meet, so the hosts agree by construction on what runs next. A step crosses the network once, as
bytes; tokens do not: they are on the devices of every host.

If a host fails or is not heard of any more, the others end within seconds, with one line why.
"""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ..shared.config import ResolvedConfig
from ..shared.errors import BackendUnavailable, ConfigError
from ..shared.models.config import ModelConfig
from ..shared.models.spec import Shard
from ..shared.waiting import waiting
from ..shared.worker import Worker
from .sharding import check_all_take_part

PORT = 8476
"""Of a coordinator that variables name."""
PATIENCE_S = 300
"""How long hosts wait for each other at start."""
HOSTNAMES = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
"""Variables that name the hosts of a slice, in the order in which JAX asks them
(jax/_src/clusters/cloud_tpu_cluster.py).
"""
METADATA_S = 5
"""How long metadata is waited for: it comes from the machine's own host."""
HEARTBEAT_S = 20
"""After how long without a sign of life JAX ends the other processes; `host_link` is sooner."""

_joined: tuple[str, int, int] | None = None
"""The address that the first host sends calls from, the number of hosts, and the index of this
one.
"""


def join(coordinator: str, hosts: int, index: int) -> None:
    """Make the devices of all hosts one. Call it before anything else uses JAX, on every host with
    its index.

    `coordinator` is HOST:PORT of the host with index 0, or `auto`: what the variables of
    LeaderWorkerSet or GKE or a TPU VM's metadata say; the next two ports are used too. Raises
    ConfigError, BackendUnavailable.
    """
    global _joined
    if coordinator == "auto":
        if (hosts, index) != (1, 0):
            raise ConfigError(
                f"hosts, host_index: got {hosts}, {index}; coordinator auto finds them itself"
            )
        coordinator, hosts, index = of_variables(os.environ) or of_metadata(os.environ)
    host, colon, port = coordinator.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65534:
        raise ConfigError(
            f"coordinator: got {coordinator!r}, must be HOST:PORT with a port from 1 to 65533"
        )
    if hosts < 2:
        raise ConfigError(f"hosts: got {hosts}, must be at least 2")
    if not 0 <= index < hosts:
        raise ConfigError(f"host_index: got {index}, must be from 0 to {hosts - 1}")
    _initialize(coordinator, hosts, index)
    _joined = f"{host}:{int(port) + 1}", hosts, index


def of_variables(variables: Mapping[str, str]) -> tuple[str, int, int] | None:
    """The coordinator, the number of hosts and the index of this one, from the variables that
    LeaderWorkerSet sets in its pods, else those of GKE; None where there are neither. Raises
    ConfigError.

    A host is a name, an address, or either with a colon and what libtpu wants to know of it.
    """
    leader = variables.get("LWS_LEADER_ADDRESS")
    given = [name for name in HOSTNAMES if variables.get(name)]
    names = variables[given[0]] if given else ""
    if leader:
        first, size = leader, variables.get("LWS_GROUP_SIZE", "")
        index = variables.get("LWS_WORKER_INDEX", "")
        fields = "LWS_GROUP_SIZE, LWS_WORKER_INDEX"
    elif names:
        first = names.split(",")[0].strip().partition(":")[0]
        size = str(names.count(",") + 1)
        index, fields = variables.get("TPU_WORKER_ID", ""), f"{given[0]}, TPU_WORKER_ID"
    else:
        return None
    if not (size.isdigit() and index.isdigit()):
        raise ConfigError(f"{fields}: got {size!r} and {index!r}, must be whole numbers")
    return f"{first}:{PORT}", int(size), int(index)


def of_metadata(variables: Mapping[str, str]) -> tuple[str, int, int]:
    """The same from the metadata of a TPU VM, which a server of Google's cloud tells it. Raises
    ConfigError where there is none, or it names no hosts.
    """
    server = variables.get("GCE_METADATA_IP", "metadata.google.internal")
    endpoints, index = (
        _attribute(server, name) for name in ("worker-network-endpoints", "agent-worker-number")
    )
    # Of each host "name:port:address", or its address alone.
    addresses = [endpoint.rpartition(":")[2].strip() for endpoint in endpoints.split(",")]
    if not all(addresses) or not index.strip().isdigit():
        raise ConfigError(
            f"coordinator: got auto; {server} says worker-network-endpoints {endpoints!r} and "
            f"agent-worker-number {index!r}, which name no hosts"
        )
    return f"{addresses[0]}:{PORT}", len(addresses), int(index)


def _attribute(server: str, name: str) -> str:
    """An attribute of this machine's metadata. Raises ConfigError."""
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=METADATA_S) as answer:
            text: str = answer.read().decode()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"coordinator: got auto, allowed where {', '.join(('LWS_LEADER_ADDRESS', *HOSTNAMES))} "
            f"is set, and on TPU VMs, whose metadata has {name} ({server}: {error})"
        ) from error
    return text


def join_ranks(coordinator: str, shard: Shard) -> None:
    """Make the devices of all ranks one; a driver sends the calls. Call it before anything else
    uses JAX. Raises BackendUnavailable.
    """
    _initialize(coordinator, shard.count, shard.index)


def _initialize(coordinator: str, hosts: int, index: int) -> None:
    host, _, port = coordinator.rpartition(":")
    # Else JAX aborts a process of which another one is gone, before it can say why.
    jax.config.update("jax_enable_recoverability", True)
    # Else JAX takes SIGTERM for news that it alone hears of, and the process goes on.
    jax.config.update("jax_enable_preemption_service", False)
    bind_address = _bind_address(host, port) if index == 0 else None
    try:
        with waiting(
            lambda: f"the {hosts} processes to meet at {coordinator}, as number {index}",
            PATIENCE_S,
        ):
            jax.distributed.initialize(
                coordinator,
                hosts,
                index,
                initialization_timeout=PATIENCE_S,
                heartbeat_timeout_seconds=HEARTBEAT_S,
                coordinator_bind_address=bind_address,
                # All is given. Else JAX asks a TPU VM's metadata, and fails where there is none.
                cluster_detection_method="deactivate",
            )
    except Exception as error:  # several kinds, by what the network says
        raise BackendUnavailable(
            f"coordinator: {coordinator}: {str(error).splitlines()[0]}"
        ) from error


def _bind_address(host: str, port: str) -> str:
    """The interface that the coordinator's name stands for: JAX would take all of them. Raises
    BackendUnavailable.
    """
    try:
        return f"{socket.gethostbyname(host)}:{port}"
    except OSError as error:
        raise BackendUnavailable(f"coordinator: {host}: {error}") from error


@dataclass(frozen=True, slots=True)
class KeyValueStore:
    """What `jax.distributed` keeps for all hosts."""

    client: Any

    def put(self, name: str, value: str) -> None:
        """See `host_link.Board`."""
        self.client.key_value_set(name, value)

    def get(self, name: str, patience: float) -> str:
        """See `host_link.Board`."""
        try:
            found: str = self.client.blocking_key_value_get(name, round(1000 * patience))
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith("DEADLINE_EXCEEDED"):
                raise TimeoutError(name) from error
            raise BackendUnavailable(f"coordinator: {str(error).splitlines()[0]}") from error
        return found


def _link() -> Any:
    """The module `host_link`, whose needs come with an extra. Raises BackendUnavailable."""
    try:
        from . import host_link
    except ImportError as error:
        raise BackendUnavailable(f"hosts: {error}: pip install 'twinfer[hosts]'") from error
    return host_link


def on_all_hosts(worker: Worker, model: ModelConfig, config: ResolvedConfig, folder: str) -> Worker:
    """`worker`, or on the first of several hosts one that makes its calls on all. On the others it
    does not return.

    Raises ConfigError unless the devices of the worker's mesh are those of all hosts, and all hosts
    run the same.
    """
    if _joined is None:
        if (count := jax.process_count()) > 1:
            check_all_take_part(config.tensor_parallel_size, f"{count} ranks", jax.device_count())
        return worker
    address, hosts, index = _joined
    check_all_take_part(config.tensor_parallel_size, f"{hosts} hosts", jax.device_count())
    host_link = _link()
    from jax._src import distributed  # the store has no public name

    board = KeyValueStore(distributed.global_state.client)
    digests = host_link.digests_of(model, config, worker.plan_hash(), folder)
    # Not jax.process_index(): a TPU slice numbers its hosts by their place in it.
    if index > 0:
        # By itself JAX would leave when this process ends, and abort it if the first host is gone.
        host_link.follow(worker, address, index, board, digests, leave=jax.distributed.shutdown)
        raise SystemExit(0)
    return host_link.FirstHost(worker, address, hosts - 1, board, digests)
