"""Gemma 4, whose layers keep caches of two shapes, read those of others and have inputs of their
own: compared layer by layer, and refused by what does not know such models.
"""

import json
from functools import cache

import pytest

from twinfer.numerics import open_subject
from twinfer.numerics.bundles.capturing import capture_model
from twinfer.numerics.questions.bisect import bisect_model
from twinfer.numerics.questions.logits import compare_ends
from twinfer.numerics.questions.model import compare_model
from twinfer.numerics.sides.steps import default_prompts, make_steps
from twinfer.numerics.sides.subject import parse_target
from twinfer.shared.errors import ConfigError

GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 256,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "dtype": "bfloat16",
}
SMALL = GEMMA4 | {
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 1000,
}
EXPERTS = GEMMA4 | {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
MODELS = {"large": GEMMA4, "small": SMALL, "experts": EXPERTS}
TARGETS = [parse_target("jax:cpu"), parse_target("torch:cpu")]


@cache
def subject_of(name, root):
    folder = root / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    return open_subject(str(folder), load_format="dummy", max_model_len=128)


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return lambda name: subject_of(name, root)


# JAX's programs of a layer compile for seconds.
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["S", "P", "X"])
@pytest.mark.parametrize("name", MODELS)
def test_both_backends_agree_layer_by_layer(subject, name, mode):
    model = subject(name)
    steps = make_steps(model, default_prompts(model))[:3]
    diff = compare_model(model, TARGETS, steps, modes=(mode,))
    assert diff.exit_code == 0, diff.problems or diff.first_divergence()
    layers = {finding.layer for finding in diff.findings if finding.scope == "layer"}
    assert mode == "X" or layers == {0, 1, 2, 3}


@pytest.mark.parametrize(("what", "run"), [("bundle", capture_model), ("search", bisect_model)])
def test_what_gives_layers_one_cache_each_refuses_it(subject, what, run):
    model = subject("small")
    steps = make_steps(model, default_prompts(model))[:1]
    words = "caches of two shapes, caches of other layers, inputs of their own; a " + what
    with pytest.raises(ConfigError, match=words):
        run(model, TARGETS[1], steps)


@pytest.mark.parametrize("name", ["large", "small"])
def test_ends_are_those_of_workers_with_page_groups(name, subject):
    model = subject(name)
    targets = [parse_target("torch:cpu"), parse_target("torch:cpu:row_invariant=true")]
    compare_ends(model, targets, default_prompts(model, 1)).assert_ok()
