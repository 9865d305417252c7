"""What an engine takes where the user says nothing: backend and page size by platform, each
change with its reason.
"""

import subprocess
import sys

import pytest

from twinfer.shared import backends
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.errors import BackendUnavailable, ConfigError
from twinfer.shared.models.caches import layout_of
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.shapes import SHAPES
from twinfer.shared.page_table import SCALAR_MEMORY_FOR_TABLES

DEVICES = {
    "tpu": DeviceInfo("tpu", "TPU v6 lite", 31 << 30),
    "cuda": DeviceInfo("cuda", "H200", 140 << 30),
    "cpu": DeviceInfo("cpu", "cpu", 8 << 30),
}


def machine(folder, *, chips=(), nvidia=False):
    """Folders (pci, dev) of a machine with PCI devices of Google's, by device id, and with an
    NVIDIA driver or not.
    """
    pci, dev = folder / "pci", folder / "dev"
    dev.mkdir(parents=True)
    for n, chip in enumerate(chips):
        (pci / str(n)).mkdir(parents=True)
        (pci / str(n) / "vendor").write_text("0x1ae0\n")
        (pci / str(n) / "device").write_text(f"{chip}\n")
    if nvidia:
        (dev / "nvidiactl").write_text("")
    return pci, dev


def tried(folder, device="auto", **parts):
    return [(c.backend, c.device) for c in backends.candidates(device, *machine(folder, **parts))]


def test_the_accelerator_decides(tmp_path):
    cpu = [("torch", "auto"), ("jax", "cpu")]
    cuda = [("torch", "cuda"), ("jax", "cuda")]
    assert tried(tmp_path / "a") == cpu
    assert tried(tmp_path / "b", nvidia=True) == [*cuda, *cpu]
    assert tried(tmp_path / "c", chips=["0x006f"]) == [("jax", "tpu"), *cpu]
    # Network cards and disks of Google's cloud have the same vendor.
    assert tried(tmp_path / "d", chips=["0x0042", "0x001f"], nvidia=True) == [*cuda, *cpu]


def test_the_device_that_the_user_names_decides_before(tmp_path):
    parts = {"chips": ["0x006f"], "nvidia": True}
    assert tried(tmp_path / "a", "cpu", **parts) == [("torch", "cpu"), ("jax", "cpu")]
    assert tried(tmp_path / "b", "tpu") == [("jax", "tpu")]
    assert tried(tmp_path / "c", "cuda", **parts) == [("torch", "cuda"), ("jax", "cuda")]


class Room:
    """A backend whose devices are those of a list; the rest cannot be had."""

    def __init__(self, backend, devices):
        self.backend, self.devices = backend, devices

    def find_device(self, device):
        if device not in self.devices:
            raise BackendUnavailable(f"{self.backend} has no {device}")
        return DEVICES["cpu" if device == "auto" else device]


def found(monkeypatch, folder, rooms, **parts):
    monkeypatch.setattr(backends, "backend_module", lambda name: Room(name, rooms[name]))
    tried = backends.candidates("auto", *machine(folder, **parts))
    monkeypatch.setattr(backends, "candidates", lambda device: tried)
    return backends.find_backend("auto", "auto")


def test_what_cannot_run_is_passed_over_with_the_reason(tmp_path, monkeypatch):
    rooms = {"torch": ["auto", "cpu"], "jax": ["cuda", "cpu"]}
    backend, device, (change,) = found(monkeypatch, tmp_path, rooms, nvidia=True)
    assert (backend, device.platform) == ("jax", "cuda")
    assert str(change).startswith(
        "backend: auto -> jax (jax runs NVIDIA GPUs too; torch on cuda is not to be had: "
    )
    assert "torch has no cuda" in change.why


def test_an_accelerator_that_is_seen_and_does_not_run_is_told_aloud(tmp_path, monkeypatch):
    rooms = {"torch": ["auto", "cpu"], "jax": ["cpu"]}
    with pytest.warns(UserWarning, match=r"device: what runs is the CPU: jax on tpu .*no tpu"):
        assert found(monkeypatch, tmp_path, rooms, chips=["0x006f"])[0] == "torch"


def test_a_framework_that_is_not_there_costs_no_accelerator(tmp_path, monkeypatch):
    assert found(monkeypatch, tmp_path, {"torch": [], "jax": ["cpu"]})[0] == "jax"


def test_nothing_to_run_on_names_all_that_was_tried(tmp_path, monkeypatch):
    with pytest.raises(
        BackendUnavailable, match=r"jax on tpu .*; torch on auto .*; jax on cpu .*jax has no cpu"
    ):
        found(monkeypatch, tmp_path, {"torch": [], "jax": []}, chips=["0x0063"])


def test_a_backend_that_is_named_is_not_chosen(monkeypatch):
    monkeypatch.setattr(backends, "backend_module", lambda name: Room(name, ["cpu"]))
    assert backends.find_backend("jax", "cpu") == ("jax", DEVICES["cpu"], [])


def test_only_the_framework_that_runs_is_imported():
    code = (
        "import sys, time; from twinfer.shared import backends; start = time.process_time(); "
        "list(backends.candidates('auto')); took = time.process_time() - start; "
        "print({'jax', 'torch'} & set(sys.modules), took < 0.2); "
        "print(backends.find_backend('auto', 'cpu')[0], *{'jax', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stdout.splitlines() == ["set() True", "torch torch"]


@pytest.mark.parametrize(
    ("platform", "backend"), [("tpu", "jax"), ("cuda", "torch"), ("cpu", "torch")]
)
def test_the_backend_of_a_platform_is_a_change(platform, backend):
    config, changes = resolve(EngineConfig(model="x"), model(4096), DEVICES[platform])
    assert config.backend == backend
    assert [str(c) for c in changes if c.field == "backend"] == [
        f"backend: auto -> {backend} (default on {platform})"
    ]


def model(length):
    return parse_config(SHAPES["qwen3-0.6b"] | {"max_position_embeddings": length})


def test_a_model_of_one_position_takes_no_request():
    with pytest.raises(ConfigError, match="max_position_embeddings: got 1, allowed is"):
        resolve(EngineConfig(model="x"), model(1), DEVICES["cpu"])


def pages(length, platform="tpu", **options):
    """(page size, requests, what changed) of a model with contexts of `length`."""
    config, changes = resolve(EngineConfig(model="x", **options), model(length), DEVICES[platform])
    changed = {c.field: c for c in changes if c.field in ("page_size", "max_num_seqs")}
    return config.page_size, config.max_num_seqs, changed


@pytest.mark.parametrize(
    ("length", "page", "requests"),
    [
        (8192, 128, 256),
        (40960, 128, 256),
        (65536, 128, 256),
        (65537, 256, 256),
        (131072, 256, 256),
        (1 << 20, 256, 32),
    ],
)
def test_pages_on_a_tpu_are_as_large_as_scalar_memory_asks_for(length, page, requests):
    found_page, found_requests, changed = pages(length)
    assert (found_page, found_requests) == (page, requests)
    need = requests * -(-length // page) * 4
    assert need <= SCALAR_MEMORY_FOR_TABLES
    assert changed["page_size"].before is None
    assert (
        f"{requests} * {-(-length // page)} pages * 4 B = {need} B of 524288 B"
        in changed["page_size"].why
    )
    last = changed["max_num_seqs"]
    assert (last.before, last.after) == ((256, requests) if requests < 256 else (None, 256))


@pytest.mark.parametrize("shards", [1, 8])
def test_pages_of_smaller_entries_are_no_larger_than_kernels_take(shards):
    """Layers of Gemma 4 26B keep entries of two sizes: pages of the smaller have 256 tokens."""
    gemma4 = parse_config(SHAPES["gemma4-26b-a4b"])
    config = EngineConfig(model="x", backend="jax", tensor_parallel_size=shards)
    resolved, _ = resolve(config, gemma4, DEVICES["tpu"])
    assert (resolved.max_model_len, resolved.page_size, resolved.max_num_seqs) == (1 << 18, 128, 64)
    assert {group.page_size for group in layout_of(gemma4, resolved).groups} == {128, 256}


def test_what_the_user_asks_for_is_not_lowered():
    with pytest.raises(
        ConfigError,
        match=r"max_num_seqs: got 64, allowed is at most 32: .*32 \* 4096 pages "
        r"\* 4 B",
    ):
        pages(1 << 20, max_num_seqs=64)
    assert pages(1 << 20, max_num_seqs=32)[:2] == (256, 32)
    # An explicit page size that does not fit is refused by the plan, with the same arithmetic.
    assert pages(1 << 20, page_size=16)[:2] == (16, 256)


@pytest.mark.parametrize(("platform", "page"), [("cuda", 64), ("cpu", 16)])
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_pages_elsewhere_stay(platform, page, backend):
    assert pages(40960, platform, backend=backend)[0] == page


def test_a_page_size_is_a_number():
    for value in (3, 16.0, True, "16"):
        with pytest.raises(ConfigError, match="page_size"):
            EngineConfig(model="x", page_size=value)
