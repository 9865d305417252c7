"""What one of several shards computes: which sums it states, and which rows it holds."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from twinfer.gpu.plans import make_plans, plan_all
from twinfer.ops import resolve as plan
from twinfer.ops.namespaces import namespace
from twinfer.ops.recording import Recorder
from twinfer.ops.shapes import recording_ops
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.errors import ConfigError, UnsupportedModel
from twinfer.shared.models import decoder
from twinfer.shared.models.calls import ModelShapes, _empty, record_samplers
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.families import parameters_of
from twinfer.shared.models.locate import model_folder
from twinfer.shared.models.placement import head_layout, place, shard_config
from twinfer.shared.models.quantization import WHEN_LOADED, Quantization
from twinfer.shared.models.sharding import rows_to_sample, sharded_mixer, words_of
from twinfer.shared.models.spec import Experts, Narrow, Shard
from twinfer.shared.models.stages import Batch, normed_over_heads, project, through_experts
from twinfer.shared.weights import pieces

CPU = DeviceInfo("cpu", "cpu", 1 << 40)


def resolved(name, shards=1, **options):
    model = load_config(model_folder(name))
    config = EngineConfig(
        model=name, backend="torch", device="cpu", max_model_len=64, load_format="dummy",
        tensor_parallel_size=shards, **options,
    )  # fmt: skip
    return model, resolve(config, model, CPU)[0]


def calls_of_a_pass(model, config):
    """The ops that a pass over all layers calls, in order."""
    shapes, recorder = ModelShapes(model, config), Recorder()
    whole, table = decoder.model_of(model), decoder.parameters_of(model)
    d = next(iter(config.table()))
    weights = [shapes._without_data(table.layer(index)) for index in range(len(whole.layers))]
    ids = np.zeros(d.tokens, np.int32)
    pass_ = decoder.PlainCalls(
        recording_ops(recorder, _empty), whole, shapes.top, weights, ids, shapes.batch(d),
        lambda hidden: hidden,
    )  # fmt: skip
    decoder.forward(pass_, shapes.caches(whole))
    return [call.op for call in recorder.calls]


@pytest.mark.parametrize(
    "name",
    [
        *("demo", "llama3-8b", "gemma3-4b", "granite3.3-8b", "qwen2.5-7b", "gemma4-31b"),
        *("mixtral-8x7b", "qwen3-30b-a3b"),
    ],
)
@pytest.mark.parametrize("shards", [2, 4])
def test_a_model_states_two_sums_a_layer_and_one_of_its_embeddings(name, shards):
    model, config = resolved(name)
    local = shard_config(model, Shard(shards - 1, shards))
    calls = calls_of_a_pass(local, config)
    assert calls.count("all_reduce") == 2 * model.num_layers + 1
    assert "embedding" not in calls
    assert calls_of_a_pass(model, config).count("all_reduce") == 0


@pytest.mark.parametrize("name", ["demo", "mixtral-8x7b"])
def test_the_plans_of_a_model_on_ranks_are_those_of_each(name):
    model, config = resolved(name, 2)
    ranks = [shard_config(model, Shard(index, 2)) for index in range(2)]
    plans = [make_plans(each, config) for each in (model, *ranks)]
    assert "all_reduce" in plans[0]["decode"]
    assert len({each.hash for each in plans}) == 1


def test_the_plans_of_a_model_on_ranks_have_the_sums_of_ranks(monkeypatch):
    """The library that adds up on GPUs is there for ranks alone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model, config = resolved("demo", 2, op_priority={"all_reduce": ["nccl"]})
    assert make_plans(model, config)["decode"]["all_reduce"].provider == "nccl"
    here = make_plans(shard_config(model, Shard(0, 2)), config)
    assert here["decode"]["all_reduce"].provider == "native"


@pytest.mark.parametrize(("shards", "provider"), [(1, "native"), (2, "nccl")])
def test_a_plan_over_all_ops_is_that_of_a_rank(shards, provider, monkeypatch):
    """`twinfer plan --all` lists what ranks would run of the ops that the model does not call."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _, config = resolved("demo", shards, op_priority={"token_scales": ["nccl"]})
    assert plan_all(config)["token_scales"].provider == provider


def test_small_embeddings_of_layers_are_one_more_sum():
    model, config = resolved("gemma4-e2b")
    calls = calls_of_a_pass(shard_config(model, Shard(0, 2)), config)
    assert calls.count("all_reduce") == 2 * model.num_layers + 2


def test_experts_beside_an_mlp_are_one_more_sum_a_layer():
    """Both are normed before they are added up."""
    model, config = resolved("gemma4-26b-a4b")
    calls = calls_of_a_pass(shard_config(model, Shard(1, 2)), config)
    assert calls.count("all_reduce") == 3 * model.num_layers + 1


def test_a_shard_has_whole_experts_and_counts_them_from_its_first_one():
    model = load_config(model_folder("qwen3-30b-a3b"))
    for index in range(4):
        local = shard_config(model, Shard(index, 4))
        mixer = decoder.model_of(local).layers[0][1].mixer
        assert (mixer.num_experts, mixer.first) == (32, 32 * index)
        held = decoder.parameters_of(local).layer(0)
        assert held["experts_down"].shape == (32 * 2048, 768)
        assert held["router"].shape == (128, 2048)


@pytest.mark.parametrize(("fault", "same"), [(0, True), (1, False), (-1, False)])
def test_what_the_experts_of_all_shards_give_adds_up(fault, same):
    """And not where a shard counts them from another's first one."""
    rng = np.random.default_rng(0)
    count, width, inter, tokens = 8, 12, 5, 9
    spec = Experts(count, 3, renormalize=True)
    weights = {
        "router": rng.normal(size=(count, width)),
        "experts_gate_up": rng.normal(size=(count * 2 * inter, width)),
        "experts_down": rng.normal(size=(count * width, inter)),
    }
    x = rng.normal(size=(tokens, width))
    slots = np.arange(tokens, dtype=np.int32) - 1  # the first one is padding
    batch = Batch(None, None, slots, *[None] * 4)
    ops = plan("numpy").bind()

    def given(spec, weights):
        return through_experts(ops, spec, weights, x, x, batch)

    total = 0
    for index in range(2):
        own = sharded_mixer(spec, Shard(index, 2))
        assert own.num_experts == count // 2
        held = {
            name: w if name == "router" else np.split(w, 2)[index] for name, w in weights.items()
        }
        total = total + given(replace(own, first=own.first + fault * index), held)
    assert np.allclose(total, given(spec, weights)) == same
    assert not total[0].any()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_token_that_is_dealt_out_has_one_scale(kind):
    """That of the whole token, or it is quantised to other numbers than on one device."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(6, 64)).astype(np.float32) * np.linspace(0.1, 3, 64, dtype=np.float32)
    narrow = Narrow(kind, activations=kind, dealt=True)
    made = pieces(namespace("numpy"), rng.normal(size=(10, 64)).astype(np.float32), narrow)
    ops, halves = plan("numpy").bind(), [slice(0, 32), slice(32, 64)]
    scales = [np.abs(x[:, half]).max(1, keepdims=True) for half in halves]

    class Ops:
        """The ops of a shard that takes these scales for its parts of tokens."""

        def __init__(self, scales):
            self.token_scales = scales

        def __getattr__(self, name):
            return getattr(ops, name)

    def summed(scales):
        total = 0
        for half in halves:
            held = {"o": made["values"][:, half], "o_scale": made["scale"]}
            total = total + project(Ops(scales), held, "o", x[:, half], None, narrow)
        return total

    weights = {"o": made["values"], "o_scale": made["scale"]}
    alone = project(ops, weights, "o", x, None, replace(narrow, dealt=False))
    share = np.maximum(*scales) / (127 if kind == "int8" else 448)
    np.testing.assert_allclose(summed(lambda x, limit: share), alone, rtol=1e-5, atol=1e-5)
    assert np.abs(summed(ops.token_scales) - alone).max() > 1e-3


def test_norms_over_all_heads_are_one_more_sum_a_layer():
    """That of their mean squares."""
    model, config = resolved("olmo3-7b")
    calls = calls_of_a_pass(shard_config(model, Shard(1, 2)), config)
    assert calls.count("all_reduce") == 3 * model.num_layers + 1
    assert calls.count("qk_mean_squares") == calls.count("norm_qk_by_means") == model.num_layers
    assert "wide_qk_norm" not in calls
    assert "all_reduce" not in calls_of_a_pass(model, config)


@pytest.mark.parametrize("fault", ["", "own squares", "counted once", "with zeros"])
@pytest.mark.parametrize(
    ("heads", "kv", "shards"), [(4, 4, 2), (6, 3, 2), (6, 3, 4), (6, 2, 4), (7, 1, 3), (5, 1, 4)]
)
def test_norms_over_all_heads_see_the_heads_of_all_shards(heads, kv, shards, fault):
    """A head of zeros counts for none, one that several shards have as often as it is there."""
    size, tokens, rng = 4, 5, np.random.default_rng(2)
    model = replace(
        load_config(model_folder("olmo3-7b")), num_heads=heads, num_kv_heads=kv, head_dim=size
    )
    rows = {"qkv": (heads + 2 * kv) * size, "q_norm": heads * size, "k_norm": kv * size}
    whole = {name: rng.normal(size=(count, tokens)) for name, count in rows.items()}
    whole = {name: x if name == "qkv" else x[:, 0] for name, x in whole.items()}
    table, sources, held = decoder.parameters_of(model).layer(0), [], []
    for shard in range(shards):
        of_shard = {n: np.split(place(table[n], model, shards).source, shards)[shard] for n in rows}
        found = {n: np.where(s < 0, 0.0, whole[n][s].T).T for n, s in of_shard.items()}
        held.append((found["qkv"].T, found["q_norm"], found["k_norm"]))
        sources.append(of_shard["qkv"])
    spec = decoder.model_of(shard_config(model, Shard(0, shards))).layers[0][0].mixer
    query, key = spec.dealt_entries
    if fault == "counted once":
        key = kv * size
    if fault == "with zeros":
        query, key = shards * spec.num_heads * size, shards * spec.num_kv_heads * size
    spec = replace(spec, dealt_entries=(query, key))
    ops = plan("numpy").bind()
    means = [ops.qk_mean_squares(*each, *spec.dealt_entries) for each in held]

    class Ops:
        """The ops of a shard, among others."""

        def all_reduce(self, own):
            return own * shards if fault == "own squares" else sum(means)

        def __getattr__(self, name):
            return getattr(ops, name)

    want = ops.wide_qk_norm(whole["qkv"].T, whole["q_norm"], whole["k_norm"], spec.norm_eps)
    normed = [normed_over_heads(Ops(), spec, *each) for each in held]
    right = all(
        np.allclose(own[:, source >= 0], want[:, source[source >= 0]], rtol=1e-9)
        for own, source in zip(normed, sources, strict=True)
    )
    layout = head_layout(heads, kv, shards)
    harmless = {
        "": True,
        "own squares": False,
        "counted once": sum(head >= 0 for head in layout.kv) == kv,
        "with zeros": -1 not in (*layout.query, *layout.kv),
    }
    assert right == harmless[fault]


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "llama3.1-8b"])
@pytest.mark.parametrize("scheme", sorted(WHEN_LOADED))
def test_a_shard_holds_its_share_of_narrow_weights(name, scheme):
    held = Quantization(WHEN_LOADED[scheme])
    model = replace(load_config(model_folder(name)), quantization=held)

    def size(model):
        return sum(
            p.entries
            for p in decoder.parameters_of(model).layer(0).values()
            if p.piece_of is not None and p.piece_of.piece == "values"
        )

    assert size(shard_config(model, Shard(1, 4))) * 4 == size(model)


def test_sums_stand_where_the_residual_is_added():
    """The norm of what was summed is one call with the sum; only behind a norm of its own, or a
    factor, is a result summed at once.
    """
    model, config = resolved("llama3-8b")
    calls = calls_of_a_pass(shard_config(model, Shard(0, 2)), config)
    assert calls.count("reduce_add_rms_norm") == 2 * model.num_layers + 1
    model, config = resolved("gemma3-4b")
    assert "reduce_add_rms_norm" not in calls_of_a_pass(shard_config(model, Shard(0, 2)), config)


def test_equal_layers_stay_of_one_kind():
    for name in ("demo", "llama3-8b", "gemma3-4b", "gemma4-e2b", "qwen3-0.6b"):
        model = load_config(model_folder(name))
        kinds = len(decoder.model_of(model).kinds)
        assert len(decoder.model_of(shard_config(model, Shard(1, 2))).kinds) == kinds


@pytest.mark.parametrize("words", [997, 1000, 5])
@pytest.mark.parametrize("shards", [2, 4])
def test_every_word_is_one_shards(words, shards):
    held = [w for i in range(shards) for w in words_of(words, Shard(i, shards))]
    assert held == list(range(len(held)))
    assert words <= len(held) < words + shards


def test_a_vocabulary_that_does_not_divide_is_padded():
    model, _ = resolved("demo")
    table = decoder.parameters_of(model)
    placed = place(table.top["embed"], model, 3, pads_words=True)
    assert model.vocab_size % 3
    assert placed.shape[0] % 3 == 0
    np.testing.assert_array_equal(
        placed.source, [*range(model.vocab_size), *[-1] * (placed.shape[0] - model.vocab_size)]
    )
    assert place(table.top["embed"], model, 3).axis is None


def test_rows_are_dealt_out_where_they_divide():
    assert rows_to_sample(8, None) == 8
    assert [rows_to_sample(n, Shard(0, 4)) for n in (1, 2, 4, 6, 256)] == [1, 2, 1, 6, 64]


def test_samplers_are_planned_for_what_they_get():
    """The best of a shard's own words, and whole rows of its share."""
    model, config = resolved("llama3-8b")
    recorder = Recorder()
    local = shard_config(model, Shard(1, 2))
    record_samplers(recorder, ModelShapes(local, config))
    shapes = {
        (call.op, call.arguments["logits"].shape[1])
        for call in recorder.calls
        if call.op in ("greedy_sample", "sample")
    }
    assert ("greedy_sample", model.vocab_size // 2) in shapes
    assert ("sample", model.vocab_size) in shapes
    assert ("sample", model.vocab_size // 2) not in shapes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capture": "somewhere,nan"}, "capture: got somewhere"),
        ({"row_invariant": True}, "row_invariant: got tensor_parallel_size 2"),
    ],
)
def test_what_ranks_do_not_do_is_refused(options, words):
    model = load_config(model_folder("demo"))
    config = EngineConfig(
        model="demo", backend="torch", device="cpu", tensor_parallel_size=2, **options
    )
    with pytest.raises(ConfigError, match=words):
        resolve(config, model, CPU)


WIDE = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("width", "quantization", "words"),
    [
        (
            608, Quantization(WHEN_LOADED["int4"]),
            rf"quantization: got int4, and the rows of down \({WIDE}\) have 608 entries, allowed are "
            "multiples of 128; all rows of this model fit fp8, fp8_weights, int8, int8_weights, "
            "int4_g32",
        ),
        (
            601, Quantization(WHEN_LOADED["int8_weights"]),
            rf"got int8_weights, and .* down \({WIDE}\) have 601 entries, .* multiples of 2",
        ),
        (
            608, Quantization(Narrow("int4", 64), "packed"),
            rf"quantization_config: weights in int4 by groups of 64, and the rows of down \({WIDE}\) "
            "have 608 entries, allowed are multiples of 64",
        ),
    ],
)  # fmt: skip
def test_rows_without_whole_groups_are_refused_by_what_is_allowed(width, quantization, words):
    model = replace(
        load_config(model_folder("demo")), intermediate_size=width, quantization=quantization
    )
    with pytest.raises(UnsupportedModel, match=f"{words}$"):
        parameters_of(model)
