"""Weights that several threads read, and put where they lie."""

from __future__ import annotations

import time
import tracemalloc
from functools import partial
from unittest.mock import MagicMock

import ml_dtypes
import numpy as np
import pytest
import torch

from twinfer.gpu import uploads
from twinfer.gpu.uploads import Uploads
from twinfer.shared import reading_ahead

RNG = np.random.default_rng(0)


def sealed(values):
    """As arrays of a mapped file are: not to be written to."""
    values.flags.writeable = False
    return values


def stored(shape, dtype):
    return sealed(RNG.uniform(-3, 3, shape).astype(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("staged", [64, 1 << 12, 1 << 20])
@pytest.mark.parametrize(
    ("kept", "held"),
    [
        (ml_dtypes.bfloat16, torch.bfloat16),
        (np.float32, torch.bfloat16),
        (np.float16, torch.float32),
        (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
        (np.uint8, torch.uint8),
    ],
)
def test_weights_are_the_entries_of_the_arrays(monkeypatch, device, staged, kept, held):
    """Rows that one buffer does not hold too, parts behind one another, columns of others."""
    monkeypatch.setattr(uploads, "STAGING_BYTES", staged)
    whole, upper, lower, vector = (stored(s, kept) for s in ((37, 90), (50, 33), (14, 33), (1001,)))
    columns = sealed(whole[:, 11:61])
    cases = [
        (whole, [((), whole)]),
        (np.concatenate([upper, lower]), [((slice(0, 50),), upper), ((slice(50, 64),), lower)]),
        (columns, [((slice(0, 37), slice(0, 20)), columns[:, :20]),
                   ((slice(0, 37), slice(20, 50)), columns[:, 20:])]),
        (vector, [((slice(0, 1001),), vector)]),
        (np.broadcast_to(vector[3], (5, 7)), [((), np.broadcast_to(vector[3], (5, 7)))]),
    ]  # fmt: skip
    targets = [torch.zeros(expected.shape, dtype=held, device=device) for expected, _ in cases]
    with Uploads(torch.empty(0, device=device).device) as threads:
        begun = [
            threads.start(target, lambda entries=entries: entries)
            for target, (_, entries) in zip(targets, cases, strict=True)
        ]
        for each in begun:
            each.result()
    for target, (expected, _) in zip(targets, cases, strict=True):
        wide = torch.from_numpy(expected.astype(np.float32)).to(held).float()
        assert torch.equal(target.cpu().float(), wide)


@pytest.mark.gpu
def test_what_is_read_waits_for_what_the_memory_was_used_for(device):
    """Memory that was given back may still be read by what was launched before."""
    where = torch.empty(0, device=device).device
    values = stored((1 << 20,), np.float32)
    with Uploads(where) as threads:
        for _ in range(8):
            used = torch.full((1 << 20,), 7.0, device=device)
            for _ in range(50):
                used = used * 1.0 + 0.0
            total = used.sum()
            del used
            target = torch.empty(1 << 20, device=device)
            threads.start(target, lambda: [((), values)]).result()
            assert total.item() == 7.0 * (1 << 20)
            assert np.array_equal(target.cpu().numpy(), values)


@pytest.mark.parametrize("shape", [(1 << 13, 1 << 10), (1 << 23,), (3, 1 << 21)])
def test_what_is_rounded_is_not_held_a_second_time(shape):
    """Several threads do so at once, with tensors of gigabytes."""
    values, target = stored(shape, np.float32), torch.zeros(shape, dtype=torch.bfloat16)
    tracemalloc.start()
    uploads.copy(target, values)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert torch.equal(target, torch.from_numpy(np.array(values)).bfloat16())
    assert peak < values.nbytes // 2


def test_an_error_ends_all_that_has_not_begun(monkeypatch):
    monkeypatch.setattr(reading_ahead, "READERS", 1)
    began = []

    def reads(number):
        began.append(number)
        if number == 1:
            raise ValueError("no number")
        if number > 1:
            time.sleep(0.01)
        yield (), stored((2,), np.float32)

    def load():
        with Uploads(torch.device("cpu")) as threads:
            every = [threads.start(torch.zeros(2), partial(reads, i)) for i in range(1000)]
            for each in every:
                each.result()

    with pytest.raises(ValueError, match="no number"):
        load()
    assert began[:2] == [0, 1]
    assert len(began) < 500


def test_too_little_memory_for_what_a_thread_has_is_said_as_such(monkeypatch):
    """The worker advises then, and its process ends by a code of its own."""

    def full():
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", MagicMock)
    monkeypatch.setattr(uploads, "Staging", full)
    with Uploads(torch.device("cuda", 0)) as threads:
        begun = threads.start(torch.zeros(2), lambda: [((), stored((2,), np.float32))])
        with pytest.raises(torch.OutOfMemoryError, match="none left"):
            begun.result()
