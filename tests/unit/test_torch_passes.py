"""Wrapped ops and passes against unwrapped ops: the same program, one node per op before
lowering and none after.
"""

import operator

import pytest
import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed

from twinfer.gpu.passes import Lowering, count_calls, functionalize, fuse, fusible, passes_backend
from twinfer.ops import REGISTRY, OpError, implement, resolve
from twinfer.ops.bindings.torch import bind, front
from twinfer.shared.models import decoder
from twinfer.shared.models.config import ModelConfig

LAYER = {
    "fused_add_rms_norm": 2,
    "linear": 2,
    "norm_rope_write_kv": 1,
    "paged_attention": 1,
    "gated_mlp": 1,
}
MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    layer_windows=(0,),
    qk_norm=True,
    qkv_bias=True,
)


LAYER_SPEC = decoder.model_of(MODEL).layers[0]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    with torch.inference_mode():
        yield


def run_layer(function, ops, dtype=torch.float32, layer=decoder.layer):
    """hidden, residual, and the cache twice: as it is returned and as it was given. Its writes
    are what counts.
    """
    g = torch.Generator().manual_seed(0)

    def r(*shape):
        return (torch.randn(shape, generator=g) * 0.3).to(dtype)

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32)

    weights = {name: r(*p.shape) for name, p in decoder.parameters_of(MODEL).layer(0).items()}
    cos, sin = (torch.from_numpy(table) for table in decoder.rotary_tables(MODEL, 5))
    pages = torch.tensor([[0, 0], [1, 0]], dtype=torch.int32)
    batch = decoder.Batch(
        cos, sin, ints(0, 4, 5, 6, -1), pages, ints(0, 1, 4), ints(1, 3), ints(1, 2), 3
    )
    kv = r(4, 4, 4, 8)
    stream, written = function(
        ops, LAYER_SPEC, weights, decoder.Stream(r(5, 32), r(5, 32)), kv, batch
    )
    return [*stream, written, kv]


def compiled(function, backend):
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def assert_same(got, want):
    assert [torch.equal(a, b) for a, b in zip(got, want, strict=True)] == [True] * len(want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_both_roads_agree_bitwise(inner, dtype):
    plan = resolve("torch")
    backend = passes_backend(plan, inner)
    got = run_layer(compiled(decoder.layer, backend), bind(plan, wrap=True), dtype)
    assert (backend.before, backend.fused, backend.after) == (LAYER, LAYER, {})
    torch._dynamo.reset()
    assert_same(got, run_layer(compiled(decoder.layer, inner), bind(plan, compiling=True), dtype))
    if inner == "eager":
        assert_same(got, run_layer(decoder.layer, bind(plan), dtype))
        assert_same(got, run_layer(decoder.layer, bind(plan, wrap=True), dtype))


def run_open(function, tokens):
    """A layer over `tokens` tokens of one request, that number and the number of pages left
    open.
    """
    g = torch.Generator().manual_seed(0)

    def r(*shape):
        return torch.randn(shape, generator=g) * 0.3

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32)

    weights = {name: r(*p.shape) for name, p in decoder.parameters_of(MODEL).layer(0).items()}
    cos, sin = (torch.from_numpy(table) for table in decoder.rotary_tables(MODEL, tokens))
    slots = torch.arange(tokens, dtype=torch.int32)
    hidden, residual, kv = r(tokens, 32), r(tokens, 32), r(4, 4, 4, 8)
    for x in (hidden, residual, cos, sin, slots, kv):
        torch._dynamo.mark_dynamic(x, 0)
    batch = decoder.Batch(
        cos, sin, slots, ints(0, 1, 2)[None], ints(0, tokens), ints(tokens), ints(0, 1)
    )
    return [*function(weights, hidden, residual, kv, batch), kv]


def open_layer(ops):
    def layer(weights, hidden, residual, kv, batch):
        batch = batch.within(hidden.shape[0])
        return decoder.layer(ops, LAYER_SPEC, weights, decoder.Stream(hidden, residual), kv, batch)[
            0
        ]

    return layer


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_sizes_left_open_stay_open(inner):
    plan, graphs = resolve("torch"), []
    backend = passes_backend(plan, inner)

    def counted(module, inputs):
        graphs.append(module)
        return backend(module, inputs)

    sizes = (5, 7, 11)
    function = compiled(open_layer(bind(plan, wrap=True)), counted)
    got = [run_open(function, tokens) for tokens in sizes]
    assert len(graphs) == 1
    assert (backend.before, backend.after) == (LAYER, {})
    torch._dynamo.reset()
    plain = compiled(open_layer(bind(plan, compiling=True)), inner)
    for tokens, result in zip(sizes, got, strict=True):
        assert_same(result, run_open(plain, tokens))


def test_only_what_a_plan_covers_is_fused():
    whole = resolve("torch")
    plan = type(whole)(
        "torch", {name: c for name, c in whole.choices.items() if name != "gated_mlp"}
    )
    backend = passes_backend(plan, "eager")
    x, residual, w = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    got = compiled(neighbours, backend)(bind(plan, wrap=True), x, residual, w)
    assert backend.fused == {"fused_add_rms_norm": 1, "linear": 2, "silu_and_mul": 1}
    assert_same(got, neighbours(whole.bind(), x, residual, w))


def test_inductor_is_given_the_same_program():
    """Why both roads agree under Inductor: the graphs that AOTAutograd hands on are equal, node
    for node.
    """
    plan, programs = resolve("torch"), []

    def keep(module, inputs):
        number = {node: f"%{index}" for index, node in enumerate(module.graph.nodes)}
        programs.append(
            [
                (
                    node.op == "call_function" and str(node.target),
                    str(fx.map_arg((node.args, node.kwargs), number.get)),
                )
                for node in module.graph.nodes
            ]
        )
        return module.forward

    program = aot_autograd(fw_compiler=keep)

    run_layer(compiled(decoder.layer, passes_backend(plan, program)), bind(plan, wrap=True))
    torch._dynamo.reset()
    run_layer(compiled(decoder.layer, program), bind(plan, compiling=True))
    assert len(programs[0]) > 50
    assert programs[0] == programs[1]


@pytest.mark.parametrize("wrap", [False, True], ids=["unwrapped", "wrapped"])
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_the_cache_is_never_copied(inner, wrap):
    plan = resolve("torch")
    ops = bind(plan, compiling=True, wrap=wrap)
    kv, k = torch.zeros(512, 16, 4, 8), torch.ones(5, 2, 8)
    slots = torch.tensor([0, 4, 5, 6, -1], dtype=torch.int32)
    write = compiled(
        lambda ops, *args: ops.write_kv(*args), passes_backend(plan, inner) if wrap else inner
    )
    result = write(ops, kv, k, k, slots)
    assert result is kv
    assert kv.sum() > 0
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        write(ops, kv, k, k, slots)
    assert max(event.cpu_memory_usage for event in profile.events()) < kv.nbytes // 4


def test_an_implementation_is_traced_once_for_its_shapes():
    plan = resolve("torch")
    lowering = passes_backend(plan, "eager").lowering

    def twice(ops, x, w):
        return ops.rms_norm(ops.rms_norm(x, w, 1e-6), w, 1e-6)

    def capture(module, inputs):
        functionalize(module.graph)
        lowering(module)
        module.recompile()
        return module.forward

    x, w = torch.randn(3, 8), torch.randn(8)
    got = compiled(twice, capture)(bind(plan, wrap=True), x, w)
    assert torch.equal(got, twice(plan.bind(), x, w))
    assert lowering.traces == 1


def neighbours(ops, x, residual, w):
    gate_up, down = w.expand(8, 8), w.expand(3, 8)[:, :4]
    total = ops.add(x, residual)
    hidden = ops.rms_norm(total, w, 1e-6)
    return ops.linear(ops.silu_and_mul(ops.linear(hidden, gate_up, None)), down, None), total


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_fusion_of_neighbours(inner):
    plan = resolve("torch")
    backend = passes_backend(plan, inner)
    x, residual, w = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    got = compiled(neighbours, backend)(bind(plan, wrap=True), x, residual, w)
    assert backend.before == {"add": 1, "rms_norm": 1, "linear": 2, "silu_and_mul": 1}
    assert backend.fused == {"fused_add_rms_norm": 1, "gated_mlp": 1}
    assert backend.after == {}
    torch._dynamo.reset()
    assert_same(got, compiled(neighbours, inner)(bind(plan, compiling=True), x, residual, w))


def add_used_before(ops, x, residual, w):
    total = ops.add(x, residual)
    return ops.rms_norm(total, w * total.sum(), 1e-6), total


def add_unrelated(ops, x, residual, w):
    return ops.rms_norm(x, w, 1e-6), ops.add(x, residual)


def silu_escapes(ops, x, residual, w):
    y = ops.silu_and_mul(ops.linear(x, residual, None))
    return ops.linear(y, w[:1].expand(2, 1), None), y


@pytest.mark.parametrize("function", [add_used_before, add_unrelated, silu_escapes])
def test_what_is_no_pattern_is_left_alone(function):
    plan = resolve("torch")
    backend = passes_backend(plan, "eager")
    values = (
        torch.randn(3, 8),
        torch.randn(3, 8) if function is not silu_escapes else torch.randn(2, 8),
        torch.randn(8),
    )
    got = compiled(function, backend)(bind(plan, wrap=True), *values)
    assert backend.fused == backend.before
    assert_same(got, function(plan.bind(), *values))


def test_fusion_runs_what_is_planned_for_the_coarse_op(registries):
    @implement("fused_add_rms_norm", provider="kernel", framework="torch", inplace=True)
    def kernel(
        x: "Array", residual: "Array", weight: "Array", eps: "float"
    ) -> "tuple[Array, Array]":
        residual.add_(x)
        return x.fill_(7.0), residual

    plan = resolve("torch", {"fused_add_rms_norm": ("kernel",)})
    backend = passes_backend(plan, "eager")
    x, residual, w = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    kept = x.clone(), residual.clone()

    def function(ops, x, residual, w):
        total = ops.add(x, residual)
        return ops.rms_norm(total, w, 1e-6), total

    hidden, total = compiled(function, backend)(bind(plan, wrap=True), x, residual, w)
    assert backend.fused == {"fused_add_rms_norm": 1}
    assert torch.equal(hidden, torch.full((3, 8), 7.0))
    assert torch.equal(total, kept[0] + kept[1])
    assert_same((x, residual), kept)  # nothing was given away, so the kernel got copies


@pytest.fixture
def overwriting(registries):
    """A plan whose norms write in place."""

    def norm(x, weight, eps):
        y = x.float()
        return (y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)

    @implement("rms_norm", provider="over", framework="torch", inplace=True)
    def rms_norm(x: "Array", weight: "Array", eps: "float") -> "Array":
        return x.copy_(norm(x, weight, eps))

    @implement("fused_add_rms_norm", provider="over", framework="torch", inplace=True)
    def fused(
        x: "Array", residual: "Array", weight: "Array", eps: "float"
    ) -> "tuple[Array, Array]":
        residual.add_(x)
        return x.copy_(norm(residual, weight, eps)), residual

    @implement("norm_rope_write_kv", provider="over", framework="torch", inplace=True)
    def write(
        qkv: "Array",
        kv: "Array",
        q_weight: "Array | None",
        k_weight: "Array | None",
        cos: "Array",
        sin: "Array",
        slots: "Array",
        eps: "float",
        k_scale: "Array | None" = None,
        v_scale: "Array | None" = None,
        v_norm: "bool" = False,
        norm_behind: "bool" = False,
    ) -> "tuple[Array, Array]":
        native = resolve("torch", enable=("none",)).bind()
        return native.norm_rope_write_kv(
            qkv, kv, q_weight, k_weight, cos, sin, slots, eps, k_scale, v_scale, v_norm, norm_behind
        )

    return resolve("torch", {"rms_norm": ("over",), "fused_add_rms_norm": ("over",)})


@pytest.mark.parametrize(
    ("fused", "inner"),
    [
        ("over", "eager"), ("composition", "eager"),
        pytest.param("over", "inductor", marks=pytest.mark.slow),
        pytest.param("composition", "inductor", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_both_roads_agree_where_ops_write_in_place(overwriting, inner, fused):
    """With results of its own beside the state that it writes, too: norm_rope_write_kv."""
    plan = resolve(
        "torch",
        {"rms_norm": ("over",), "fused_add_rms_norm": (fused,), "norm_rope_write_kv": (fused,)},
    )
    backend = passes_backend(plan, inner)
    got = run_layer(compiled(decoder.layer, backend), bind(plan, wrap=True))
    assert (backend.before, backend.after) == (LAYER, {})
    torch._dynamo.reset()
    assert_same(got, run_layer(compiled(decoder.layer, inner), bind(plan, compiling=True)))
    if inner == "eager":
        assert_same(got, run_layer(decoder.layer, bind(plan)))
        assert_same(got, run_layer(decoder.layer, bind(plan, wrap=True)))


def copied(function, backend, *args):
    """What a compiled function gives, and how many tensors it copies."""
    run = compiled(function, backend)
    run(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = run(*args)
    return result, sum(
        event.count for event in profile.key_averages() if event.key == "aten::clone"
    )


def test_donation_saves_the_copy_after_the_passes(overwriting):
    x, w = torch.randn(3, 8), torch.randn(8)

    def functional(x, w):
        return front("rms_norm").functional(x, w, 1e-6, plan=overwriting.hash)

    def donating(x, w):
        return front("rms_norm").inplace(x, w, 1e-6, plan=overwriting.hash)

    bind(overwriting, wrap=True)
    kept = x.clone()
    first, count = copied(functional, passes_backend(overwriting, "eager"), x, w)
    assert count == 1
    assert torch.equal(x, kept)
    second, count = copied(donating, passes_backend(overwriting, "eager"), x, w)
    assert count == 0
    assert second.data_ptr() == x.data_ptr()
    assert torch.equal(first, second)


def test_an_op_may_read_the_copy_that_another_wrote_into(overwriting):
    """The copy is a node that no tracer made; the next op is traced for its shape all the same."""
    x, w = torch.randn(3, 8), torch.randn(8)

    def twice(x, w):
        once = front("rms_norm").functional(x, w, 1e-6, plan=overwriting.hash)
        return front("silu_and_mul").functional(once, plan=overwriting.hash)

    bind(overwriting, wrap=True)
    want = twice(x, w)
    got, count = copied(twice, passes_backend(overwriting, "eager"), x, w)
    assert count == 1
    assert torch.equal(got, want)


def test_fusion_keeps_what_was_donated(overwriting):
    """Two donations become the coarse op's own where nothing else reads what was given."""

    @implement("add", provider="over", framework="torch", inplace=True)
    def add(x: "Array", residual: "Array") -> "Array":
        return x.add_(residual)

    plan = resolve("torch", {name: ("over",) for name in ("add", "rms_norm", "fused_add_rms_norm")})

    def function(ops, x, residual, w):
        return ops.rms_norm(ops.add(x, residual), w, 1e-6)

    backend = passes_backend(plan, "eager")
    values = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    kept = values[1].clone()
    got, count = copied(function, backend, bind(plan, wrap=True), *values)
    assert backend.fused == {"fused_add_rms_norm": 1}
    assert got.data_ptr() == values[0].data_ptr()
    assert torch.equal(values[1], kept), "the residual was not given away"
    assert count == 1


def used_directly(ops, x, w):
    return ops.rms_norm(x, w, 1e-6) + x


def used_through_a_view(ops, x, w):
    rows = x.view(6, 4)
    return ops.rms_norm(x, w, 1e-6), rows + 1


def used_through_its_base(ops, x, w):
    return ops.rms_norm(x.view(3, 8), w, 1e-6), x + 1


def returned(ops, x, w):
    y = x + 1
    return ops.rms_norm(y, w, 1e-6), y


def used_twice_in_one_call(ops, x, w):
    return ops.rms_norm(w, w, 1e-6)


WRONG = [
    used_directly,
    used_through_a_view,
    used_through_its_base,
    returned,
    used_twice_in_one_call,
]


@pytest.mark.parametrize("function", WRONG)
def test_use_after_donation_is_refused(overwriting, function):
    with pytest.raises(BackendCompilerFailed, match=r"uses it later|reads it as") as error:
        compiled(function, passes_backend(overwriting, "eager"))(
            bind(overwriting, wrap=True), torch.randn(3, 8), torch.randn(8)
        )
    assert isinstance(error.value.inner_exception, OpError)


def test_the_rest_of_a_split_tensor_may_be_used(overwriting):
    def split(ops, x, w):
        q, v = x[:, :8], x[:, 8:]
        return ops.rms_norm(q, w, 1e-6), v * 2

    x, w = torch.randn(3, 12), torch.randn(8)
    want = split(resolve("torch").bind(), x, w)
    got = compiled(split, passes_backend(overwriting, "eager"))(bind(overwriting, wrap=True), x, w)
    torch.testing.assert_close(got, want)


def test_a_graph_is_lowered_with_the_plan_it_was_bound_with(overwriting):
    with pytest.raises(BackendCompilerFailed, match="bound with plan"):
        compiled(
            lambda ops, x, w: ops.rms_norm(x, w, 1e-6), passes_backend(resolve("torch"), "eager")
        )(bind(overwriting, wrap=True), torch.randn(3, 8), torch.randn(8))


def test_passes_on_a_graph_made_by_hand():
    """No Dynamo: an empty plan on the nodes means the plan that the graph is lowered with."""
    graph = fx.Graph()
    x, residual, w = (graph.placeholder(name) for name in ("x", "residual", "w"))
    total = graph.call_function(front("add").functional, (x, residual))
    hidden = graph.call_function(front("rms_norm").functional, (total, w), {"eps": 1e-6})
    graph.output((hidden, total))
    assert count_calls(graph) == {"add": 1, "rms_norm": 1}
    assert fuse(graph, ("fused_add_rms_norm",)) == 1
    assert count_calls(graph) == {"fused_add_rms_norm": 1}
    assert [node.target for node in graph.nodes if node.op == "call_function"][1:] == [
        operator.getitem
    ] * 2
    module = fx.GraphModule({}, graph)
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        for node, shape in ((x, (3, 8)), (residual, (3, 8)), (w, (8,))):
            node.meta["val"] = torch.empty(shape)
    Lowering(resolve("torch"))(module)
    module.recompile()
    values = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    assert_same(module(*values), resolve("torch").bind().fused_add_rms_norm(*values, 1e-6))


def test_uuid_says_what_would_be_built(overwriting):
    native = resolve("torch")
    one = passes_backend(native, "eager").uuid()
    assert one == passes_backend(resolve("torch"), "eager").uuid()
    others = passes_backend(native), passes_backend(overwriting, "eager")
    assert len({one, *(other.uuid() for other in others)}) == 3


def test_graphs_are_searched_for_what_is_several_calls_and_nothing_else():
    """Projections of shards are one call each; the write of K and V looks at arrays between its
    calls.
    """
    found = fusible([op.name for op in REGISTRY])
    assert set(found) == {
        "gated_mlp", "gated_mlp_grouped", "gelu_gated_mlp", "fused_add_rms_norm",
        "fused_add_gemma_rms_norm", "fused_add_layer_norm", "reduce_add_rms_norm",
        "norm_add_rms_norm", "penalised_sample", "rms_norm_pair", "add_norm_gated_mlp_fp8",
    }  # fmt: skip
    assert found.index("gated_mlp") < found.index("fused_add_rms_norm")
