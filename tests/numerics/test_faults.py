"""The catalogue of faults: names are checked, and what a fault does is the fault alone."""

from functools import partial

import numpy as np
import pytest

from twinfer.numerics.faults.catalogue import CATALOGUE, MLPS, plant, plant_by_side
from twinfer.numerics.faults.making import changed, instead
from twinfer.numerics.questions.selftest_model import CONFIG
from twinfer.numerics.sides.fault import FaultyPlan, faulty, faulty_plans
from twinfer.ops import Plans, resolve
from twinfer.ops.cases import load_all
from twinfer.ops.namespaces import namespace
from twinfer.ops.testing import TESTING, Judge, ci_cases, run
from twinfer.shared.errors import ConfigError
from twinfer.shared.models.config_json import parse_config
from twinfer.tests.numerics.faults import _gelu, _mlp_with, _silu, dense_attention

load_all()
MODEL = parse_config(CONFIG)
PLAIN = parse_config({k: v for k, v in CONFIG.items() if k not in ("attention_bias",
    "use_sliding_window",
                                                                  "sliding_window",
                                                                  "layer_types")})  # fmt: skip


def test_there_are_enough_and_each_is_described():
    assert len(CATALOGUE) >= 66
    assert len({entry.what for entry in CATALOGUE.values()}) == len(CATALOGUE)


def test_a_fault_in_a_layer_is_there_only():
    assert [plant("norm-eps@1").at(layer) for layer in (-1, 0, 1)] == [False, False, True]
    assert [plant("norm-eps").at(layer) for layer in (-1, 0, 1)] == [True, True, True]
    assert [plant("logits-rounded").at(layer) for layer in (-1, 0, 1)] == [True, False, False]


@pytest.mark.parametrize(
    ("text", "model"),
    [("nope", None), ("norm-eps@x", None), ("norm-eps@-1", None), ("norm-eps@2", MODEL),
    ("logits-rounded@1", None),
     ("token-off-by-one", MODEL), ("window-missing", PLAIN), ("bias-forgotten", PLAIN)],
)  # fmt: skip
def test_names_are_checked(text, model):
    with pytest.raises(ConfigError, match="plant: "):
        plant(text, model)


def test_sides_are_checked():
    found = plant_by_side(["a=norm-eps@1", "rope-sign"])
    assert {side: fault.name for side, fault in found.items()} == {
        "a": "norm-eps",
        "b": "rope-sign",
    }
    for texts in (["c=norm-eps"], ["norm-eps", "rope-sign"]):
        with pytest.raises(ConfigError, match="plant: "):
            plant_by_side(texts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_attention_without_its_fault_is_right(framework, dtype):
    """So what is found when it is planted is the fault, not this other way to write attention."""
    _, make = instead("paged_attention", dense_attention)
    xp = namespace(framework)
    for case in ci_cases(TESTING["paged_attention"], dtype):
        if case.arguments["kv"].nbytes > 1 << 20 or case.name.startswith("several"):
            continue
        outputs = run(
            "paged_attention", framework, None, case.arguments, wrap=lambda f: make(xp, f)
        )
        verdict = Judge("paged_attention", case.arguments)(outputs)
        assert verdict.passed, (case.name, verdict)


@pytest.mark.parametrize("op", MLPS)
def test_an_mlp_fault_is_in_the_op_of_every_activation(op):
    case = next(iter(ci_cases(TESTING[op], "float32")))
    judge, numpy = Judge(op, case.arguments), namespace("numpy")
    names = "gate-up-swapped", "mlp-skipped", "gelu-for-silu"
    for name in names:
        make = CATALOGUE[name].ops[op]
        outputs = run(op, "numpy", None, case.arguments, wrap=lambda f, make=make: make(numpy, f))
        assert not judge(outputs).passed, name
    assert op in CATALOGUE["gate-up-loaded-swapped"].shown_by


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("op", "act"), [("gated_mlp", _silu), ("gelu_gated_mlp", _gelu)])
def test_the_mlp_without_its_fault_is_right(op, act, dtype):
    """So what is found when `gelu-for-silu` is planted is the activation."""
    _, make = instead(op, partial(_mlp_with, act=act))
    numpy = namespace("numpy")
    for case in ci_cases(TESTING[op], dtype):
        outputs = run(op, "numpy", None, case.arguments, wrap=lambda f: make(numpy, f))
        assert Judge(op, case.arguments)(outputs).passed, case.name


def test_a_changed_argument_leaves_those_before_it_as_they_are():
    """A call without scales, whose sinks become none: these stand behind them."""
    seen = []
    _, make = changed("paged_attention", sinks=lambda xp, a: None)
    case = next(c for c in ci_cases(TESTING["paged_attention"], "float32") if "sinks" in c.name)
    given = {k: v for k, v in case.arguments.items() if k not in ("k_scale", "v_scale", "chunk")}
    make(None, lambda *args: seen.append(args))(**given)
    assert seen[0][-3:] == (None, None, None)


def test_arguments_arrive_however_they_are_given():
    def function(x, weight, eps):
        return x, weight, eps

    _, make = changed("rms_norm", eps=lambda xp, a: a["eps"] * 2)
    wrong = make(None, function)
    assert wrong(1, 2, 3) == wrong(1, eps=3, weight=2) == (1, 2, 6)


def test_a_faulty_plan_has_another_hash_and_other_functions():
    plan = resolve("numpy")
    plans = faulty_plans(Plans({"mixed": plan}), plant("norm-eps"))
    assert plans["mixed"].hash != plan.hash
    x, weight = np.full((1, 8), 1e-3), np.ones(8)
    norms = [p.bind().fused_add_rms_norm(x, x * 0, weight, 1e-6)[0] for p in (plan, plans["mixed"])]
    assert norms[0][0, 0] > norms[1][0, 0]
    assert plans["mixed"].bind(lambda op, function: None).linear is None


def test_a_fault_of_one_layer_leaves_programs_outside_of_layers_alone():
    plans = Plans({"mixed": resolve("numpy")})
    assert faulty_plans(plans, plant("norm-eps@1"))["mixed"] is plans["mixed"]
    assert faulty_plans(plans, plant("logits-rounded"))["mixed"].hash != plans["mixed"].hash


def test_a_fault_leaves_other_ops_alone():
    def function():
        return 1

    assert faulty(plant("norm-eps"), "numpy", "linear", function) is function
    assert isinstance(FaultyPlan("numpy", {}).hash, str)
