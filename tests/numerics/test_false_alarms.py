"""Clean models that alarmed once: sharp attention, an amplified residual channel, few numbers. They
do not now, and faults are still seen on them.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

from twinfer.numerics.errors import EQUAL, FAILED
from twinfer.numerics.faults.planting import plant
from twinfer.numerics.judging.amplification import amplification
from twinfer.numerics.judging.gates import FOREIGN, Family, semantics
from twinfer.numerics.judging.logits_metrics import KL_LIMIT, compare_logits
from twinfer.numerics.judging.metrics import measure
from twinfer.numerics.questions.model import compare_model
from twinfer.numerics.showing.terminal import render
from twinfer.numerics.sides.steps import make_steps
from twinfer.numerics.sides.subject import parse_target

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import calibrate_gates as population

MODELS = {
    "residual channel": population.Model(
        40, "phi3", (3, 64, 96, 4, 4, 160), "bfloat16", (("residual channel", 300.0),)
    ),
    "sharp attention": population.Model(
        20, "llama", (8, 64, 128, 4, 1, 300), "bfloat16", (("sharp attention", 4.0),)
    ),
    "float32": population.Model(4, "mistral", (8, 64, 128, 4, 1, 300), "float32", ()),
}


def compared(name, folder, fault=None):
    model = MODELS[name]
    subject = population.open_model(model, folder)
    return compare_model(
        subject, [parse_target("torch:cpu")], make_steps(subject, population.prompts_of(model))[:2],
        modes=("P",) if name == "float32" else ("S",),
        faults={"a": plant(fault)} if fault else None,
    )  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_clean_model_does_not_alarm(name, tmp_path):
    diff = compared(name, tmp_path)
    assert diff.exit_code == EQUAL, render(diff)
    assert "would have seen" in render(diff)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("residual channel", "attention-scale-1e-3@1"),
        ("sharp attention", "attention-scale-1e-3@1"),
        # Beside a residual channel of 300, an epsilon of 1e-5 for 1e-6 is below rounding.
        ("sharp attention", "norm-eps@1"),
    ],
)
def test_a_small_fault_is_still_seen(name, fault, tmp_path):
    diff = compared(name, tmp_path, fault)
    assert diff.exit_code == FAILED
    assert diff.first_divergence().layer == 1


def test_what_an_op_amplifies_is_allowed_to_it_only():
    exact = np.full((4, 8), 1.0)

    def cancels(rng):
        return [exact * (1.0 + 1e-3 * rng.standard_normal(exact.shape))]

    def keeps(rng):
        return [exact * (1.0 + 2.0**-24 * rng.uniform(-1, 1, exact.shape))]

    ordinary, ill = (amplification(run, [exact])[0] for run in (keeps, cancels))
    plain = semantics("op", 64)
    assert semantics("op", 64, amplified=ordinary).rel_l2 == plain.rel_l2
    assert semantics("op", 64, amplified=ill).rel_l2 > 1e-3 > plain.rel_l2
    assert list(plain.complaints(measure(exact * 1.001, exact, exact)))


def test_limits_of_chance_grow_with_comparisons_and_shrink_with_numbers():
    few, many = Family(100), Family(100_000)
    assert few.deviations == pytest.approx(4.26, abs=0.01)
    assert many.spread(100) > few.spread(100) > few.spread(10_000) > 1.0
    assert many.spread(1) == float("inf")
    # The F distribution itself: of 200 000 ratios of 20 numbers each, 2 should exceed this limit.
    rng = np.random.default_rng(0)
    squares = rng.chisquare(20, (2, 200_000))
    exceeding = (np.sqrt(squares[0] / squares[1]) > few.spread(20)).sum()
    assert exceeding <= 8


def test_ties_of_a_foreign_side_have_the_noise_that_it_is_allowed():
    exact = np.array([[1.0, 1.0 - 6e-3, 0.0, -1.0]])
    faithful = exact + np.array([[1e-3, -1e-3, 1e-3, -1e-3]])
    other = exact + np.array([[-4e-3, 4e-3, 0.0, 0.0]])
    for limit, real in ((KL_LIMIT, 1), (FOREIGN**2, 0)):
        found = compare_logits(faithful, other, exact, faithful, None, "P", limit)
        assert found.real == real, limit
