"""What the torch worker measures at a start, and how often it builds its programs: a CPU plays a
GPU.
"""

import pytest
import torch

from twinfer.gpu import worker
from twinfer.serving.llm import LLM
from twinfer.shared import config
from twinfer.shared.config import DeviceInfo
from twinfer.shared.errors import InternalError
from twinfer.shared.sampling_params import SamplingParams


class FakeReserved:
    """Addresses and memory at once: what `ReservedCache` promises, on a CPU."""

    granule, bytes, most = 1 << 21, 0, None

    def __init__(self, layers, max_pages, page, dtype, device):
        self.max_pages = min(max_pages, self.most or max_pages)
        self.layers = tuple(
            torch.zeros((self.max_pages + 1, *page), dtype=dtype) for _ in range(layers)
        )
        self.backed, self.freed = 1, False

    def back(self, pages):
        assert pages <= self.max_pages
        self.backed = pages

    def free(self):
        self.freed = True


def no_virtual_memory(*_):
    raise InternalError("not here")


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Starts an engine on the CPU that measures as on a GPU with 8 of 10 GiB free: (tokens,
    builds, worker, pages).
    """
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (8 << 30, 10 << 30))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(worker, "ReservedCache", FakeReserved)
    measure, build, builds = worker.TorchWorker.measure, worker.TorchWorker._build, []

    def on_a_gpu(self):
        here, self.device = self.device, DeviceInfo("cuda", "a GPU", 10 << 30)
        try:
            return measure(self)
        finally:
            self.device = here

    monkeypatch.setattr(worker.TorchWorker, "measure", on_a_gpu)
    monkeypatch.setattr(
        worker.TorchWorker, "_build", lambda self, table: (builds.append(1), build(self, table))[1]
    )

    # What was measured is kept where a GPU's code is.
    real = config.resolve_compilation
    monkeypatch.setattr(
        config, "resolve_compilation", lambda asked, _, *rest: real(asked, "cuda", *rest)
    )

    def start(**options):
        builds.clear()
        small = dict(
            backend="torch",
            device="cpu",
            dtype="float32",
            max_num_seqs=2,
            max_num_batched_tokens=16,
        )
        kept = {"level": 0, "cache_dir": str(tmp_path)}
        with LLM("demo", **small, max_model_len=64, compilation_config=kept, **options) as llm:
            made = llm.generate(
                [[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=4), progress=False
            )
            engine = llm.engine
            return (
                made[0].outputs[0].token_ids,
                len(builds),
                engine.worker._reserved,
                engine.report.num_pages,
            )

    return start


def test_programs_are_built_once(measured):
    """On reserved addresses the first time, from the start plan the second."""
    tokens, builds, reserved, pages = measured()
    assert (builds, pages) == (1, 8)
    assert reserved.backed == pages
    assert measured() == (tokens, 1, None, pages)
    again = measured(memory_utilization=0.8)
    assert again[:2] == (tokens, 1)
    assert again[2] is not None, "another configuration measures anew"


PAGE_BYTES = 5 * 16 * 2 * 2 * 64 * 4
"""Of the bundled model in float32: layers, slots, K and V, KV heads, head size, bytes."""


@pytest.mark.parametrize(("utilization", "pages"), [(0.9, 6), (0.89, 5), (0.88, 4), (1.0, 8)])
def test_the_cache_takes_the_part_of_the_memory_that_is_asked_for(
    measured, monkeypatch, utilization, pages
):
    """Of 100 pages 16.5 are free. What is not to be used stays free; more than 8 pages would be
    of no use.
    """
    total, free = 100 * PAGE_BYTES, 33 * PAGE_BYTES // 2
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, total))
    monkeypatch.setattr(FakeReserved, "granule", 0)
    assert measured(memory_utilization=utilization)[3] == pages


def test_a_start_without_virtual_memory_builds_twice(measured, monkeypatch):
    monkeypatch.setattr(worker, "ReservedCache", no_virtual_memory)
    with pytest.warns(UserWarning, match="built twice"):
        _, builds, reserved, pages = measured()
    assert (builds, reserved, pages) == (2, None, 8)


def test_no_more_pages_are_counted_than_were_reserved(measured, monkeypatch):
    """Another process may give memory back while this one measures."""
    monkeypatch.setattr(FakeReserved, "most", 5)
    assert measured()[3] == 5


def test_a_cache_larger_than_the_reserved_one_is_allocated_plainly(measured, monkeypatch):
    monkeypatch.setattr(FakeReserved, "most", 5)
    allocate, seen = worker.TorchWorker.allocate_kv, []

    def more(self, pages):
        seen.append(self._reserved)
        allocate(self, pages + 3)

    monkeypatch.setattr(worker.TorchWorker, "allocate_kv", more)
    _, builds, reserved, _ = measured()
    assert (builds, reserved) == (2, None)
    assert seen[0].freed
