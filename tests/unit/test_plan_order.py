"""Who is heard first when a plan is made, and what a coarse implementation steps back for."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from twinfer.ops import REGISTRY, OpError, implement, plugins, priority, resolve, set_default
from twinfer.ops.implement import IMPLEMENTATIONS, preferred
from twinfer.ops.recording import Call

CHIP = "rms_norm", "fused_add_rms_norm", "norm_rope_write_kv", "silu_and_mul", "gated_mlp"
STEPS_BACK = ("fused_add_rms_norm", "norm_rope_write_kv")


def provide(op, provider, framework="numpy", **properties):
    """An implementation that is never run."""

    def never(*args): ...

    never.__signature__ = REGISTRY[op].signature
    implement(op, provider=provider, framework=framework, **properties)(never)


@pytest.fixture(autouse=True)
def providers(registries):
    """`chip` for what a platform prefers, `acme` from outside."""
    for op in CHIP:
        provide(op, "chip", preferred_on=("tpu",))
        provide(op, "acme")


def chosen(plan):
    return {op: (plan[op].provider, plan[op].chosen_by) for op in CHIP}


PREFERRED = {op: ("chip", "platform") for op in CHIP}


def test_a_platform_is_heard_before_nobody_and_after_everybody():
    assert chosen(resolve("numpy", platform="tpu")) == PREFERRED
    set_default("rms_norm", "numpy", "acme")
    assert resolve("numpy", platform="tpu")["rms_norm"].chosen_by == "default"
    plan = resolve("numpy", {"rms_norm": ("native",)}, platform="tpu")
    assert (plan["rms_norm"].provider, plan["rms_norm"].chosen_by) == ("native", "user")
    with priority("rms_norm", "chip"):
        plan = resolve("numpy", {"rms_norm": ("native",)}, platform="tpu")
    assert (plan["rms_norm"].provider, plan["rms_norm"].chosen_by) == ("chip", "scoped")


@pytest.mark.parametrize("voice", ["scoped", "user", "default"])
def test_a_platforms_coarse_kernel_steps_back_for_a_finer_op_that_somebody_chose(voice):
    user = {}
    if voice == "default":
        set_default("rms_norm", "numpy", "acme")
    elif voice == "user":
        user = {"rms_norm": ("acme",)}
    with priority("rms_norm", *(("acme",) if voice == "scoped" else ())):
        plan = resolve("numpy", user, platform="tpu")
    assert chosen(plan) == PREFERRED | {"rms_norm": ("acme", voice)} | {
        op: ("composition", "native") for op in STEPS_BACK
    }
    for op in STEPS_BACK:
        assert plan[op].passed_over == (("chip", f"its finer op rms_norm is acme ({voice})"),)


def test_a_platforms_coarse_kernel_steps_back_for_a_finer_op_that_is_disabled():
    plan = resolve("numpy", platform="tpu", enable=("all", "-silu_and_mul"))
    assert chosen(plan) == PREFERRED | {
        op: ("composition" if op == "gated_mlp" else "native", "native")
        for op in ("silu_and_mul", "gated_mlp")
    }
    assert plan["gated_mlp"].passed_over == (("chip", "its finer op silu_and_mul is disabled"),)
    assert plan["silu_and_mul"].passed_over == (("chip", "the op is disabled"),)


def test_a_coarse_op_that_is_asked_for_as_loudly_stays():
    user = {"rms_norm": ("acme",), "fused_add_rms_norm": ("chip",)}
    plan = resolve("numpy", user, platform="tpu")
    assert plan["fused_add_rms_norm"].provider == "chip"
    assert plan["norm_rope_write_kv"].provider == "composition"
    plan = resolve("numpy", platform="tpu", enable=("none", "+fused_add_rms_norm"))
    assert plan["fused_add_rms_norm"].provider == "chip", "enabled by name"
    set_default("fused_add_rms_norm", "numpy", "acme")
    plan = resolve("numpy", {"rms_norm": ("native",)}, platform="tpu")
    assert plan["fused_add_rms_norm"].passed_over[0] == (
        "acme",
        "its finer op rms_norm is native (user)",
    )


def test_nothing_steps_back_for_what_does_not_run_here():
    provide("rms_norm", "elsewhere", supported=lambda: False)
    set_default("rms_norm", "numpy", "elsewhere")
    plan = resolve("numpy", platform="tpu")
    assert chosen(plan) == PREFERRED
    assert plan["rms_norm"].passed_over == (("elsewhere", "not supported on this machine"),)


def test_a_platform_prefers_what_comes_from_outside_whoever_was_imported_first():
    """A script registers before an engine imports our kernels, a plug-in afterwards; and plug-ins
    are found in any order.
    """
    for provider in ("zeta", "acme"):
        provide("silu_and_mul", provider, "torch", preferred_on=("cpu",))
    known = IMPLEMENTATIONS["silu_and_mul", "torch"]
    assert "c" in known
    orders = []
    for order in (known, reversed([*known]), sorted(known)):
        IMPLEMENTATIONS["silu_and_mul", "torch"] = {name: known[name] for name in order}
        orders.append(preferred("torch", "cpu")["silu_and_mul"])
    assert orders == [["acme", "zeta", "c"]] * 3
    assert resolve("torch", platform="cpu")["silu_and_mul"].provider == "acme"


def test_plugins_are_loaded_by_name_wherever_they_are_found(monkeypatch):
    """Folders are listed in any order, and another one may make another plan."""
    loaded = []

    class Entry:
        value = "somewhere:register"

        def __init__(self, name):
            self.name = name

        def load(self):
            return lambda: loaded.append(self.name)

    for names in (["b", "a"], ["a", "b"]):
        found = [Entry(name) for name in names]
        monkeypatch.setattr(plugins, "entry_points", lambda group, found=found: found)
        assert plugins.load_plugins.__wrapped__() == ("a", "b")
    assert loaded == ["a", "b"] * 2


def x_of(rows, parents=(), program="decode[8]", op="rms_norm"):
    names = dict.fromkeys(REGISTRY[op].signature.parameters)
    return Call(op, 0, 0, names | {"x": np.zeros((rows, 8))}, (), parents, program)


def test_a_plan_covers_what_is_called_and_the_finer_ops_of_compositions():
    fused = x_of(8, op="fused_add_rms_norm")
    calls = [fused, x_of(8, ("fused_add_rms_norm",)), x_of(8, ("fused_add_rms_norm",), op="add")]
    assert set(resolve("numpy", calls=calls).choices) == {"fused_add_rms_norm", "rms_norm", "add"}
    assert set(resolve("numpy", platform="tpu", calls=calls).choices) == {"fused_add_rms_norm"}
    plan = resolve("numpy", calls=calls)
    assert not hasattr(plan.bind(), "linear")
    with pytest.raises(OpError, match="'linear' is not in this plan"):
        plan["linear"]
    with pytest.raises(OpError, match="unknown op"):
        plan["linnear"]


def few(x: "Array", weight: "Array", eps: "float") -> bool:  # noqa: F821
    return x.shape[0] <= 16


def test_a_predicate_that_takes_some_programs_only_is_refused_with_all_names():
    """Whichever of them it refuses: the largest, or one in the middle of the table."""
    provide("rms_norm", "few", supports_args=few)
    order = {"rms_norm": ("few",)}
    assert resolve("numpy", order, calls=[x_of(16), x_of(8)])["rms_norm"].provider == "few"
    choice = resolve("numpy", order, calls=[x_of(64), x_of(32, program="decode[32]")])["rms_norm"]
    assert choice.passed_over[0][1].startswith("does not take x=(64, 8)")
    for sizes in ((64, 8), (8, 64, 16)):
        calls = [x_of(n, program=f"decode[{n}]") for n in sizes]
        with pytest.raises(OpError) as error:
            resolve("numpy", order, calls=calls)
        said = str(error.value)
        parts = (
            "'rms_norm'",
            "'few'",
            "decode[64]",
            "x=(64, 8)",
            "op_priority rms_norm=native",
            "enable_ops -rms_norm",
        )
        assert all(part in said for part in parts), said


def test_a_predicate_is_not_asked_for_calls_that_a_coarse_kernel_swallows():
    provide("rms_norm", "few", supports_args=few)
    fused = [x_of(n, op="fused_add_rms_norm", program=f"decode[{n}]") for n in (64, 8)]
    inside = [x_of(n, ("fused_add_rms_norm",), f"decode[{n}]") for n in (64, 8)]
    own = [x_of(n, program=f"decode[{n}]") for n in (8, 4)]
    user = {"fused_add_rms_norm": ("chip",), "rms_norm": ("few",)}
    assert resolve("numpy", user, calls=[*fused, *inside, *own])["rms_norm"].provider == "few"
    with pytest.raises(OpError, match="refuses decode"):
        resolve("numpy", {"rms_norm": ("few",)}, calls=[*fused, *inside, *own])


def test_a_provider_nobody_knows_is_refused_whether_the_model_calls_the_op_or_not():
    for framework in ("numpy", "torch"):
        with pytest.raises(OpError, match="cutlass"):
            resolve(framework, {"layer_norm": ("cutlass",)}, calls=[x_of(8)])
    set_default("layer_norm", "numpy", "cutlass")
    assert "rms_norm" in resolve("numpy", calls=[x_of(8)])
    with pytest.raises(OpError, match="cutlass"):
        resolve("numpy")["layer_norm"]


def test_a_framework_nobody_knows_is_refused():
    with pytest.raises(OpError, match=r"'tourch'.*allowed are numpy, jax, torch"):
        set_default("rms_norm", "tourch", "acme")
    with pytest.raises(OpError, match=r"'tourch'.*allowed are numpy, jax, torch"):
        provide("rms_norm", "other", framework="tourch")


PLANS_FOR_CUDA = """
import json
from twinfer.ops import implement, priority, resolve, set_default
from twinfer.ops.declare import Array
from twinfer.gpu import plans
from twinfer.shared.config import DeviceInfo, EngineConfig
from twinfer.shared.config import resolve as resolve_config
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.shapes import SHAPES

model = parse_config(SHAPES["qwen3-0.6b"])

def rms_norm(x: Array, weight: Array, eps: float) -> Array: ...

implement("rms_norm", provider="acme", framework="torch")(rms_norm)
set_default("rms_norm", "torch")

def providers(**options):
    config, _ = resolve_config(EngineConfig(model="m", backend="torch", dtype="bfloat16", **options), model,
                               DeviceInfo("cuda", "a GPU", 80 << 30))
    plan = plans.make_plans(model, config)["decode"]
    return {op: [choice.provider, [why for _, why in choice.passed_over]] for op, choice in plan.choices.items()}

found = {"nobody": providers(), "user": providers(op_priority={"rms_norm": ("acme",)}),
         "disabled": providers(enable_ops=("all", "-silu_and_mul"))}
with priority("rms_norm", "acme"):
    found["scoped"] = providers()
set_default("rms_norm", "torch", "acme")
found["default"] = providers()
print(json.dumps(found))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed here")
def test_the_plans_of_a_gpu_hear_a_plugin(tmp_path):
    """With the real Triton kernels, in their interpreter, and no GPU: that is read when Triton
    is imported.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", PLANS_FOR_CUDA]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "rms_norm" not in found["nobody"]
    assert {provider for provider, _ in found["nobody"].values()} == {"triton", "native"}, (
        "native: embedding"
    )
    for voice in ("scoped", "user", "default"):
        assert found[voice]["rms_norm"][0] == "acme"
        for op in STEPS_BACK:
            assert found[voice][op] == ["composition", [f"its finer op rms_norm is acme ({voice})"]]
        assert found[voice]["gated_mlp"][0] == found[voice]["write_kv"][0] == "triton"
    assert found["disabled"]["silu_and_mul"] == ["native", ["the op is disabled"]]
    assert found["disabled"]["gated_mlp"] == [
        "composition",
        ["its finer op silu_and_mul is disabled"],
    ]
    assert found["disabled"]["linear"][0] == "triton"
