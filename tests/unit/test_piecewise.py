"""The whole-graph road on the CPU: pieces against eager, what is compiled how often, guards, the
cache, the checks.
"""

import dataclasses
import json
from typing import Annotated

import pytest
import torch

from twinfer.bucketing import Descriptor, Table
from twinfer.gpu.module import Decoder
from twinfer.gpu.piecewise import Open, build, evaluate_guards, support_torch_compile
from twinfer.gpu.piecewise.build import Backbone, served_by
from twinfer.gpu.piecewise.checks import check_state, state_of
from twinfer.gpu.piecewise.decorate import tensors_of, trace
from twinfer.gpu.piecewise.split import describe
from twinfer.gpu.plans import make_plans
from twinfer.ops import BoundPlans
from twinfer.ops.bindings.torch import bind
from twinfer.shared.compilation_config import ResolvedCompilation
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.errors import ConfigError, InternalError, OutsideTable
from twinfer.shared.models import decoder
from twinfer.shared.models.config_json import parse_config

RAW = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=32, intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=101,
    max_position_embeddings=64,
    rms_norm_eps=1e-3, tie_word_embeddings=True, torch_dtype="float32",
)  # fmt: skip
EXPERTS = RAW | dict(
    architectures=["MixtralForCausalLM"], model_type="mixtral",
    num_local_experts=3, num_experts_per_tok=2, tie_word_embeddings=False,
)  # fmt: skip
TABLE = Table((1, 2, 4), (16, 32), 4)
EAGER = ResolvedCompilation(level=3, road="piecewise")
PAGES = 12


class Model:
    """Random weights, a cache, and batches of requests at random positions."""

    def __init__(self, raw=RAW):
        self.model = parse_config(raw)
        options = dict(
            model="x", backend="torch", max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32
        )
        self.config, _ = resolve(
            EngineConfig(**options), self.model, DeviceInfo("cpu", "cpu", 1 << 34)
        )
        self.plans = make_plans(self.model, self.config)
        table = decoder.parameters_of(self.model)
        self.modules = {}
        for compiling in (False, True):
            ops = BoundPlans(
                self.plans, lambda _, plan, compiling=compiling: bind(plan, compiling=compiling)
            )
            module = Decoder(self.model, table, ops, torch.float32, torch.device("cpu"))
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            module.freeze()
            self.modules[compiling] = module
        self.cos, self.sin = (torch.from_numpy(t) for t in decoder.rotary_tables(self.model, 64))

    def kv(self):
        generator = torch.Generator().manual_seed(5)
        return torch.randn((4, PAGES + 1, 16, 4, 8), generator=generator)

    def inputs(self, d, seed=1):
        """Two requests (one in a decode of one): lengths 5 and 20, or chunks of 9 and 3 tokens."""
        generator = torch.Generator().manual_seed(seed)
        new = [1, 1][: d.tokens] if d.kind == "decode" else [9, 3]
        ends = [5, 20][: len(new)] if d.kind == "decode" else [9, 12]
        pages = [[3, 1, 0, 0], [2, 7, 0, 0]]
        positions, slots = [], []
        for row, (count, end) in enumerate(zip(new, ends, strict=True)):
            for position in range(end - count, end):
                positions.append(position)
                slots.append(pages[row][position // 16] * 16 + position % 16)
        padding = d.tokens - len(positions)
        positions = torch.tensor(positions + [0] * padding)
        starts = torch.tensor(
            [0, *torch.tensor(new).cumsum(0).tolist()] + [sum(new)] * (d.requests - len(new))
        )
        table = torch.zeros(d.requests, 4, dtype=torch.int32)
        table[: len(new)] = torch.tensor(pages[: len(new)])
        lengths = torch.tensor(ends + [0] * (d.requests - len(new)))
        single = len(new) if d.kind == "decode" else 0
        batch = decoder.Batch(
            self.cos[positions], self.sin[positions], torch.tensor(slots + [-1] * padding).int(),
            table, starts.int(),
            lengths.int(), torch.tensor([single, len(new)]).int(),
        )  # fmt: skip
        return torch.randint(0, 101, (d.tokens,), generator=generator).int(), batch, sum(new)

    def build(self, compilation, table=TABLE, **options):
        options.setdefault("keep", compilation.cache_dir is not None)
        module = options.pop("module", self.modules[True])
        return build(
            module, self.config, self.plans, table, self.kv(), compilation=compilation, **options
        )

    def compare(self, built, table=TABLE):
        """Largest differences of hidden states and of the cache between eager and built, over
        all descriptors.
        """
        worst = 0.0
        for d in table:
            ids, batch, count = self.inputs(d)
            kv = [self.kv(), self.kv()]
            with torch.inference_mode():
                eager = self.modules[False](ids, kv[0], batch, d.kind, d.max_query_len)[:count]
                pieces = built(ids, kv[1], batch, d.kind, d.max_query_len)[:count]
            assert float((kv[0] - self.kv()).abs().max()) > 0
            scratch = slice(0, PAGES)
            worst = max(worst, float((eager - pieces).abs().max() / eager.abs().max()))
            worst = max(worst, float((kv[0][:, scratch] - kv[1][:, scratch]).abs().max()))
        return worst


@pytest.fixture(scope="module")
def tiny():
    return Model()


def test_pieces_run_eagerly_are_the_model_bit_by_bit(tiny):
    built = tiny.build(EAGER)
    assert tiny.compare(built) == 0
    # One piece before each attention and one after the last; all between two attentions are alike.
    assert built.pieces["mixed"] == 5
    assert built.pieces["mixed, different"] == 3
    for d, query_len in ((Descriptor("decode", 3, 3, 1), 1), (Descriptor("mixed", 16, 4, 16), 7)):
        ids, batch, _ = tiny.inputs(d)
        with pytest.raises(OutsideTable):
            built(ids, tiny.kv(), batch, d.kind, query_len)


@pytest.mark.slow
def test_pieces_with_experts_are_the_model_bit_by_bit():
    """Experts take blocks of 16 rows in steps of 16 tokens, and of 32 in those of 32."""
    experts = Model(EXPERTS)
    built = experts.build(EAGER)
    assert experts.compare(built) == 0
    assert (built.pieces["mixed"], built.pieces["mixed, different"]) == (5, 3)


SMALL = Table((2, 4), (16,), 4)


@pytest.mark.slow
def test_inductor_compiles_each_different_piece_once(tiny):
    built = tiny.build(dataclasses.replace(EAGER, use_inductor=True), Table((2, 4), (), 4))
    assert built.counts == {"compiled": 3, "loaded": 0, "reused": 7}
    assert built.notes == []
    assert tiny.compare(built, Table((2, 4), (), 4)) < 1e-5


@pytest.mark.slow
def test_what_was_compiled_is_kept_and_checked_before_it_is_loaded(tiny, tmp_path):
    cache, dump = tmp_path / "cache", tmp_path / "dump"
    chosen = dataclasses.replace(
        EAGER, use_inductor=True, cache_dir=str(cache), debug_dump_path=str(dump)
    )
    built = tiny.build(chosen, SMALL)
    assert built.counts == {"compiled": 6, "loaded": 0, "reused": 9}
    assert tiny.compare(built, SMALL) < 1e-5
    names = [path.name for path in dump.iterdir()]
    for part in ("decode.traced.graph.py", "mixed.split.graph.py", "generated_0.py"):
        assert any(name.endswith(part) for name in names)

    for _ in range(2):  # loading leaves the folder loadable
        again = tiny.build(chosen, SMALL)
        assert again.counts == {"compiled": 0, "loaded": 6, "reused": 9}
    assert tiny.compare(again, SMALL) < 1e-5

    damaged = next(cache.glob("*/artifact_*/code/**/*.py"))
    damaged.write_text(damaged.read_text() + "\n# more\n")
    third = tiny.build(chosen, SMALL)
    assert third.counts == {"compiled": 1, "loaded": 5, "reused": 9}
    assert any("does not hold what was stored" in note for note in third.notes)

    factors = json.loads(next(cache.glob("*/factors.json")).read_text())
    assert {"plan", "graph", "range", "versions", "device", "compiler", "options"} <= set(factors)
    for folder in cache.iterdir():
        folder.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        tiny.build(chosen, SMALL)


def test_a_number_of_tokens_is_served_by_its_size_then_a_range_then_the_general_code():
    chosen = dataclasses.replace(EAGER, compile_sizes=(4,), compile_ranges=((1, 8), (9, 16)))
    served = [str(served_by(n, (1, 2, 4, 8, 16, 32), chosen)) for n in (1, 2, 4, 8, 16, 32)]
    assert served == ["1", "2-8", "4", "2-8", "9-16", "2-32"]


def test_wrapped_pieces_get_what_changes_and_nothing_else(tiny):
    seen = []

    def wrap(index, function, size):
        def call(*tensors):
            seen.append((index, size, [t.shape for t in tensors]))
            return function(*tensors)

        return call

    table = Table((2,), (16,), 4)
    built = tiny.build(EAGER, table, wrap_piece=wrap)
    assert tiny.compare(built, table) == 0
    assert [index for index, size, _ in seen if size == 2] == [0, 2, 4, 6, 8]
    weights = {p.shape for p in tiny.modules[True].parameters()}
    assert not any(shape in weights for *_, shapes in seen for shape in shapes)


def test_there_must_be_something_to_split_at(tiny):
    with pytest.raises(ConfigError, match="splitting_ops: got no_such_op"):
        tiny.build(dataclasses.replace(EAGER, splitting_ops=("no_such_op",)))


def arguments(tiny, d):
    ids, batch, _ = tiny.inputs(d)
    return {"token_ids": ids, "kv": tiny.kv().unbind(0), **batch.arrays()}


def test_with_guards_kept_no_size_is_compiled_again(tiny):
    sizes = [Descriptor("decode", n, n, 1) for n in (2, 4, 3)]
    backbone = Backbone(tiny.modules[True], "decode")
    results = evaluate_guards(backbone, [arguments(tiny, d) for d in sizes], "kept")
    for d, result in zip(sizes, results, strict=True):
        ids, batch, count = tiny.inputs(d)
        assert torch.equal(
            result[:count], tiny.modules[False](ids, tiny.kv(), batch, "decode", 1)[:count]
        )


@support_torch_compile
class Branches(torch.nn.Module):
    """Does something else for many tokens: a guard that matters."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.calls = 0

    def forward(self, x: Annotated[torch.Tensor, Open()]) -> torch.Tensor:
        return x * self.weight if x.shape[0] < 8 else x + self.weight


def test_a_guard_that_fails_is_seen_with_guards_kept_and_when_they_are_dropped():
    small, large = ({"x": torch.ones(n, 3)} for n in (4, 9))
    with pytest.raises(InternalError, match="call 1 fails a guard"):
        evaluate_guards(Branches(), [small, large], "branches")
    traced = trace(Branches(), {"x": torch.ones(4, 3)}, "branches")
    assert traced.violations(dict(tensors_of({"x": torch.ones(7, 3)}))) == []
    assert traced.violations(dict(tensors_of(large))) != []
    assert "not in [2" in traced.violations(dict(tensors_of({"x": torch.ones(1, 3)})))[0]


@support_torch_compile
class Parity(torch.nn.Module):
    """A guard that no range of sizes can state."""

    def forward(self, x: Annotated[torch.Tensor, Open()]) -> torch.Tensor:
        return x * 2 if x.shape[0] % 2 == 0 else x * 3


def test_a_guard_that_is_no_range_is_checked_too():
    traced = trace(Parity(), {"x": torch.ones(4, 3)}, "parity")
    assert traced.violations({("x", None): torch.ones(8, 3)}) == []
    assert traced.violations({("x", None): torch.ones(9, 3)}) != []


@pytest.mark.parametrize(
    ("change", "alike"),
    [(lambda x, y: (y * 3.0).relu() + x, False), (lambda x, y: (y * 2.0).tanh() + x, False),
     (lambda x, y: (y * 2.0).relu() + y, False), (lambda a, b: (b * 2.0).relu() + a, True)],
)  # fmt: skip
def test_pieces_are_alike_only_if_they_compute_the_same(change, alike):
    def text(function):
        graph = torch.fx.symbolic_trace(function)
        for node in graph.graph.nodes:
            node.meta["example_value"] = torch.ones(2, 3)
        return describe(graph)

    assert (text(change) == text(lambda x, y: (y * 2.0).relu() + x)) == alike


class Counts(Decoder):
    """Changes itself in its forward."""

    def forward(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(*args, **kwargs)


def test_a_forward_that_changes_the_module_is_refused(tiny):
    source = tiny.modules[True]
    module = Counts(
        tiny.model,
        decoder.parameters_of(tiny.model),
        source._ops,
        torch.float32,
        torch.device("cpu"),
    )
    module.load_state_dict(source.state_dict())
    module.freeze()
    with pytest.raises(InternalError, match="calls"):
        tiny.build(EAGER, module=module)
    before = state_of(source)
    check_state(before, state_of(source), "same")
    with torch.no_grad():
        source.layers[1].o.add_(0)
    with pytest.raises(InternalError, match="layers"):
        check_state(before, state_of(source), "written")


class Writes(Decoder):
    """Writes into a weight, but only where it is traced: an eager run before it leaves no sign."""

    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            torch.ops.aten.add_.Tensor(self.norm, 1.0)
        return super().forward(*args, **kwargs)


def test_a_trace_that_writes_into_a_weight_is_refused(tiny):
    source = tiny.modules[True]
    module = Writes(
        tiny.model,
        decoder.parameters_of(tiny.model),
        source._ops,
        torch.float32,
        torch.device("cpu"),
    )
    module.load_state_dict(source.state_dict())
    module.freeze()
    with pytest.raises(InternalError, match="writes into the weight"):
        tiny.build(EAGER, module=module)


def test_open_dimensions_come_from_annotations_or_are_named():
    assert Branches.dynamic_arg_dims == {"x": (0,)}

    class Plain(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    assert support_torch_compile(dynamic_arg_dims={"y": (0, 1)})(Plain).dynamic_arg_dims == {
        "y": (0, 1)
    }
    with pytest.raises(InternalError, match="'z'"):
        support_torch_compile(dynamic_arg_dims={"z": (0,)})(Plain)
    with pytest.raises(InternalError, match="no parameter"):
        support_torch_compile(Plain)
