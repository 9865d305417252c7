"""One of several ranks that sum through each other's memory, in Triton's interpreter: memory that
processes share stands for that of GPUs.

    python peer_process.py RANK WORLD FOLDER DTYPE
"""

import random
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import torch

from twinfer.gpu.kernels import exchange_kernels, reduce, reduce_kernels
from twinfer.ops.namespaces import namespace
from twinfer.ops.reference import quantization

WIDTH, ROWS, EPS = 48, 19, 1e-5
SUMS = (1, 3, 3, 2, 19, 1, 1, 1, 4, 1, 1, 11, 2, 1)
"""Rows of each sum: what lies in a row's place was written a different number of sums ago. Of
eleven and more rows programs have several.
"""
HAS_NAN = 3
"""The sum to which one rank adds a value with all bits set, as in memory that nobody wrote to."""
HAS_INFINITY, HAS_ZEROS = 5, 6
"""Exchanges of scales with a row of infinities and of what is no number, and with one of zeros."""


def files(folder, world):
    """memory(name, size): so many bytes of each rank, which all processes see."""

    def memory(name, size):
        return [
            np.memmap(folder / f"{name}{rank}", np.uint8, "r+", shape=size) for rank in range(world)
        ]

    return memory


def peers_of(rank, world, dtype, memory):
    def addresses(name, size):
        held.append(memory(name, size))
        return torch.tensor([each.ctypes.data for each in held[-1]], dtype=torch.int64)

    held = []
    zeros = [torch.zeros(ROWS, dtype=torch.int32) for _ in range(3)]
    late = torch.zeros(1, dtype=torch.int32)
    sums = addresses("sums", 2 * (world - 1) * ROWS * WIDTH * dtype.itemsize)
    best = addresses("best", 2 * world * 2 * ROWS * 8)
    scales = addresses("scales", 2 * world * ROWS * 8)
    places = zip((sums, best, scales), zeros, strict=True)
    boxes = [reduce.Boxes(ROWS, addresses, counts, late) for addresses, counts in places]
    return reduce.Peers(rank, world, WIDTH, dtype, tuple(held), *boxes)


def part_of(rank, number, rows, dtype):
    numbers = torch.Generator().manual_seed(100 * number + rank)
    part = torch.randn(rows, WIDTH, generator=numbers).to(dtype)
    if rank == 1 and number == HAS_NAN:
        part.view(torch.int8)[0, : dtype.itemsize] = -1
    return part


def same(a, b):
    return torch.equal(a.nan_to_num(97.0), b.nan_to_num(97.0))


def sum_all(peers):
    """Sums of several numbers of rows, with and without the norm, against what they are."""
    dtype, weight = peers.dtype, part_of(97, 0, 1, peers.dtype)[0]
    for number, rows in enumerate(SUMS):
        parts = [part_of(rank, number, rows, dtype) for rank in range(peers.world)]
        total = sum((part.float() for part in parts), torch.zeros(rows, WIDTH)).to(dtype)
        x, residual = parts[peers.rank].clone(), part_of(98, number, rows, dtype)
        if number % 3 == 2:
            reduce._launch(peers, x, None, None, 0.0)
            assert same(x, total), number
            continue
        stream = (total.float() + residual.float()).to(dtype)
        y = stream.float()
        normed = y * torch.rsqrt(y.square().mean(1, keepdim=True) + EPS) * weight.float()
        reduce._launch(peers, x, residual, weight, EPS)
        assert same(residual, stream), number
        torch.testing.assert_close(x, normed.to(dtype), rtol=1e-2, atol=1e-5, equal_nan=True)


def choose_all(peers):
    """The best of all words: the first of equal ones, none where a logit was not finite."""
    words = 5
    for number in range(4):
        numbers = torch.Generator().manual_seed(number)
        # so few values that shards have equal best ones
        logits = torch.randint(0, 3, (ROWS, peers.world * words), generator=numbers).float()
        logits[1, (number * 3) % logits.shape[1]] = float("nan")
        own = logits[:, peers.rank * words : (peers.rank + 1) * words].contiguous()
        tokens = own.argmax(1).to(torch.int32)
        tokens[~own.isfinite().all(1)] = -1
        found = reduce._best(peers, tokens, own)
        want = logits.argmax(1).to(torch.int32)
        want[1] = -1
        assert torch.equal(found, want), (number, found, want)


def scale_all(peers):
    """Scales of rows of which each rank has a part, of any number of entries."""
    numpy = namespace("numpy")
    for number, rows in enumerate(SUMS):
        parts = [part_of(rank, number, rows, peers.dtype) for rank in range(peers.world)]
        parts[number % peers.world][rows // 2, :3] = torch.tensor([40.0, -60.0, 5.0])
        for part in parts if number == HAS_INFINITY else ():
            part[0] = torch.tensor([float("inf"), *[float("nan")] * (WIDTH - 1)])
        if number == HAS_ZEROS:
            for part in parts:
                part[0] = 0.0
        width = WIDTH - number % 2 * 5
        whole = torch.cat([part[:, :width] for part in parts], 1).float().numpy()
        limit = (127.0, 448.0)[number % 2]
        found = reduce._scales(peers, parts[peers.rank][:, :width], limit)
        want = quantization.scale_of(numpy, quantization.largest_of_rows(numpy, whole), limit)
        assert np.array_equal(found.numpy(), want), (number, found, want)


def lose_all(peers):
    """The peers do not come, for they have ended."""
    exchange_kernels.SPINS.value = 3
    x = part_of(peers.rank, 0, 1, peers.dtype)
    reduce._launch(peers, x, None, None, 0.0)
    assert x.isnan().all()
    assert peers.sums.late.tolist() == [1]
    logits = torch.zeros(2, 3)
    assert reduce._best(peers, torch.zeros(2, dtype=torch.int32), logits).tolist() == [-1, -1]
    assert reduce._scales(peers, x, 127.0).isnan().all()


def sum_of(rows):
    """(the memory that it goes through, what a rank does for its sum number `number`)."""

    def ask(peers, number):
        x = part_of(peers.rank, number, rows, peers.dtype)
        reduce._launch(peers, x, None, None, 0.0)
        return x

    return "sums", ask


def choice(peers, number):
    numbers = torch.Generator().manual_seed(2 * number + peers.rank)
    logits = torch.randn(ROWS, 5, generator=numbers)
    return reduce._best(peers, logits.argmax(1).to(torch.int32), logits)


def scale(peers, number):
    return reduce._scales(peers, part_of(peers.rank, number, ROWS, peers.dtype), 127.0)


# A program has one row of few, and several of many.
TURNS = (sum_of(1), ("best", choice), sum_of(ROWS), ("scales", scale))


def answers(name, ask, dtype, order):
    """Of two ranks with memory in this process alone, of which the second never waits: what the
    first is answered, and into which half of its memory the second sends each time. `order` says
    who asks.
    """

    @cache
    def memory(name, size):
        value = reduce.EMPTY if name == "sums" else 0
        return [np.full(size, value, np.uint8) for _ in range(2)]

    ranks = [peers_of(rank, 2, dtype, memory) for rank in range(2)]
    own = ranks[0].held[("sums", "best", "scales").index(name)][0].reshape(2, -1)
    asked, found, halves = [0, 0], [], []
    for rank in order:
        before = own.copy()
        answer = ask(ranks[rank], asked[rank])
        asked[rank] += 1
        if rank == 0:
            found.append(answer)
        else:
            halves.append((own != before).any(1).tolist())
    assert ranks[0].sums.late.tolist() == [0], f"{name}: something did not come"
    return found, halves


def take_turns(rank, world, dtype):
    """A rank sends twice before the other one has read: neither is lost, as they lie in one of two
    places by turns. The ranks share the questions.
    """
    exchange_kernels.SPINS.value = 0
    for name, ask in TURNS[rank::world]:
        want, _ = answers(name, ask, dtype, (1, 0, 1, 0, 1, 0))
        found, (first, second, third) = answers(name, ask, dtype, (1, 1, 0, 0, 1, 0))
        assert sorted([first, second]) == [[False, True], [True, False]], (name, first, second)
        assert third == first, (name, first, third)
        assert all(same(a, b) for a, b in zip(found, want, strict=True)), (name, found, want)


def read_late(rank):
    """Let this rank send at once and read late, at random: the others begin the next exchange
    meanwhile.
    """
    chance = random.Random(rank)
    for module in (exchange_kernels, reduce_kernels):

        def late(*arguments, read=module._awaited):
            time.sleep(chance.choice((0.0,) * 19 + (0.5,)))
            return read(*arguments)

        module._awaited = late


def main():
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dtype = getattr(torch, sys.argv[4])
    # First: without turns the ranks may wait for each other forever.
    take_turns(rank, world, dtype)
    peers = peers_of(rank, world, dtype, files(folder, world))
    # The peers come in the end, however late: the test ends all where one of them fails.
    exchange_kernels.SPINS.value = 1 << 30
    read_late(rank)
    sum_all(peers)
    choose_all(peers)
    scale_all(peers)
    if rank == 0:
        lose_all(peers)


if __name__ == "__main__":
    main()
