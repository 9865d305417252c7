"""What ranks that Ray places are told, from what a cluster and its actors say of themselves: no Ray
is started.
"""

import pytest

pytest.importorskip("ray")

from twinfer.shared.errors import ConfigError
from twinfer.shared.executor.ray_actors import (
    Site,
    Slice,
    connect,
    environment_of,
    here,
    slice_for,
    slices_of,
)
from twinfer.shared.models.spec import Shard


def host(name, pod, topology, chips, alive=True):
    """A node as `ray.nodes()` has it; without a slice's name it is none of one."""
    labels = {
        "ray.io/tpu-slice-name": name,
        "ray.io/tpu-pod-type": pod,
        "ray.io/tpu-topology": topology,
    }
    return {
        "Alive": alive,
        "Labels": labels if name else {"ray.io/node-id": "x"},
        "Resources": {"CPU": 8.0, "TPU": float(chips)} if name else {"CPU": 8.0},
    }


V6E = [host("a", "v6e-16", "4x4", 4) for _ in range(4)]
HEAD = host("", "", "", 0)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("nonsense", "Invalid address format"),
        ("10.0.0.1", "Invalid address format"),
        ("ray://10.0.0.1:10001", "has to be on a machine of the cluster"),
    ],
)
def test_an_address_that_is_none_is_named(address, why, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    allowed = r"HOST:PORT of a cluster, auto .* and local .*: "
    with pytest.raises(ConfigError, match=f"^RAY_ADDRESS: got '{address}', .*{allowed}.*{why}"):
        connect()


def test_a_slice_has_the_hosts_of_one_name():
    small = host("b", "v5litepod-8", "2x4", 8)
    found = slices_of([HEAD, V6E[0], small, *V6E[1:]])
    assert found == [Slice("4x4", "v6e", 16, 4), Slice("2x4", "v5litepod", 8, 1)]


def test_a_chip_may_have_two_devices():
    assert slices_of([host("c", "tpu7x-8", "2x2x1", 4)]) == [Slice("2x2x1", "tpu7x", 8, 1)]


@pytest.mark.parametrize("lost", [V6E[:3], [*V6E[:3], host("a", "v6e-16", "4x4", 4, alive=False)]])
def test_a_slice_with_a_missing_host_is_none(lost):
    assert slices_of([HEAD, *lost]) == []


def test_the_slice_is_the_one_of_that_many_devices():
    """Also where another one has as many hosts."""
    nodes = [host("d", "v6e-4", "2x2", 4), host("e", "v6e-8", "2x4", 8), *V6E]
    assert slice_for(8, nodes) == Slice("2x4", "v6e", 8, 1)
    with pytest.raises(ConfigError, match=r"got 5, .* slices: 16 \(4x4\), 4 \(2x2\), 8 \(2x4\)$"):
        slice_for(5, nodes)
    with pytest.raises(ConfigError, match=r"slices: none$"):
        slice_for(8, [HEAD])


def sites(*nodes, gpus=None):
    """Actors on these nodes, with a GPU each if there are any."""
    return [
        Site(node, f"10.0.0.{node}", (str(gpus[i]),) if gpus else (), i, 100 + i, f"key{i}")
        for i, node in enumerate(nodes)
    ]


def test_a_rank_is_counted_among_those_of_its_node():
    placed = sites("1", "2", "1", "1")
    assert [here(placed, rank) for rank in range(4)] == [
        Shard(0, 3), Shard(0, 1), Shard(1, 3), Shard(2, 3)
    ]  # fmt: skip


def test_a_rank_sees_the_gpus_of_all_ranks_of_its_node():
    """In the order of ranks: the n-th of them is the n-th rank's there."""
    placed = sites("1", "2", "1", gpus=[3, 0, 1])
    assert environment_of(placed, 0)["CUDA_VISIBLE_DEVICES"] == "3,1"
    assert environment_of(placed, 2)["CUDA_VISIBLE_DEVICES"] == "3,1"
    assert environment_of(placed, 1)["CUDA_VISIBLE_DEVICES"] == "0"
    assert "CUDA_VISIBLE_DEVICES" not in environment_of(sites("1", "2"), 0)


def test_a_rank_gets_the_drivers_variables_of_what_it_runs(monkeypatch):
    for name, value in {
        "XLA_FLAGS": "--x=2", "OMP_NUM_THREADS": "3", "NCCL_DEBUG": "WARN", "RAY_JOB": "no",
        "HOME": "/nowhere", "NCCL_NVLS_ENABLE": "0", "GLOO_SOCKET_IFNAME": "eth7",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    found = environment_of(sites("1"), 0)
    assert found["XLA_FLAGS"] == "--x=2"
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["NCCL_DEBUG"] == "WARN"
    assert found["GLOO_SOCKET_IFNAME"] == "eth7"
    assert not {"RAY_JOB", "HOME"} & set(found)


def test_multicast_is_off_and_no_interface_is_chosen_for_another_machine(monkeypatch):
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    found = environment_of(sites("1"), 0)
    assert found["NCCL_NVLS_ENABLE"] == "0"
    assert found["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert not [name for name in found if name.endswith("IFNAME")]
