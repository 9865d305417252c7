"""Tokens of an engine whose products are `fragment_kernel`'s, and of one without it."""

import json

import pytest

from twinfer.serving.llm import LLM
from twinfer.shared.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 2048,
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "dtype": "bfloat16",
}  # fmt: skip
PROMPTS = [[(7 * i + j) % 2000 for j in range(20)] for i in range(3)]
MARGIN = 0.02
"""Where two best tokens are this near, their order may change with that of sums."""


def generated(folder, scheme):
    """(token, how far the best is before the second) by prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
    with LLM(
        str(folder), backend="torch", load_format="dummy", quantization=scheme, progress=False,
        max_model_len=64, max_num_seqs=4,
    ) as llm:  # fmt: skip
        outputs = llm.generate(PROMPTS, params, progress=False)
    found = []
    for output in outputs:
        completion = output.outputs[0]
        best = [
            sorted((e.logprob for e in each.values()), reverse=True)[:2]
            for each in completion.logprobs
        ]
        found.append([(t, a - b) for t, (a, b) in zip(completion.token_ids, best, strict=True)])
    return found


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_tokens_are_those_without_fragments(tmp_path, device, monkeypatch, scheme):
    """Until the first that was a near tie: what follows that may be another text."""
    if device == "cpu":
        pytest.skip("the kernel runs on Hopper alone")
    from twinfer.gpu.kernels import narrow, narrow_mlp

    if not narrow.hopper():
        pytest.skip("the kernel runs on Hopper alone")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    taken = []
    fragments = narrow.fragments

    def seen(asked, *, gated=False):
        taken.append(gated)
        fragments(asked, gated=gated)

    for module in (narrow, narrow_mlp):
        monkeypatch.setattr(module, "fragments", seen)
    with_them = generated(tmp_path, scheme)
    assert set(taken) == {False, True}  # with the activation too
    monkeypatch.setattr(narrow, "hopper", lambda: False)
    taken.clear()
    without = generated(tmp_path, scheme)
    assert not taken
    compared = 0
    for ours, theirs in zip(with_them, without, strict=True):
        for (token, margin), (other, _) in zip(ours, theirs, strict=True):
            if token != other:
                assert margin < MARGIN
                break
            compared += 1
    print(f"{scheme}: {compared} of {sum(map(len, with_them))} tokens alike")
    assert compared > 40
