"""`twinfer numerics ops`: correct implementations pass, a wrong one is named, and what is not compared is no pass."""

import json

import numpy as np
import pytest

from twinfer.numerics import ops_check
from twinfer.numerics.junit import suite_xml
from twinfer.numerics.ops_check import check_ops, render
from twinfer.numerics.subject import parse_target
from twinfer.numerics.terminal import LINES
from twinfer.shared.errors import ConfigError

TORCH = parse_target("torch:cpu")
JAX = parse_target("jax:cpu")


def plant(monkeypatch, change):
    """Make torch wrong: `change(outputs)`."""

    def run(op, framework, provider, arguments, device="cpu"):
        outputs = right(op, framework, provider, arguments, device)
        return change(outputs) if framework == "torch" else outputs

    right = ops_check.run
    monkeypatch.setattr(ops_check, "run", run)


def test_both_frameworks_pass():
    report = check_ops([JAX, TORCH], ["add", "greedy_sample"])
    assert report.exit_code == 0
    assert {(r.side[0], r.op) for r in report.results} == {(s, o) for s in "ab" for o in ("add", "greedy_sample")}
    assert all(r.compared for r in report.results)


def test_all_ops_of_torch_pass_and_the_view_is_short():
    report = check_ops([TORCH])
    assert report.exit_code == 0, [r.complaints for r in report.failures] + report.missing
    assert len(render(report).splitlines()) <= LINES


def test_a_scale_off_by_one_percent_is_named(monkeypatch):
    plant(monkeypatch, lambda outputs: tuple((x.astype(np.float32) * 1.01).astype(x.dtype) for x in outputs))
    report = check_ops([JAX, TORCH], ["add"])
    assert report.exit_code == 1
    assert {r.side for r in report.failures} == {"b torch:cpu"}
    assert "add=native" in render(report)
    assert json.loads(report.dumps())["exit_code"] == 1
    assert "<failure" in suite_xml(report.cases(), report.missing)


def test_a_bit_of_an_exact_op_is_seen(monkeypatch):
    plant(monkeypatch, lambda outputs: tuple(x + (np.arange(x.size).reshape(x.shape) == 0) for x in outputs))
    plant(monkeypatch, lambda outputs: tuple(x.astype(np.int32) for x in outputs))
    assert check_ops([TORCH], ["greedy_sample"]).exit_code == 1


def test_what_raises_was_not_compared(monkeypatch):
    def fails(outputs):
        raise RuntimeError("no kernel")

    plant(monkeypatch, fails)
    report = check_ops([TORCH], ["add"])
    assert report.exit_code == 3
    assert "no kernel" in report.missing[0]


def test_an_implementation_named_but_not_here_is_missed():
    report = check_ops([parse_target("torch:cpu:rms_norm=triton")], ["rms_norm"])
    assert report.exit_code == 3
    assert "rms_norm=triton" in report.missing[0]


@pytest.mark.parametrize(("target", "op"), [("torch:cpu", "nope"), ("torch:cpu:add=nobody", "add")])
def test_names_are_checked(target, op):
    with pytest.raises(ConfigError, match=r"nope|nobody"):
        check_ops([parse_target(target)], [op])
