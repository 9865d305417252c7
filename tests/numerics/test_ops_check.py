"""`twinfer numerics ops`: correct implementations pass, a wrong one is named, and what is not
compared is no pass.
"""

import gc
import json

import jax
import numpy as np
import pytest

from twinfer.numerics.questions import ops_check
from twinfer.numerics.questions.ops_check import check_ops, parts_of, render
from twinfer.numerics.showing.junit import suite_xml
from twinfer.numerics.showing.terminal import LINES
from twinfer.numerics.sides import one_op
from twinfer.numerics.sides.subject import parse_target
from twinfer.ops import REGISTRY
from twinfer.shared.errors import ConfigError

TORCH = parse_target("torch:cpu")
JAX = parse_target("jax:cpu")


def plant(monkeypatch, change):
    """Make torch wrong: `change(outputs)`."""

    def run(op, framework, *rest):
        outputs = right(op, framework, *rest)
        return change(outputs) if framework == "torch" else outputs

    right = one_op.run
    monkeypatch.setattr(one_op, "run", run)


def test_both_frameworks_pass():
    report = check_ops([JAX, TORCH], ["add", "greedy_sample"])
    assert report.exit_code == 0
    assert {(r.side[0], r.op) for r in report.results} == {
        (s, o) for s in "ab" for o in ("add", "greedy_sample")
    }
    assert all(r.compared for r in report.results)


def test_no_program_of_an_op_that_was_judged_is_kept():
    """A process has a limit of memory maps, and each program of JAX holds a hundred or so."""
    client = jax.devices("cpu")[0].client
    gc.collect()
    before = len(client.live_executables())
    report = check_ops([JAX], ["layer_norm"], modes=("S",))
    gc.collect()
    assert report.compared > 0
    assert len(client.live_executables()) <= before


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_all_ops_of_torch_pass_and_the_view_is_short(every):
    """Or one in so many of them."""
    report = check_ops([TORCH], [op.name for op in REGISTRY][::every])
    assert report.exit_code == 0, [r.complaints for r in report.failures] + report.missing
    assert len(render(report).splitlines()) <= LINES


def test_a_scale_off_by_one_percent_is_named(monkeypatch):
    plant(
        monkeypatch,
        lambda outputs: tuple((x.astype(np.float32) * 1.01).astype(x.dtype) for x in outputs),
    )
    report = check_ops([JAX, TORCH], ["add"])
    assert report.exit_code == 1
    assert {r.side for r in report.failures} == {"b torch:cpu"}
    assert "add=native" in render(report)
    assert json.loads(report.dumps())["exit_code"] == 1
    assert "<failure" in suite_xml(report)


def test_a_bit_of_an_exact_op_is_seen(monkeypatch):
    plant(
        monkeypatch,
        lambda outputs: tuple(x + (np.arange(x.size).reshape(x.shape) == 0) for x in outputs),
    )
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


@pytest.fixture
def plugin(monkeypatch):
    """A plug-in that is loaded when it is asked for: an op with cases, and one without that
    torch alone can run.
    """
    from twinfer.ops import define, implement
    from twinfer.ops.implement import IMPLEMENTATIONS
    from twinfer.ops.testing import TESTING, Bound, Case, Testing, judged_by

    before, judged = dict(REGISTRY.ops), dict(TESTING)

    def load():
        if "doubled" in REGISTRY.ops:
            return

        @define()
        def doubled(xp, x: "Array") -> "Array":  # noqa: F821
            return x + x

        @define(native="per framework")
        def torch_only(xp, x: "Array") -> "Array":  # noqa: F821
            return x

        implement("torch_only", provider="native", framework="torch")(lambda_of(lambda x: x))
        case = Case("numbers", {"x": np.arange(5, dtype=np.float32)})
        judged_by("doubled", Testing(lambda dtype: [case], Bound(), dtypes=("float32",)))

    def lambda_of(function):
        function.__signature__ = REGISTRY["torch_only"].signature
        return function

    monkeypatch.setattr(ops_check, "load_plugins", load)
    yield
    REGISTRY.ops.clear()
    REGISTRY.ops.update(before)
    TESTING.clear()
    TESTING.update(judged)
    IMPLEMENTATIONS.pop(("torch_only", "torch"), None)


def test_the_ops_of_a_plugin_are_known_and_judged(plugin):
    report = check_ops([JAX, TORCH], ["doubled"])
    assert report.exit_code == 0, report.missing
    assert [(r.op, r.compared) for r in report.results] == [("doubled", 1)] * 2
    report = check_ops([TORCH], ["torch_only"])
    assert report.exit_code == 3
    assert report.missing == ["torch_only has no cases"]


def test_what_nobody_expected_is_no_numeric_failure(monkeypatch, capsys):
    """Python itself leaves with 1 after a traceback, which says here that numbers differ."""
    from twinfer.serving.cli import main

    def broken(*args, **kwargs):
        raise ValueError("no such dot product")

    monkeypatch.setattr(ops_check, "check_ops", broken)
    assert main(["numerics", "ops", "--op", "add"]) == 5
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.splitlines()[-1] == "twinfer: error: ValueError: no such dot product"


def test_ops_that_a_reference_is_made_of_are_known():
    """A backend that has the op as one piece runs none of them; a mistake in one is ours."""
    assert parts_of("fused_add_rms_norm") == {"add", "rms_norm"}
    assert parts_of("linear") == set()


@pytest.mark.parametrize("fused", ["fused_add_rms_norm", "norm_rope_write_kv"])
def test_a_definition_is_judged_that_no_plan_names(fused):
    """All that stands in the plan is one piece; its parts' definitions are judged all the same."""
    target = parse_target(f"torch:cpu:{fused}=composition")
    names = sorted({fused, *parts_of(fused)})
    report = check_ops([target], names, modes=("S",), planned=True)
    ours = {r.op for r in report.results if r.side == "our definition"}
    assert "rms_norm" in ours
    assert {r.op for r in report.results if r.side != "our definition"} == {fused}
