"""What the registry refuses, and what a plan says."""

import pytest

from twinfer.ops import REGISTRY, OpError, define, implement, resolve
from twinfer.ops.declare import Registry
from twinfer.ops.implement import IMPLEMENTATIONS


@pytest.fixture
def providers(registries):
    """Registered implementations."""
    return IMPLEMENTATIONS


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


@pytest.mark.parametrize("shards", [(), ("n",)])
def test_shards_of_unknown_shapes_are_refused(shards):
    """Without shapes nothing says where a dimension lies, so several shards would refuse the op
    at their start.
    """
    registry = Registry()

    def double(xp: object, x: "Array") -> "Array":  # noqa: F821
        return x + x

    with pytest.raises(
        OpError, match=r"op 'double': shards are \[.*\], but it has no shapes: say shapes="
    ) as error:
        define(registry=registry, shards=shards)(double)
    assert str(list(shards)) in str(error.value)
    assert not registry.ops
    define(registry=registry, shapes="x [... n] -> [... n] x", shards=shards)(double)
    with pytest.raises(OpError, match=r"shards deal out \['m'\], which are no dimensions"):
        define(registry=Registry(), shapes="x [... n] -> [... n] x", shards=("m",))(double)


def rms_norm_wrong_name(x: "Array", weight: "Array", epsilon: "float") -> "Array": ...  # noqa: F821
def rms_norm_wrong_type(x: "Array", weight: "Array", eps: "int") -> "Array": ...  # noqa: F821
def rms_norm_default(x: "Array", weight: "Array", eps: "float" = 1e-6) -> "Array": ...  # noqa: F821
def rms_norm_order(weight: "Array", x: "Array", eps: "float") -> "Array": ...  # noqa: F821
def rms_norm_right(x: "Array", weight: "Array", eps: "float") -> "Array": ...  # noqa: F821


@pytest.mark.parametrize(
    "wrong", [rms_norm_wrong_name, rms_norm_wrong_type, rms_norm_default, rms_norm_order]
)
def test_another_schema_is_refused_with_both_shown(providers, wrong):
    with pytest.raises(OpError) as error:
        implement("rms_norm", provider="mine", framework="torch")(wrong)
    assert "eps: float" in str(error.value)
    with pytest.raises(OpError, match="predicate"):
        implement("rms_norm", provider="mine", framework="torch", supports_args=wrong)(
            rms_norm_right
        )
    assert ("rms_norm", "torch") not in providers or "mine" not in providers["rms_norm", "torch"]


def test_a_plan_takes_the_first_supported_provider_and_says_why_others_were_passed(providers):
    implement("rms_norm", provider="absent", framework="torch", supported=lambda: False)(
        rms_norm_right
    )
    implement("rms_norm", provider="mine", framework="torch")(rms_norm_right)
    plan = resolve("torch", {"rms_norm": ("absent", "mine")})
    assert plan["rms_norm"].provider == "mine"
    assert plan["rms_norm"].passed_over == (("absent", "not supported on this machine"),)
    assert plan.hash != resolve("torch").hash
    with pytest.raises(OpError, match="two implementations"):
        implement("rms_norm", provider="mine", framework="torch")(rms_norm_right)


def test_a_predicate_of_another_schema_is_refused_with_both_shown(providers):
    """Names, types, defaults, order: a predicate gets its op's arguments as they come, without
    rebinding.
    """

    def takes(x: "Array", weight: "Array", eps: "float" = 1e-6) -> bool:  # noqa: F821
        return True

    with pytest.raises(OpError) as error:
        implement("rms_norm", provider="mine", framework="torch", supports_args=takes)(
            rms_norm_right
        )
    assert "predicate of 'mine' (torch) of op 'rms_norm'" in str(error.value)
    assert "op:   (x: Array, weight: Array, eps: float)" in str(error.value)
    assert "here: (x: Array, weight: Array, eps: float = 1e-06)" in str(error.value)


@pytest.fixture
def outside(providers):
    """An op from outside, in a registry that forgets it, whose reference serves numpy only."""

    @define(native="per framework")
    def outside(xp: object, x: "Array") -> "Array":  # noqa: F821
        return x

    yield "outside"
    del REGISTRY.ops["outside"]


def same(x: "Array") -> "Array":  # noqa: F821
    return x


def short(x: "Array") -> "bool":  # noqa: F821
    return len(x) < 9


@pytest.mark.parametrize("provider", ["native", "mine"])
@pytest.mark.parametrize(
    ("predicate", "named"),
    [
        ({"supports_args": short}, "per-argument predicate"),
        ({"supported": lambda: True}, "depends on the machine"),
    ],
)
def test_the_last_provider_must_take_everything(outside, provider, predicate, named):
    with pytest.raises(OpError, match="needs a native implementation for torch"):
        resolve("torch")[outside]
    implement(outside, provider=provider, framework="torch", **predicate)(same)
    with pytest.raises(OpError, match=named) as error:
        resolve("torch")[outside]
    assert all(word in str(error.value) for word in ("'outside'", f"'{provider}'", "torch"))
    with pytest.raises(OpError, match=named):
        resolve("torch", {outside: (provider,)})
    assert resolve("numpy")[outside].provider == "native", "another framework is not concerned"
    implement(outside, provider="total", framework="torch")(same)
    if provider == "mine":
        assert resolve("torch")[outside].provider == "total"
        assert resolve("torch", {outside: ("mine",)})[outside].provider == "mine"


def test_a_native_implementation_with_a_predicate_is_refused_for_an_op_of_ours(providers):
    def some(x: "Array", weight: "Array", eps: "float") -> bool:  # noqa: F821
        return True

    implement("rms_norm", provider="native", framework="torch", supports_args=some)(rms_norm_right)
    with pytest.raises(OpError, match=r"'rms_norm'.*torch.*'native'.*must take everything"):
        resolve("torch")["rms_norm"]


def test_composition_is_no_name_for_a_provider(providers):
    def silu(x, gate_up, gate_up_bias, down, down_bias): ...

    silu.__signature__ = REGISTRY["gated_mlp"].signature
    implement("gated_mlp", provider="composition", framework="torch")(silu)
    with pytest.raises(OpError, match="gated_mlp"):
        resolve("torch")["gated_mlp"]


def test_all_with_none_and_unknown_ops_are_refused_in_an_enable_list():
    for enable, named in (
        (("all", "none"), "one start"),
        (("+rms_norn",), "rms_norn"),
        (("rms_norm",), "rms_norm"),
    ):
        with pytest.raises(OpError, match=f"enable list.*{named}"):
            resolve("torch", enable=enable)


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
    jaxpr = jax.make_jaxpr(lambda x, w: ops.rms_norm(ops.silu_and_mul(x), w, 1e-6))(
        jnp.ones((3, 8)), jnp.ones(4)
    )
    assert [eqn.params.get("name") for eqn in jaxpr.eqns] == ["silu_and_mul", "rms_norm"]
