"""What the registry refuses, and what a plan says."""

import pytest

from twinfer.ops import REGISTRY, OpError, define, implement, resolve
from twinfer.ops.declare import Registry
from twinfer.ops.implement import IMPLEMENTATIONS


@pytest.fixture
def providers():
    """Registered implementations, put back as they were."""
    resolve("torch")  # the native ones register when they are first needed
    before = {key: dict(value) for key, value in IMPLEMENTATIONS.items()}
    yield IMPLEMENTATIONS
    IMPLEMENTATIONS.clear()
    IMPLEMENTATIONS.update(before)


def test_an_op_is_registered_once_and_needs_its_first_parameter():
    registry = Registry()

    @define(registry=registry)
    def double(xp: object, x: "Array") -> "Array":  # noqa: F821
        return x + x

    with pytest.raises(OpError, match="registered twice"):
        define(registry=registry)(double)
    with pytest.raises(OpError, match="first parameter"):
        define(registry=registry)(lambda x: x)
    with pytest.raises(OpError, match="activations"):
        define(registry=Registry(), activations=("y",))(double)


def rms_norm_wrong_name(x: "Array", weight: "Array", epsilon: "float") -> "Array": ...  # noqa: F821
def rms_norm_wrong_type(x: "Array", weight: "Array", eps: "int") -> "Array": ...  # noqa: F821
def rms_norm_default(x: "Array", weight: "Array", eps: "float" = 1e-6) -> "Array": ...  # noqa: F821
def rms_norm_order(weight: "Array", x: "Array", eps: "float") -> "Array": ...  # noqa: F821
def rms_norm_right(x: "Array", weight: "Array", eps: "float") -> "Array": ...  # noqa: F821


@pytest.mark.parametrize("wrong", [rms_norm_wrong_name, rms_norm_wrong_type, rms_norm_default, rms_norm_order])
def test_another_schema_is_refused_with_both_shown(providers, wrong):
    with pytest.raises(OpError) as error:
        implement("rms_norm", provider="mine", framework="torch")(wrong)
    assert "eps: float" in str(error.value)
    with pytest.raises(OpError, match="predicate"):
        implement("rms_norm", provider="mine", framework="torch", supports_args=wrong)(rms_norm_right)
    assert ("rms_norm", "torch") not in providers or "mine" not in providers["rms_norm", "torch"]


def test_a_plan_takes_the_first_supported_provider_and_says_why_others_were_passed(providers):
    implement("rms_norm", provider="absent", framework="torch", supported=lambda: False)(rms_norm_right)
    implement("rms_norm", provider="mine", framework="torch")(rms_norm_right)
    plan = resolve("torch", {"rms_norm": ("absent", "mine")})
    assert plan["rms_norm"].provider == "mine"
    assert plan["rms_norm"].passed_over == (("absent", "not supported on this machine"),)
    assert plan.hash != resolve("torch").hash
    with pytest.raises(OpError, match="two implementations"):
        implement("rms_norm", provider="mine", framework="torch")(rms_norm_right)


def test_unknown_names_are_refused():
    with pytest.raises(OpError, match="cutlass"):
        resolve("torch", {"rms_norm": ("cutlass",)})
    with pytest.raises(OpError, match="rms_norn"):
        resolve("torch", {"rms_norn": ("native",)})


@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
def test_every_op_has_a_plan_in_every_framework(framework):
    plan = resolve(framework)
    bound = plan.bind()
    for op in REGISTRY:
        assert plan[op.name].provider == ("composition" if op.level == "coarse" else "native")
        assert callable(getattr(bound, op.name))


def test_a_coarse_op_runs_on_the_fine_implementations_of_the_plan(providers):
    import torch

    calls = []

    def silu_and_mul(x: "Array") -> "Array":  # noqa: F821
        calls.append(x.shape)
        return x[..., : x.shape[-1] // 2]

    implement("silu_and_mul", provider="mine", framework="torch")(silu_and_mul)
    ops = resolve("torch", {"silu_and_mul": ("mine",)}).bind()
    ops.gated_mlp(torch.ones(3, 4), torch.ones(10, 4), None, torch.ones(4, 5), None)
    assert calls == [(3, 10)]


def test_ops_keep_their_names_in_a_jaxpr():
    import jax
    import jax.numpy as jnp

    from twinfer.ops.bindings.jax import bind

    ops = bind(resolve("jax"))
    jaxpr = jax.make_jaxpr(lambda x, w: ops.rms_norm(ops.silu_and_mul(x), w, 1e-6))(jnp.ones((3, 8)), jnp.ones(4))
    assert [eqn.params.get("name") for eqn in jaxpr.eqns] == ["silu_and_mul", "rms_norm"]
