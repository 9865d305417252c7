"""Whose counters a launch takes: those of its stream, and of its recorder while a graph captures
it.
"""

import gc
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch

from twinfer.bucketing import Descriptor
from twinfer.gpu import graphs
from twinfer.gpu.kernels import counters as module
from twinfer.gpu.kernels.counters import counters
from twinfer.ops.declare import OpError
from twinfer.shared.compilation_config import CUDAGraphMode

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
D = Descriptor("decode", 1, 1, 1)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose graphs run nothing; `stream` is the current stream, `capturing` whether it is
    captured.
    """
    state = SimpleNamespace(stream=1, capturing=False)
    numbers = itertools.count(100)

    class Graph:
        def capture_begin(self, **_):
            state.capturing = True

        def capture_end(self):
            state.capturing = False

        def replay(self):
            pass

    fakes = {
        "current_stream": lambda *_: SimpleNamespace(cuda_stream=state.stream),
        "is_current_stream_capturing": lambda: state.capturing,
        "current_device": lambda: 0,
        "graph_pool_handle": lambda: (0, 1),
        "Stream": lambda: SimpleNamespace(cuda_stream=next(numbers), device=GPU),
        "CUDAGraph": Graph,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for owner in (module, graphs):
        monkeypatch.setattr(
            owner, "make_counters", lambda device: torch.zeros(8, dtype=torch.int32)
        )
    monkeypatch.setattr(module, "_of_streams", {})
    monkeypatch.setattr(graphs, "_idle_streams", graphs.defaultdict(list))
    return state


def test_streams_have_counters_of_their_own(gpu):
    first = counters(GPU)
    assert counters(GPU) is first
    gpu.stream = 2
    second = counters(GPU)
    assert second is not first
    gpu.stream = 1
    assert counters(GPU) is first
    gpu.stream, gpu.capturing = 3, True
    with pytest.raises(OpError, match="once on a stream before"):
        counters(GPU)


def test_graphs_have_the_counters_of_their_recorder(gpu):
    """Two engines that capture on one stream, one after the other, replay on any."""
    direct, found = counters(GPU), []
    for _ in range(2):
        recorder = graphs.GraphRecorder()
        for _ in range(2):
            recorder.capture(D, CUDAGraphMode.FULL, lambda: found.append(counters(GPU)))
        del recorder
        gc.collect()
    assert found[0] is found[1]
    assert found[2] is found[3]
    assert found[0] is not found[2]
    assert counters(GPU) is direct
    assert all(direct is not of_graph for of_graph in found)


def test_streams_of_recorders_that_are_gone_are_used_again(gpu):
    first, second = graphs.GraphRecorder(), graphs.GraphRecorder()
    streams = first.stream, second.stream
    assert streams[0] is not streams[1]
    del first
    gc.collect()
    third = graphs.GraphRecorder()
    assert third.stream is streams[0]
    assert second.stream is streams[1]


def test_threads_of_the_interpreter_have_counters_of_their_own():
    here, there = counters(CPU), []
    thread = threading.Thread(target=lambda: there.append(counters(CPU)))
    thread.start()
    thread.join()
    assert counters(CPU) is here
    assert there[0] is not here
