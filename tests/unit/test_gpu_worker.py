"""What a GPU's worker gives back when it is closed, shown without a GPU."""

from types import SimpleNamespace

import pytest
import torch

from twinfer.gpu import worker as worker_module
from twinfer.gpu.kernels import reduce
from twinfer.shared.errors import InternalError


def test_other_ranks_are_left_although_the_cache_is_not_freed(monkeypatch):
    """Memory of a peer that nobody lets go of is lost for as long as this process lives."""

    def fail():
        raise InternalError("the KV cache was not freed")

    left = []
    monkeypatch.setattr(worker_module, "chooses", lambda plans, provider: provider == "peers")
    monkeypatch.setattr(reduce, "leave_peers", lambda: left.append(True))
    worker = worker_module.TorchWorker.__new__(worker_module.TorchWorker)
    worker._where, worker._ranks, worker._plans = torch.device("cpu"), object(), None
    worker._reserved = SimpleNamespace(free=fail)
    worker.end_pool = lambda: None
    with pytest.raises(InternalError, match="was not freed"):
        worker.close()
    assert left == [True]
