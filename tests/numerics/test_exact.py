"""Mode X: probes are exact, correct implementations give their bits, and a wrong index or
rounding shows.
"""

import subprocess
import sys

import numpy as np
import pytest

from twinfer.numerics.faults.catalogue import plant
from twinfer.numerics.questions.exact import ExactComparison, ExactJudge
from twinfer.numerics.questions.exact_probes import PROBES, probes
from twinfer.numerics.questions.ops_check import check_ops
from twinfer.numerics.questions.selftest_model import LAYER, open_model
from twinfer.numerics.sides.reference import evaluate
from twinfer.numerics.sides.side import WorkerSide
from twinfer.numerics.sides.steps import default_prompts, make_steps
from twinfer.numerics.sides.subject import parse_target
from twinfer.ops.cases import load_all
from twinfer.ops.testing import TESTING, ci_cases
from twinfer.shared.step import PageEntries

load_all()
TORCH = parse_target("torch:cpu")
NEEDS_ROUNDING = {("fused_add_rms_norm", "sums that are rounded")}
"""Probes of a rounding inside of an op: without it the result is another."""


@pytest.mark.parametrize("op", list(PROBES))
def test_probes_are_exact(op):
    """With the inner roundings of the op, without them, and in another order of sums: the same
    bits.
    """
    compared = 0
    for dtype in TESTING[op].dtypes:
        for case in ci_cases(TESTING[op], dtype):
            for probe in probes(op, case.arguments, seed=3):
                judge, compared = ExactJudge(op, probe.arguments), compared + 1
                likes = [want.dtype for want in judge.wanted]
                exact = evaluate(op, probe.arguments, exact=True)
                wide = [x.astype(np.float32) if x.dtype == np.float64 else x for x in exact]
                if (op, probe.name) not in NEEDS_ROUNDING:
                    verdict = judge([x.astype(like) for x, like in zip(wide, likes, strict=True)])
                    assert verdict.passed, (case.name, probe.name, verdict)
                faithful = evaluate(op, probe.arguments, exact=False)
                verdict = judge(
                    [np.asarray(x).astype(like) for x, like in zip(faithful, likes, strict=True)]
                )
                assert verdict.passed, (case.name, probe.name, verdict)
    assert compared


def test_torch_gives_the_bits_of_all_probes():
    report = check_ops([parse_target("torch:cpu")], modes=("X",))
    assert report.exit_code == 0, [r.complaints for r in report.failures] + report.missing
    assert {r.op for r in report.results} >= set(PROBES)
    assert {r.mode for r in report.results} == {"X"}


@pytest.mark.parametrize("op", [
    "linear",
    *(pytest.param(op, marks=pytest.mark.slow)
      for op in ("norm_rope_write_kv", "paged_attention", "moe_experts")),
])  # fmt: skip
def test_jax_gives_the_bits_of_probes(op):
    report = check_ops([parse_target("jax:cpu")], [op], modes=("X",))
    assert report.exit_code == 0, [r.complaints for r in report.failures] + report.missing


def test_one_bit_another_dtype_and_another_shape_are_seen():
    probe = probes("linear", next(iter(ci_cases(TESTING["linear"], "bfloat16"))).arguments)[0]
    judge = ExactJudge("linear", probe.arguments)
    right = judge.wanted[0]
    assert judge([right]).passed
    wrong = right.copy()
    wrong[1, 2] = np.nextafter(wrong[1, 2], np.array(np.inf, right.dtype))
    assert judge([wrong]).where == "output 0, element (1, 2)"
    assert not judge([right.astype(np.float32)]).passed
    assert not judge([right[:1]]).passed


def test_the_first_op_that_is_asked_for_has_its_probes():
    """In a process that has loaded no cases: which ops are judged bitwise, these say."""
    code = (
        "import numpy as np\n"
        "from twinfer.numerics.questions.exact_probes import probes\n"
        "table = {'token_ids': np.zeros(3, np.int32), 'weight': np.ones((4, 2), np.float32)}\n"
        "print(len(probes('embedding', table)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "1"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A small model on torch, probed without a fault, and its steps."""
    subject = open_model(tmp_path_factory.mktemp("exact"), 1)
    steps = make_steps(subject, default_prompts(subject, 1))
    comparison = ExactComparison(subject)
    comparison.run({"torch": WorkerSide(subject, TORCH, steps)}, steps).assert_ok()
    return comparison, steps


def planted(compared, fault):
    comparison, steps = compared
    return comparison.run({"torch": WorkerSide(comparison.subject, TORCH, steps, fault)}, steps)


@pytest.mark.parametrize(
    ("name", "tap"),
    [("mask-shows-next-key", "paged_attention"),
    ("rounding-dropped", "fused_add_rms_norm[input_norm]#0"),
     ("split-k-rounded", "linear[qkv]")],
)  # fmt: skip
def test_a_fault_of_a_model_is_found_where_it_is(compared, name, tap):
    diff = planted(compared, plant(f"{name}@{LAYER}"))
    assert diff.exit_code == 1
    assert diff.first_divergence().name == f"layer.{LAYER}.{tap}"
    assert {f.layer for f in diff.failures} == {LAYER}


def test_wrong_rotary_tables_are_named(compared):
    diff = planted(compared, plant("rope-base"))
    assert diff.exit_code == 1
    assert "the rotary table cos is wrong at" in diff.problems[0]


def test_page_tables_that_are_not_those_of_the_step_are_named(compared, monkeypatch):
    taken = PageEntries.take

    def lost(self, step):
        index, pages = taken(self, step)
        return index[1:], pages[1:]

    monkeypatch.setattr(PageEntries, "take", lost)
    diff = planted(compared, None)
    assert diff.exit_code == 1
    assert "the page table on the device is wrong in 1 entries after step" in diff.problems[0]
    assert not diff.failures


def test_wrong_weights_are_named(compared):
    diff = planted(compared, plant(f"gate-up-loaded-swapped@{LAYER}"))
    assert diff.exit_code == 1
    assert f"weights layer.{LAYER}.gate_up differ" in diff.problems[0]
