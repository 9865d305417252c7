"""Both workers against transformers, float32: every architecture, odd shapes, prompts around
page boundaries.
"""

import json
import os
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from twinfer.bucketing import Descriptor
from twinfer.shared.checkpoint import Checkpoint
from twinfer.shared.config import EngineConfig
from twinfer.shared.demand import ANYTHING
from twinfer.shared.engine import Engine
from twinfer.shared.errors import RequestError
from twinfer.shared.models import stages
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.spec import Attention, Experts, Mlp, MlpAndExperts
from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.step import StepInput, batch_layout, sampling_layout

from .conftest import GREEDY_ONLY

NAMES = [
    "llama-mha", "llama3-scaled-tied", "llama-biases-head96", "llama-yarn", "mistral-window",
    "mistral-mqa", "qwen2",
    "qwen2-windows", "qwen3", "qwen3-tied-bias", "phi3", "phi3-window", "phi4-mini-short",
    "phi4-mini-long", "granite",
    "granite-odd", "mistral3", "mistral3-tied-window",
    "gemma2", "gemma3", "gemma3-images", "glm4", "glm4-head24", "olmo2", "olmo3", "ministral3",
    "ministral3-images",
    "seed-oss", "seed-oss-biases",
    "glm", "glm-head24",
    "ernie4-5", "ernie4-5-biases",
    "gemma", "gemma-biases",
    "smollm3", "smollm3-windows",
    "exaone4", "exaone4-full",
    "ministral", "ministral-window",
    "cwm", "cwm-biases",
    "olmoe", "olmoe-biases",
    "dots1", "dots1-windows",
    "granitemoe", "granitemoe-biases",
    "gemma4", "gemma4-small", "gemma4-images", "gemma4-unified", "gemma4-experts",
    "gemma4-experts-images",
    "mixtral", "mixtral-window", "qwen2-moe", "qwen3-moe", "qwen3-moe-biases",
    "exaone-moe", "exaone-moe-types",
    "solar-open", "solar-open-biases",
    "hyperclovax", "hyperclovax-biases",
    "vaultgemma",
    "helium", "helium-biases",
    "arcee", "arcee-biases",
    "hunyuan", "hunyuan-stretched", "hunyuan-moe", "hunyuan-moe-stretched",
    "ernie4-5-moe", "ernie4-5-moe-few",
    "llama4", "llama4-plain", "llama4-images",
    "granitemoehybrid", "granitemoehybrid-still",
    "hy-v3", "hy-v3-types",
    "flex-olmo", "flex-olmo-biases",
    "glm4v", "glm4v-whole", "glm4v-moe", "glm4v-moe-plain",
    "qwen2-vl", "qwen2-5-vl", "qwen2-5-vl-windows",
    "qwen3-vl", "qwen3-vl-biases", "qwen3-vl-moe", "qwen3-vl-moe-biases",
    "glm4-moe", "glm4-moe-biases", "gpt-oss",
    "minimax-m2",
    "deepseek-v2", "deepseek-v2-plain", "deepseek-v3", "deepseek-v3-halves",
    "glm4-moe-lite", "glm4-moe-lite-types",
    "mistral4",
    "youtu", "youtu-yarn",
]  # fmt: skip
LENGTHS = (1, 15, 16, 17, 100, 500)
NEW_TOKENS = 64
# transformers takes the short longrope factors up to 600 tokens for the one, up to 96 for the
# other.
LONGROPE = {"phi4-mini-short": dict(max_model_len=600), "phi4-mini-long": dict(max_model_len=640)}
# The usual programs.
LADDER = {"qwen3": dict(decode_sizes=None, mixed_sizes=None, demand=ANYTHING)}
LONG_ONLY = {"phi4-mini-long": (97, 112, 500)}


def start(folder, backend, device, demand=GREEDY_ONLY, **options):
    settings = dict(max_num_seqs=8, max_num_batched_tokens=128, page_size=16, dtype="float32")
    settings |= options
    if backend == "jax":  # compiles for seconds for each program: half of its ladder's
        requests, tokens = settings["max_num_seqs"], settings["max_num_batched_tokens"]
        settings = dict(decode_sizes=(requests,), mixed_sizes=(16, tokens)) | settings
    config = EngineConfig(model=folder, backend=backend, device=device, **settings)
    return Engine(config, load_config(folder), folder, demand=demand)


def run(engine, prompts, params):
    requests = [engine.add(str(i), p, params) for i, p in enumerate(prompts)]
    while engine.has_work:
        engine.step()
    return [request.output for request in requests]


def logits_of(engine, tokens, chunk=128):
    """Logits at every position of one sequence, computed in chunks as the engine does: [len
    vocab].
    """
    shape, groups, size = engine.shape, engine.scheduler.groups, 128
    rows = []
    for first in range(0, len(tokens), chunk):
        part = tokens[first : first + chunk]
        descriptor = Descriptor("mixed", size, shape.max_rows, size)
        layout = batch_layout(descriptor, shape)
        buffer = layout.allocate()
        v = layout.views(buffer)
        position = np.arange(first, first + len(part))
        v["token_ids"][: len(part)] = part
        v["positions"][: len(part)] = position
        v["slots"][:] = -1
        for number, group in enumerate(groups):
            columns, offsets = np.divmod(position, group.page_size)
            slots = v["slots"][number * size : number * size + len(part)]
            slots[:] = (columns * len(groups) + number) * group.page_size + offsets
        v["query_start"][1:] = len(part)
        v["kv_lens"][0] = first + len(part)
        v["rows"][:] = shape.max_rows
        v["counts"][:] = (len(part) == 1, 1)
        sampling = sampling_layout(shape.max_rows).allocate()
        sampling_layout(shape.max_rows).view(sampling, "sample_rows")[:] = shape.max_rows
        # Column c of group g is page c G + g.
        columns = np.arange(shape.pages_per_request, dtype=np.int32) * len(groups)
        pages = np.concatenate(
            [np.tile(columns + number, (shape.max_rows, 1)) for number in range(len(groups))]
        )
        step = StepInput(0, descriptor, shape, "greedy", buffer, sampling, page_table=pages)
        rows.append(engine.worker.logits(step)[: len(part)])
    return np.concatenate(rows)


# The JAX worker, whose programs take half a minute of compiling for each, is given all of them in
# `make test-slow`; in `make test` test_llm.py compares it with transformers, tokens and
# log-probabilities, and test_page_groups.py runs its windows. What is in the folder of a Mistral 3
# is read alike for both.
VARIANTS = [
    "gemma3-images", "ministral3-images", "gemma4-images", "gemma4-experts-images", "mistral3-tied-window",
    "mixtral-window", "qwen3-tied-bias", "qwen3-moe-biases", "glm4-head24", "glm4-moe-biases", "granite-odd",
    "seed-oss-biases",
    "glm-head24",
    "ernie4-5-biases",
    "gemma-biases",
    "smollm3-windows",
    "exaone4-full",
    "ministral-window",
    "cwm-biases",
    "olmoe-biases",
    "dots1-windows",
    "granitemoe-biases",
    "exaone-moe-types",
    "solar-open", "solar-open-biases",
    "hyperclovax-biases",
    "vaultgemma",
    "helium", "helium-biases",
    "arcee-biases",
    "hunyuan-stretched", "hunyuan-moe-stretched",
    "ernie4-5-moe-few",
    "llama4-plain", "llama4-images",
    "granitemoehybrid", "granitemoehybrid-still",
    "hy-v3", "hy-v3-types",
    "flex-olmo", "flex-olmo-biases",
    "glm4v", "glm4v-whole", "glm4v-moe", "glm4v-moe-plain",
    "qwen2-vl", "qwen2-5-vl-windows",
    "qwen3-vl-biases", "qwen3-vl-moe", "qwen3-vl-moe-biases",
    "deepseek-v2-plain", "deepseek-v3-halves", "glm4-moe-lite", "glm4-moe-lite-types", "youtu",
    "youtu-yarn",
]  # fmt: skip
"""Of configurations beside them: in `make test-slow`."""
ON_A_GPU = [
    "llama-biases-head96",
    "mistral-mqa",
    "qwen2-windows",
    "qwen3",
    "phi4-mini-long",
    "granite-odd",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-small",
    "gemma4-experts",
    "glm4",
    "olmo3",
    "ministral3",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "glm4-moe-biases",
    "deepseek-v3",
]


def marks_of(name):
    """Of a configuration on the torch worker."""
    marks = {"gpu": name in ON_A_GPU, "slow": name in VARIANTS}
    return [getattr(pytest.mark, mark) for mark, wanted in marks.items() if wanted]


CASES = [
    *(pytest.param(name, "jax", marks=pytest.mark.slow) for name in NAMES),
    *(pytest.param(name, "torch", marks=marks_of(name)) for name in NAMES),
]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_logits_and_greedy_tokens(checkpoints, oracle, prompts, name, backend, device):
    folder, model = checkpoints(name)
    engine = start(folder, backend, device, **LONGROPE.get(name, {}), **LADDER.get(name, {}))
    try:
        # A token that stands for images is the last one, and no prompt may have it.
        vocabulary = engine.model.vocab_size - len(engine.model.image_token_ids)
        texts = prompts(vocabulary, *LONG_ONLY.get(name, LENGTHS))
        got = run(engine, texts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS))
        assert engine.worker.compilations_after_ready() == 0
        for prompt, tokens in zip(texts, got, strict=True):
            # One of them is decoded by transformers in its own way.
            guess = () if len(prompt) in (100, 112) else tokens
            want, want_logits = oracle(model, prompt, NEW_TOKENS, guess)
            assert tokens == want, f"prompt of {len(prompt)} tokens"
            ours = logits_of(engine, np.concatenate([prompt, want[:-1]]))
            error = np.linalg.norm(ours - want_logits, axis=-1) / np.linalg.norm(
                want_logits, axis=-1
            )
            assert error.max() < 1e-4, (
                f"prompt of {len(prompt)} tokens, position {error.argmax()}: {error.max():.2e}"
            )
    finally:
        engine.close()


def test_the_oracle_takes_no_wrong_guess(checkpoints, oracle, prompts):
    _, model = checkpoints("qwen3")
    (prompt,) = prompts(1000, 20)
    want, logits = oracle(model, prompt, 8)
    for guess in (
        want[:5],
        *([*want[:i], (want[i] + 1) % 1000, *want[i + 1 :]] for i in (0, 4, 7)),
    ):
        tokens, _ = oracle(model, prompt, 8, guess)
        assert tokens == want
    tokens, again = oracle(model, prompt, 8, want)
    assert tokens == want
    np.testing.assert_allclose(again, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mistral3", "mistral3-tied-window"])
def test_a_prompt_with_a_token_of_an_image_is_refused(checkpoints, name, device):
    """The check is of one request: others run on."""
    folder, _ = checkpoints(name)
    first = {"mistral3": "language_model.model.", "mistral3-tied-window": "model.language_model."}[
        name
    ]
    assert Checkpoint(folder).has(f"{first}norm.weight")
    engine = start(folder, "torch", device)
    image = engine.model.vocab_size - 1
    params = SamplingParams(temperature=0, max_tokens=4)
    assert engine.model.image_token_ids == (image,)
    with pytest.raises(
        RequestError,
        match=f"^prompt: token id {image} stands for an image or a video, and prompts are text",
    ):
        engine.add("image", [1, 2, image, 3], params)
    ((*tokens,),) = run(engine, [[1, 2, 3]], params)
    assert len(tokens) == 4
    assert any(change.field == "prompts" for change in engine.report.changes)
    engine.close()


@pytest.mark.parametrize("backend", [pytest.param("jax", marks=pytest.mark.slow), "torch"])
def test_a_sharded_checkpoint_with_a_version_4_config(
    checkpoints, prompts, tmp_path, backend, device
):
    """The same weights in several files, and `rope_theta` + `rope_scaling` as transformers 4
    wrote them.
    """
    folder, model = checkpoints("llama3-scaled-tied")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert os.path.exists(tmp_path / "model.safetensors.index.json")
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    outputs = []
    for where in (folder, str(tmp_path)):
        engine = start(where, backend, device)
        params = SamplingParams(temperature=0, max_tokens=8)
        outputs.append(run(engine, prompts(engine.model.vocab_size, 20, 40), params))
        engine.close()
    assert outputs[0] == outputs[1]


def test_the_check_would_see_a_wrong_rope_base(checkpoints, oracle, prompts, tmp_path, device):
    """The bound of the parity test must reject a fault that is small at short distances."""
    folder, model = checkpoints("qwen3")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 1.01
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = start(str(tmp_path), "torch", device)
    prompt = prompts(engine.model.vocab_size, 100)[0]
    _, want = oracle(model, prompt, 2)
    ours = logits_of(engine, prompt)
    error = np.linalg.norm(ours - want[:100], axis=-1) / np.linalg.norm(want[:100], axis=-1)
    assert error.max() > 1e-4
    engine.close()


def test_an_engine_for_long_sequences_takes_the_long_factors_for_all(checkpoints, prompts, device):
    """transformers would take the short ones here. Given the long ones for both, it computes the
    same.
    """
    import torch
    import transformers

    folder, _ = checkpoints("phi4-mini-long")
    config = transformers.AutoConfig.from_pretrained(folder)
    config.rope_parameters["short_factor"] = config.rope_parameters["long_factor"]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, attn_implementation="eager"
    ).eval()
    engine = start(folder, "torch", device, max_model_len=640)
    (prompt,) = prompts(engine.model.vocab_size, 40)
    with torch.no_grad():
        want = model(torch.tensor(prompt)[None]).logits[0].numpy()
    ours = logits_of(engine, prompt)
    assert (np.linalg.norm(ours - want, axis=-1) / np.linalg.norm(want, axis=-1)).max() < 1e-4
    (change,) = [change for change in engine.report.changes if change.field == "longrope factors"]
    assert (
        str(change)
        == "longrope factors: short -> long (max_model_len is above 96: for every sequence)"
    )
    engine.close()


def small_faults(model, name):
    """Models that differ from `model` in one number, by 1 % at most, or a rounding."""
    rope = model.rope
    found = {
        "attention": replace(
            model, attention_scale=1.01 * (model.attention_scale or model.head_dim**-0.5)
        ),
        "part": replace(model, rope=replace(rope, partial_rotary_factor=1.0, kind="default")),
        "longrope": replace(model, rope=replace(rope, factor=1.01 * rope.factor)),
        "factors": replace(
            model, rope=replace(rope, short_factor=rope.long_factor, long_factor=rope.short_factor)
        ),
        "residual": replace(model, residual_scale=0.69921875),  # 0.7 rounded to bfloat16
        "embedding": replace(model, embedding_scale=1.001 * model.embedding_scale),
        "logits": replace(model, logits_scale=1.001 * model.logits_scale),
    }
    found["theta"] = replace(model, rope=replace(rope, theta=1.01 * rope.theta))
    found["attention cap"] = replace(model, attention_cap=1.01 * model.attention_cap)
    found["logits cap"] = replace(model, logits_cap=1.001 * model.logits_cap)
    if model.window_rope is not None:
        window_rope = replace(model.window_rope, theta=1.01 * model.window_rope.theta)
        found["window theta"] = replace(model, window_rope=window_rope)
        found["ropes exchanged"] = replace(model, rope=model.window_rope, window_rope=rope)
    if model.temper_start:
        found["temper begins at 0"] = replace(model, temper_start=0)
    found["rotated"] = replace(model, unrotated_layers=())
    if model.temper is not None:
        beta, original = model.temper
        found["temper"] = replace(model, temper=(1.01 * beta, original))
        found["temper begins late"] = replace(model, temper=(beta, original + 1))
    return {fault: found[fault] for fault in FAULTS[name]}


FAULTS = {
    "phi4-mini-short": ("attention", "part", "longrope", "factors"),
    "phi4-mini-long": ("attention", "part", "longrope", "factors"),
    "granite": ("attention", "residual", "embedding", "logits"),
    "granite-odd": ("attention", "residual", "embedding", "logits"),
    "gemma2": ("attention", "embedding", "attention cap", "logits cap", "theta"),
    "gemma3": ("attention", "embedding", "theta", "window theta", "ropes exchanged"),
    "glm4": ("attention", "part", "theta"),
    "olmo3": ("attention", "theta", "window theta", "ropes exchanged"),
    "ministral3": ("attention", "theta", "temper", "temper begins late"),
    "smollm3": ("attention", "theta", "rotated"),
    "exaone4": ("attention", "theta", "rotated"),
    "hunyuan-stretched": ("attention", "theta"),
    "granitemoehybrid": ("attention", "residual", "embedding", "logits", "theta"),
    "granitemoehybrid-still": ("rotated", "logits"),
    "llama4": ("attention", "theta", "temper", "temper begins at 0"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_check_would_see_other_numbers(checkpoints, oracle, prompts, name, device):
    """Each number of a config that these families brought is seen by the bound, where it is off
    by little.
    """
    folder, model = checkpoints(name)
    (prompt,) = prompts(997, 100)
    _, want = oracle(model, prompt, 2)
    for fault, wrong in small_faults(load_config(folder), name).items():
        config = EngineConfig(
            model=folder, backend="torch", device=device, dtype="float32", **LONGROPE.get(name, {})
        )
        engine = Engine(config, wrong, folder)
        ours = logits_of(engine, prompt)
        error = np.linalg.norm(ours - want[:100], axis=-1) / np.linalg.norm(want[:100], axis=-1)
        assert error.max() > 1e-4, fault
        engine.close()


class RouterReadsX:
    """Ops with which the router reads the norm of what its MLP reads, not of the stream."""

    def __init__(self, ops, x):
        self.ops, self.x = ops, x

    def __getattr__(self, name):
        return getattr(self.ops, name)

    def rms_norm_pair(self, stream, first, second, eps):
        of_stream, _ = self.ops.rms_norm_pair(stream, first, second, eps)
        return of_stream, self.ops.rms_norm(self.x, second, eps)


def of_experts(**changes):
    return lambda spec: replace(spec, experts=replace(spec.experts, **changes))


WRONG_MIXTURES = {
    "no factor of each expert": of_experts(factors=False),
    "not renormalised": of_experts(renormalize=False),
    "silu": of_experts(act="silu"),
    "one expert less": of_experts(top_k=2),
    "norms exchanged": lambda spec: replace(
        spec, behind_mlp=spec.behind_experts, behind_experts=spec.behind_mlp
    ),
    "the router has the norm of experts": lambda spec: replace(
        spec, before_router=spec.before_experts
    ),
}


@pytest.mark.parametrize("fault", [*WRONG_MIXTURES, "the router reads x", "experts read x"])
def test_the_check_would_see_a_wrong_mixture(
    checkpoints, oracle, prompts, monkeypatch, fault, device
):
    """What stands beside the MLP of Gemma 4, with one thing wrong."""
    folder, model = checkpoints("gemma4-experts")
    (prompt,) = prompts(997, 100)
    _, want = oracle(model, prompt, 2)

    def stage(ops, spec, weights, x, cache, batch):
        if fault == "the router reads x":
            ops = RouterReadsX(ops, x)
        elif fault == "experts read x":
            batch = batch._replace(stream=x)
        else:
            spec = WRONG_MIXTURES[fault](spec)
        return stages.mlp_and_experts_stage(ops, spec, weights, x, cache, batch)

    monkeypatch.setitem(stages.STAGES, MlpAndExperts, stage)
    engine = start(folder, "torch", device, enforce_eager=True)
    ours = logits_of(engine, prompt)
    error = np.linalg.norm(ours - want[:100], axis=-1) / np.linalg.norm(want[:100], axis=-1)
    assert error.max() > 1e-4
    engine.close()


class Instead:
    """Ops with another function in place of one."""

    def __init__(self, ops, name, function):
        self.ops, self.name, self.function = ops, name, function

    def __getattr__(self, name):
        return self.function if name == self.name else getattr(self.ops, name)


def as_it_is(ops, spec, weights, batch):
    return ops, spec, weights, batch


def changed(**values):
    """A mixer with other values."""
    return lambda ops, spec, weights, batch: (ops, replace(spec, **values), weights, batch)


def with_op(name, function):
    """A stage that calls `function` in place of an op."""
    return lambda ops, spec, weights, batch: (
        Instead(ops, name, partial(function, ops)),
        spec,
        weights,
        batch,
    )


def results_weighed(ops, spec, weights, batch):
    """Weights are on what comes out of an expert, as in most families."""

    def route(logits, *more):
        chosen, experts = ops.moe_route(logits, *more)
        return ops.gate_by_best(chosen, logits), experts

    wrong = Instead(Instead(ops, "moe_route", route), "gate_by_best", lambda x, logits: x)
    return wrong, spec, weights, batch


LEFT_OUT = {
    "arcee": {"not squared": (Mlp, with_op("relu2", lambda ops, x: x * (x > 0)))},
    "hunyuan": {"normed before rotated": (Attention, changed(qk_norm_behind_rope=False))},
    "hunyuan-moe": {
        "normed before rotated": (Attention, changed(qk_norm_behind_rope=False)),
        "not renormalised": (Experts, changed(renormalize=False)),
        "nothing shared": (Experts, changed(shared=None)),
    },
    "ernie4-5-moe": {
        "the bias left out": (
            Experts,
            with_op(
                "moe_route_biased",
                lambda ops, logits, bias, slots, *more: ops.moe_route(logits, slots, *more),
            ),
        ),
        "by sigmoids": (Experts, changed(score="sigmoid")),
        "not renormalised": (Experts, changed(renormalize=False)),
        "nothing shared": (Experts, changed(shared=None)),
    },
    "llama4": {
        "no chunks": (Attention, changed(chunk=0)),
        "a window in place of chunks": (
            Attention,
            lambda ops, spec, *more: (ops, replace(spec, window=spec.chunk, chunk=0), *more),
        ),
        "a chunk ends early": (
            Attention,
            lambda ops, spec, *more: (ops, replace(spec, chunk=max(0, spec.chunk - 1)), *more),
        ),
        "rotated everywhere": (Attention, changed(angles=(0, 8))),
        "heads not normed": (Attention, changed(qk_norm=False)),
        "queries do not grow": (Attention, changed(temper=None)),
        "not weighed": (Experts, changed(gates_input=False)),
        "results weighed": (Experts, results_weighed),
        "nothing shared": (Experts, changed(shared=None)),
    },
    "hy-v3": {
        "the bias left out": (
            Experts,
            with_op(
                "moe_route_sigmoid",
                lambda ops, logits, bias, *more: ops.moe_route_sigmoid(logits, bias * 0, *more),
            ),
        ),
        "not scaled": (Experts, changed(scale=1.0)),
        "not renormalised": (Experts, changed(renormalize=False)),
        "nothing shared": (Experts, changed(shared=None)),
        "heads not normed": (Attention, changed(qk_norm=False)),
    },
    "flex-olmo": {
        "heads not normed": (Attention, changed(wide_qk_norm=False)),
        "renormalised": (Experts, changed(renormalize=True)),
    },
}
"""What a family has of its own, left out of the stage of a mixer."""


@pytest.mark.parametrize("name", LEFT_OUT)
def test_the_check_would_see_what_is_left_out(
    checkpoints, oracle, prompts, monkeypatch, name, device
):
    folder, model = checkpoints(name)
    (prompt,) = prompts(997, 100)
    _, want = oracle(model, prompt, 2)
    errors = {}
    for fault, (mixer, change) in {"": (Mlp, as_it_is), **LEFT_OUT[name]}.items():
        own = stages.STAGES[mixer]

        def stage(ops, spec, weights, x, cache, batch, own=own, change=change):
            ops, spec, weights, batch = change(ops, spec, weights, batch)
            return own(ops, spec, weights, x, cache, batch)

        with monkeypatch.context() as patch:
            patch.setitem(stages.STAGES, mixer, stage)
            engine = start(folder, "torch", device, enforce_eager=True)
            ours = logits_of(engine, prompt)
            engine.close()
        error = np.linalg.norm(ours - want[:100], axis=-1) / np.linalg.norm(want[:100], axis=-1)
        errors[fault] = error.max()
    print(name, {fault: f"{error:.1e}" for fault, error in errors.items()})
    assert errors.pop("") < 1e-4
    assert min(errors.values()) > 1e-3, errors


# --- dense families of 2026
# --------------------------------------------------------------------------------------------------

DENSE = [
    *("gemma2", "gemma3", "gemma4", "gemma4-small", "gemma4-experts"),
    *("glm4", "olmo2", "olmo3", "ministral3", "smollm3", "exaone4", "llama4"),
]
IN_TURN = ("gemma2", "gemma4", "gemma4-experts", "glm4", "olmo3", "smollm3", "exaone4")
"""Have the caches of Gemma 3, of the small Gemma 4, and of OLMo 2: in `make test-slow`."""
ON_TORCH = [
    pytest.param(name, "torch", marks=pytest.mark.slow if name in IN_TURN else ()) for name in DENSE
]
ON_BOTH = [*ON_TORCH, *(pytest.param(name, "jax", marks=pytest.mark.slow) for name in DENSE)]


@pytest.mark.parametrize(("name", "backend"), ON_TORCH)
def test_chunks_against_the_whole(checkpoints, prompts, name, backend, device):
    """What a chunk leaves in the cache is what the next one has to find, across pages and
    windows.
    """
    folder, _ = checkpoints(name)
    engine = start(folder, backend, device)
    (prompt,) = prompts(997, 100)
    whole = logits_of(engine, prompt)
    for chunk in (1, 7, 16, 33):
        parts = logits_of(engine, prompt, chunk)
        error = np.linalg.norm(parts - whole, axis=-1) / np.linalg.norm(whole, axis=-1)
        assert error.max() < 1e-4, f"chunks of {chunk}, position {error.argmax()}"
    engine.close()


@pytest.mark.parametrize(("name", "backend"), ON_BOTH)
def test_a_batch_with_preemption_and_prefix_cache(checkpoints, prompts, name, backend, device):
    """20 requests, half of which begin alike, in a cache that does not hold them: the tokens of
    each alone.
    """
    folder, _ = checkpoints(name)
    common, *texts = prompts(997, 40, *range(3, 83, 4))
    texts = [np.concatenate([common, p[:30]]) if i % 2 else p for i, p in enumerate(texts)]
    params = SamplingParams(temperature=0, max_tokens=20)
    sizes = dict(max_model_len=160, max_num_seqs=16, max_num_batched_tokens=64)
    engine = start(folder, backend, device, enable_prefix_caching=False, **sizes)
    alone = [run(engine, [text], params)[0] for text in texts]
    engine.close()
    engine = start(folder, backend, device, num_pages=24, **sizes)
    # The common beginning is in the cache when the others come.
    together = run(engine, texts[1:2], params) and run(engine, texts, params)
    metrics = engine.metrics()
    assert metrics.preemptions > 0
    assert metrics.prefix_hits > 0
    assert together == alone
    engine.close()


@pytest.mark.parametrize("name", ["gemma3", "olmo3"])
def test_two_ropes_as_version_4_wrote_them(checkpoints, oracle, prompts, tmp_path, name, device):
    """`rope_theta`, `rope_scaling` and Gemma's `rope_local_base_freq` in place of an object for
    each type of layer.
    """
    folder, model = checkpoints(name)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    ropes = config.pop("rope_parameters")
    full, local = ropes["full_attention"], ropes["sliding_attention"]
    config |= {"rope_theta": full.pop("rope_theta"), "rope_scaling": full}
    if name == "gemma3":
        config["rope_local_base_freq"] = local["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = start(str(tmp_path), "torch", device)
    (prompt,) = prompts(997, 60)
    want, _ = oracle(model, prompt, 16)
    assert run(engine, [prompt], SamplingParams(temperature=0, max_tokens=16)) == [want]
    engine.close()
