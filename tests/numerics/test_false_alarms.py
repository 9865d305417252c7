"""Clean models that alarmed once: sharp attention, an amplified residual channel, few numbers. They
do not now, and faults are still seen on them.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from twinfer.numerics.errors import EQUAL, FAILED, NOT_COMPARED
from twinfer.numerics.faults.catalogue import plant
from twinfer.numerics.judging.amplification import amplification
from twinfer.numerics.judging.chance import ratio_limit
from twinfer.numerics.judging.diff import (
    POOLED_SIGMA,
    Diff,
    Finding,
    pooled_layers,
    pooled_problems,
    pooled_sides,
)
from twinfer.numerics.judging.gates import FOREIGN, Family, precision, semantics
from twinfer.numerics.judging.logits_metrics import KL_LIMIT, compare_logits
from twinfer.numerics.judging.metrics import measure
from twinfer.numerics.judging.outputs import OpJudge
from twinfer.numerics.questions.invariants import RELATIONS, Lab
from twinfer.numerics.questions.invariants import Judge as RelationJudge
from twinfer.numerics.questions.model import Comparison, compare_model
from twinfer.numerics.showing.terminal import render
from twinfer.numerics.sides.jitter import Jitter
from twinfer.numerics.sides.reference import evaluate
from twinfer.numerics.sides.steps import make_steps
from twinfer.numerics.sides.subject import parse_target
from twinfer.numerics.sides.taps import Call, Declared
from twinfer.ops.cases import load_all
from twinfer.ops.testing import Judge

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import calibrate_gates as population

MODELS = {
    "residual channel": population.Model(
        40,
        "phi3",
        (3, 64, 96, 4, 4, 160),
        "bfloat16",
        (("residual channel", 300.0),),
        "calibration",
    ),
    "sharp attention": population.Model(
        20, "llama", (8, 64, 128, 4, 1, 300), "bfloat16", (("sharp attention", 4.0),), "calibration"
    ),
    "float32": population.Model(
        4, "mistral", (8, 64, 128, 4, 1, 300), "float32", (), "calibration"
    ),
}


def compared(name, folder, fault=None):
    model = MODELS[name]
    subject = population.open_model(model, folder)
    return compare_model(
        subject, [parse_target("torch:cpu")], make_steps(subject, population.prompts_of(model, 0))[:2],
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

    ordinary, ill = (amplification(run, [exact], 32)[0] for run in (keeps, cancels))
    plain = semantics("op", 64)
    assert semantics("op", 64, amplified=ordinary).rel_l2 == plain.rel_l2
    assert semantics("op", 64, amplified=ill).rel_l2 > 1e-3 > plain.rel_l2
    assert list(plain.complaints(measure(exact * 1.001, exact, exact)))


def test_an_ordinary_composition_is_allowed_no_more_than_its_sums():
    """Its parts amplify; it rounds nothing besides them."""
    rng = np.random.default_rng(0)
    shapes = {"x": (64, 64), "gate_up": (192, 64), "down": (64, 96)}
    arguments = {
        name: (rng.normal(size=shape) * (shape[-1] ** -0.5 if name != "x" else 1.0)).astype("f4")
        for name, shape in shapes.items()
    }
    arguments |= {"gate_up_bias": None, "down_bias": None}
    amplified = amplification(
        lambda rng: evaluate("gated_mlp", arguments, exact=True, tracer=Jitter(rng)),
        evaluate("gated_mlp", arguments, exact=True),
        32,
    )[0]
    assert semantics("op", 96, amplified=amplified).rel_l2 == semantics("op", 96).rel_l2


def test_limits_of_chance_grow_with_comparisons_and_shrink_with_numbers():
    few, many = Family(100), Family(100_000)
    assert many.spread(100) > few.spread(100) > few.spread(10_000) > 1.0
    # A number beside so many that nothing is left to chance is a normal one, on both its sides.
    assert few.spread(1, 1e6) == pytest.approx(4.417, abs=0.001)
    assert few.spread(1, 8) > few.spread(1, 32) > few.spread(1, 1e6)
    # The F distribution itself: of 200 000 ratios of 20 numbers each, 2 should exceed this limit.
    rng = np.random.default_rng(0)
    squares = rng.chisquare(20, (2, 200_000))
    exceeding = (np.sqrt(squares[0] / squares[1]) > few.spread(20)).sum()
    assert exceeding <= 10


def test_ties_of_a_foreign_side_have_the_noise_that_it_is_allowed():
    exact = np.array([[1.0, 1.0 - 1e-2, 0.0, -1.0]])
    faithful = exact + np.array([[1e-3, -1e-3, 1e-3, -1e-3]])
    other = exact + np.array([[-6e-3, 6e-3, 0.0, 0.0]])
    for limit, real in ((KL_LIMIT, 1), (FOREIGN**2, 0)):
        found = compare_logits(faithful, other, exact, faithful, None, "P", limit)
        assert found.real == real, limit


@pytest.mark.parametrize(
    ("numbers", "beside", "tail", "limit"),
    [
        # sqrt(scipy.stats.f.isf(tail, numbers, beside))
        (8, 8, 1e-6, 8.6782),
        (1, 32, 1e-6, 6.0283),
        (4.3, 32, 1e-6, 3.6717),
        (20, 640, 1e-8, 2.0162),
        (5000, 5000, 1e-6, 1.0696),
    ],
)
def test_limits_are_quantiles_of_the_f_distribution(numbers, beside, tail, limit):
    assert ratio_limit(numbers, beside, tail) == pytest.approx(limit, abs=2e-4)


load_all()


def judged(op, arguments, got):
    call = Call(op, op, (), arguments, frozenset(), (got,))
    declared = Declared(op, op, (), True)
    return OpJudge("S", [call], len(got), 512)(declared, {}, [got])[0]


def test_sums_behind_a_large_first_term_are_no_fault():
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=(n, 512)).astype(np.float32) for n in (64, 512))
    x[:, 0], weight[:, 0] = 16500.0, 1.0
    products = x[:, None, :] * weight
    worst_order = np.cumsum(products, axis=-1, dtype=np.float32)[..., -1]
    arguments = {"x": x, "weight": weight, "bias": None}
    # What is beyond the op's own bound alone, float32 explains.
    assert not Judge("linear", arguments)([worst_order]).passed
    assert not judged("linear", arguments, worst_order).complaints
    last_term_lost = np.cumsum(products[..., :-1], axis=-1, dtype=np.float32)[..., -1]
    assert judged("linear", arguments, last_term_lost).complaints


def test_a_product_and_a_sum_may_be_one_operation():
    rng = np.random.default_rng(0)
    factor, other, residual = (rng.normal(size=(32, 64)).astype(np.float32) for _ in range(3))
    exact = factor.astype(np.float64) * other
    x = factor * other
    fused = (exact + residual).astype(np.float32)
    assert (fused != x + residual).any()
    arguments = {"x": x, "residual": residual}
    assert not judged("add", arguments, fused).complaints
    narrow = residual.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert judged("add", arguments, x + narrow).complaints
    one_wrong = x + residual
    one_wrong.reshape(-1)[np.abs(one_wrong).argmax()] *= 1.0 + 2.0**-18
    assert judged("add", arguments, one_wrong).complaints


def test_a_run_that_amplifies_its_roundings_is_no_fault(tmp_path, monkeypatch):
    model = population.draw(30010, False)  # attention that is 12 times as sharp
    subject = population.open_model(model, tmp_path)
    steps = make_steps(subject, population.prompts_of(model, 1))[:2]
    # Of torch's own ops, whose luck this is.
    composed = "fused_add_rms_norm=composition,norm_rope_write_kv=composition"
    native = "rms_norm=native,paged_attention=native,silu_and_mul=native"
    target = parse_target(f"torch:cpu:{composed},{native}")
    compare = partial(compare_model, subject, [target], steps, modes=("S",))
    assert compare().exit_code == EQUAL
    # By the one faithful run alone, whose roundings cancel by luck, it is.
    monkeypatch.setattr(Comparison, "_amplified_run", lambda self, side, layer: None)
    assert compare().exit_code == FAILED


def test_roundings_that_repeat_are_no_bias():
    rng = np.random.default_rng(0)
    exact = rng.normal(size=(8, 64))
    faithful = exact + 0.01 * rng.uniform(0.0, 1.0, exact.shape)  # a value of few: all one way
    assert measure(faithful, exact, faithful).bias == 0.0
    assert abs(measure(faithful + 0.005, exact, faithful).bias) > 0.4
    balanced = exact + 0.01 * rng.uniform(-1.0, 1.0, exact.shape)
    assert abs(measure(balanced + 0.005, exact, balanced).bias) > 0.4


def test_noise_that_is_small_by_luck_is_drawn_again():
    exact = np.full((1, 16), 1e-3)
    exact[0, 0] = 100.0  # one number is all of the noise
    lucky, got = exact.copy(), exact.copy()
    lucky[0, 0] += 0.01
    got[0, 0] += 0.15
    metrics = measure(got, exact, lucky)
    assert list(precision("op", metrics, Family()).complaints(metrics))
    drawn = amplification(
        lambda rng: [exact * (1.0 + 2.0**-9 * rng.uniform(-1, 1, exact.shape))], [exact], 8
    )[0]
    assert not list(precision("op", metrics, Family(), amplified=drawn).complaints(metrics))
    got[0, 0] += 10.0
    metrics = measure(got, exact, lucky)
    assert list(precision("op", metrics, Family(), amplified=drawn).complaints(metrics))


@pytest.mark.parametrize(
    ("seed", "number", "mode", "relation"), [(40105, 2, "S", "batch"), (40158, 1, "P", "chunks")]
)
def test_runs_that_amplify_their_roundings_keep_relations(seed, number, mode, relation, tmp_path):
    """A residual channel x1000; a sink of x3000 beside one of x300, in float32."""
    model = population.draw(seed, True)
    subject = population.open_model(model, tmp_path)
    subject = subject.with_dtype("float32") if mode == "S" else subject
    prompts = population.prompts_of(model, number)
    lab = Lab(subject, parse_target("torch:cpu"), prompts, None)
    judge = RelationJudge(subject, mode, lab.bench.layout)
    one, other = RELATIONS[relation].run(lab)
    lab.bench.close()
    assert not judge(RELATIONS[relation], (one, other)).complaints
    # One row that is off by a hundredth, and all that are off by a thousandth, are seen.
    for rows, size in (([7], 1e-2), (range(len(other.values)), 1e-3)):
        wrong = replace(other, values=[x.copy() for x in other.values])
        for row in rows:
            noise = np.random.default_rng(row).normal(size=wrong.values[row].shape)
            wrong.values[row] *= 1.0 + size * noise.astype(np.float32)
        assert judge(RELATIONS[relation], (one, wrong)).complaints


@pytest.mark.parametrize(("channels", "alarms"), [(1, False), (256, True)])
def test_a_layer_over_all_steps_is_left_what_chance_leaves(channels, alarms):
    """Noise of few numbers, as where one channel is nearly all of a stream, may be small by luck."""
    rng, diff = np.random.default_rng(0), Diff(("a",))
    for step in range(4):
        exact = rng.normal(size=(32, 256))
        scale = np.where(np.arange(256) < channels, 1.0, 1e-6)
        noise, other = (0.01 * scale * rng.uniform(-1.0, 1.0, exact.shape) for _ in range(2))
        metrics = measure(exact + 0.96 * noise + 0.47 * other, exact, exact + noise)
        diff.findings.append(Finding("a", "P", "layer", step, 3, "output", "", metrics))
    assert bool(pooled_problems(diff)) == alarms
    family, layers = pooled_sides(diff)
    assert (layers["a", 3].limit(family) == POOLED_SIGMA) == alarms


def test_a_row_of_a_layer_may_move_as_one(tmp_path):
    """Attention x4 and a head x60: an eighth of the layer's power is one rounding of one row."""
    model = population.draw(98002, held_back=True)
    subject = population.open_model(model, tmp_path)
    complaints, diff = population.ask_model(population.Run(model, 0, 0), subject)
    assert not complaints
    cpus = Path("/proc/cpuinfo")
    if cpus.exists() and "amx_bf16" in cpus.read_text(encoding="utf-8").split():
        pytest.skip("this processor sums products of bfloat16 otherwise: no row moves as one")
    assert pooled_layers(diff, "a torch:cpu")[5].sigma > POOLED_SIGMA


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rows", [8, 64, 256])
def test_chance_in_rows_is_no_fault_and_a_fault_in_all_rows_is_seen(rows, shared):
    """Rows of very unequal noise. What error and noise do not share has the same size in all
    elements of a row, or another for each of both (`shared`).
    """
    rng, runs = np.random.default_rng(rows), 300
    alarms = {0.0: 0, 0.8: 0}
    for fault in alarms:
        for _ in range(runs):
            scale = np.exp(rng.normal(size=(rows, 1)))
            exact, common, *own, wrong = rng.normal(size=(5, rows, 32))
            if shared:
                own = [x * rng.normal(size=(rows, 1)) for x in own]
            error, noise = (scale * (common + 0.5 * x) for x in own)
            metrics = measure(exact + error + fault * scale * wrong, exact, exact + noise)
            diff = Diff(("a",), [Finding("a", "P", "layer", 0, 0, "output", "", metrics)])
            alarms[fault] += bool(pooled_problems(diff))
    assert alarms[0.0] == 0
    assert alarms[0.8] == runs if rows > 8 else alarms[0.8] == 0


def test_what_float16_cannot_hold_is_not_compared(tmp_path):
    """Two magnitudes of 100 at once: products beyond 65 504, in the reference as in the engine."""
    model = population.draw(50187, True)
    subject = population.open_model(model, tmp_path)
    steps = make_steps(subject, population.prompts_of(model, 1))[:1]
    ask = partial(compare_model, subject, [parse_target("torch:cpu")], steps, modes=("P",))
    diff = ask()
    assert diff.exit_code == NOT_COMPARED, render(diff)
    assert "numbers that float16 cannot hold" in diff.missing[0]
    assert ask(faults={"a": plant("mlp-skipped@1")}).exit_code == FAILED


@pytest.mark.parametrize("rows", [1, 8, pytest.param(64, marks=pytest.mark.slow)])
def test_a_divergence_that_two_words_decide_is_left_to_chance(rows):
    """Peaked rows: noise in all of 512 logits, of which a few have the probability."""
    rng = np.random.default_rng(rows)
    exact = 4.0 * rng.normal(size=(rows, 512))
    exact[:, 0] += rng.uniform(10.0, 20.0, rows)
    found = {1.0: 0, 3.0: 0}
    for _ in range(300):
        noisy, a, b = (exact + 0.02 * rng.normal(size=exact.shape) for _ in range(3))
        for times in found:
            wrong = exact + times * (b - exact)
            complaints = compare_logits(a, wrong, exact, noisy, None, "P").complaints
            found[times] += any("KL" in text for text in complaints)
    assert found[1.0] == 0
    assert found[3.0] >= (270 if rows == 64 else 0), found


@pytest.mark.slow
def test_one_row_whose_attention_is_all_but_tied_breaks_no_relation(tmp_path):
    """Half an ulp of an op's inputs moves the logits of one row by a quarter of their size."""
    model = population.draw(90695, held_back=True)
    subject = population.open_model(model, tmp_path)
    complaints, _ = population.ask_invariants(population.Run(model, 0, 0), subject)
    assert not complaints


@pytest.mark.slow
def test_a_token_may_be_that_of_the_stream_that_an_engine_had(tmp_path):
    """Where a rounding moves a whole row, the references' logits say nothing of the sampler."""
    model = population.draw(90074, held_back=True)
    subject = population.open_model(model, tmp_path)
    complaints, _ = population.ask_served(population.Run(model, 0, 0), subject)
    assert not complaints


def test_a_divergence_of_float32_runs_is_judged_by_the_gates_of_mode_s(tmp_path):
    """Attention x12: the one order of sums of the faithful reference is exact by luck."""
    model = population.draw(111367, held_back=True)
    subject = population.open_model(model, tmp_path)
    complaints, _ = population.ask_model(population.Run(model, 0, 7), subject)
    assert not complaints
