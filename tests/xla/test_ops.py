"""Every op as torch-xla compiles it keeps its contract: the implementation that a plan takes, traced
and run as programs are.
"""

import pytest
import torch

from twinfer.ops import REGISTRY, resolve
from twinfer.ops.cases import load_all
from twinfer.ops.native.torch_static import XLA
from twinfer.ops.testing import TESTING, Judge, ci_cases
from twinfer.shared.errors import InternalError
from twinfer.xla.device import place_of, start
from twinfer.xla.one_op import run_op
from twinfer.xla.traced import trace
from twinfer.xla.words import Words

start("cpu")
load_all()
PLAN = resolve("torch", platform=XLA)
OPS = sorted(op.name for op in REGISTRY if op.reference.__module__.startswith("twinfer."))


@pytest.mark.parametrize("op", OPS)
def test_an_op_keeps_its_contract(op):
    failures = []
    for dtype in TESTING[op].dtypes:
        for case in ci_cases(TESTING[op], dtype):
            try:
                got = run_op(op, getattr(PLAN.bind(), op), case.arguments)
            except InternalError as error:
                assert "cannot read the bits" in str(error)  # noqa: PT017 - fp8: refused, not wrong
                assert (
                    any(
                        getattr(x, "dtype", None) == "float8_e4m3fn"
                        for x in case.arguments.values()
                    )
                    or "fp8" in op
                )
                continue
            verdict = Judge(op, case.arguments)(got)
            if not verdict.passed:
                failures.append(f"{dtype}, {case.name}: {verdict}")
    assert not failures, "\n".join(failures)


def test_without_its_words_torch_xla_shifts_wrongly():
    """What `Words` is for: else this test says that it may go."""
    x = torch.tensor([-5, 7], dtype=torch.int32).to(place_of(None))
    assert (x >> 1).cpu().tolist() == [-2, 3]
    with Words():
        assert (x >> 1).cpu().tolist() == [-3, 3]
        assert (1 << x.clamp(min=3)).cpu().tolist() == [8, 128]
        bits = torch.tensor([1.5]).to(place_of(None)).view(torch.int32)
        assert bits.cpu().tolist() == [0x3FC00000]
        assert torch.tensor([1.0, float("nan")]).to(place_of(None)).amax(0).cpu().isnan()


def test_a_program_that_needs_the_host_is_refused():
    given = (torch.tensor([3, 1]).to(place_of(None)),)
    with pytest.raises((InternalError, RuntimeError)):
        trace("reads", lambda held, x: x * int(x[0]), None, given)
    with pytest.raises(InternalError, match="on the host"):
        trace("falls back", lambda held, x: torch.unique(x), None, given)


def test_arguments_that_are_one_tensor_are_refused():
    x = torch.ones(3).to(place_of(None))
    with pytest.raises(InternalError, match="are one tensor"):
        trace("twice", lambda held, a, b: a + b, None, (x, x.detach()))


def test_a_donated_argument_is_overwritten_and_an_unused_one_is_refused():
    def make():
        return torch.zeros(1000).to(place_of(None)), torch.ones(2).to(place_of(None))

    def add(held, x, y):
        index = torch.tensor([1, 2]).to(x.device)
        return x.index_copy(0, index, y), y * 2.0

    program = trace("add", add, None, make(), (0,))
    x, y = make()
    new, twice = program(x, y)
    again, _ = program(new, y)
    assert again.cpu()[:4].tolist() == [0, 1, 1, 0]
    assert twice.cpu().tolist() == [2, 2]
    for gone in (x, new):
        with pytest.raises(RuntimeError):
            gone.cpu()
    with pytest.raises(InternalError, match="does not read"):
        trace("unused", lambda held, x, y: y + 1.0, None, make(), (0,))
    with pytest.raises(InternalError, match="as it was"):
        trace("back", lambda held, x, y: (x, y + 1.0), None, make(), (0,))


def test_a_program_follows_its_arguments():
    """And not the tensors that it was traced with, though others were traced with them before."""
    where = place_of(None)
    a, b = torch.zeros(3).to(where), torch.ones(3).to(where)
    first = trace("first", lambda held, x, y: x + y, None, (a, b))
    second = trace("second", lambda held, x, y: (x * 2.0 - y, x, None), None, (a, b))
    new = torch.full((3,), 5.0).to(where)
    assert first(new, b).cpu().tolist() == [6.0] * 3
    got, same, nothing = second(new, b)
    assert got.cpu().tolist() == [9.0] * 3
    assert same is new
    assert nothing is None
