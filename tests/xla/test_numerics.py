"""torch-xla as a side: three sides are equal, and a wrong native of torch is blamed on both that have
it.
"""

import subprocess
import sys

import pytest
import torch

from twinfer.numerics.questions.model import compare_model
from twinfer.numerics.questions.served import check_served
from twinfer.numerics.sides.steps import default_prompts, make_steps
from twinfer.numerics.sides.subject import open_subject, parse_target
from twinfer.ops.namespaces.torch_ import TorchNamespace

SIDES = ("jax:cpu", "torch:cpu", "torch-xla:cpu")
NATIVE = "torch:cpu:rms_norm=native,fused_add_rms_norm=composition,norm_rope_write_kv=composition"
"""Torch without its kernels in C for norms."""


def compared(mode, sides=SIDES):
    subject = open_subject("demo", dtype="bfloat16", tokens=16, max_num_seqs=2)
    steps = make_steps(subject, default_prompts(subject)[:2])[:2]
    return compare_model(subject, [*map(parse_target, sides)], steps, modes=(mode,), layers=(0,))


def to_blame(diff):
    targets = {finding.side.split()[1] for finding in diff.failures}
    return {":".join(target.split(":")[:2]) for target in targets}


@pytest.mark.parametrize("mode", ["S", "P"])
def test_three_sides_are_equal(mode):
    assert to_blame(compared(mode)) == set()


def test_what_its_engine_serves_is_judged_without_loops():
    """It has none, which is said."""
    subject = open_subject("demo", dtype="bfloat16")
    diff = check_served(subject, [parse_target(SIDES[2])], modes=("S",), definition="off")
    assert [run.run for run in diff.served] == ["steps"]
    assert diff.exit_code == 0
    (note,) = diff.notes
    assert note.startswith("a torch-xla:cpu: not run with loops of decode steps: decode_steps: ")


def test_a_wrong_native_of_torch_is_blamed_on_both_torch_sides(monkeypatch):
    wrong = staticmethod(lambda x: torch.rsqrt(x) * 1.01)
    monkeypatch.setattr(TorchNamespace, "rsqrt", wrong)
    diff = compared("S", ("jax:cpu", NATIVE, "torch-xla:cpu"))
    assert to_blame(diff) == {"torch:cpu", "torch-xla:cpu"}
    for side in diff.sides[1:]:
        assert "norm" in diff.first_divergence(side).name


EXCESS = """
import importlib.util, sys
import twinfer.xla.device as device
device.check_rounding = lambda: None
spec = importlib.util.spec_from_file_location("numerics_tests", sys.argv[1])
tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tests)
print(sorted(tests.to_blame(tests.compared("P"))))
"""


def test_roundings_that_xla_leaves_out_are_blamed_on_its_side_alone(monkeypatch):
    """The flag is read once in a process, where what refuses it is switched off. JAX's programs
    have an option of their own.
    """
    monkeypatch.setenv("XLA_FLAGS", "--xla_allow_excess_precision=true")
    command = [sys.executable, "-c", EXCESS, __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['torch-xla:cpu']"
