"""`LLM` on folders that are not a whole model: no tokenizer, no weights."""

import math
from pathlib import Path

import pytest

from twinfer import LLM, SamplingParams
from twinfer.shared.errors import RequestError
from twinfer.shared.models.locate import model_folder


def test_a_folder_without_a_tokenizer_works_with_token_ids(tmp_path, device):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((Path(model_folder("demo")) / name).read_bytes())
    options = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    with LLM(str(tmp_path), backend="torch", device=device, progress=False, **options) as llm:
        (out,) = llm.generate([[305, 288, 8]], SamplingParams(temperature=0, max_tokens=5), progress=False)
        assert len(out.outputs[0].token_ids) == 5
        assert out.outputs[0].text == ""
        for prompt, extra in (("text", {}), ([5], {"stop": "x"})):
            with pytest.raises(RequestError, match=r"tokenizer\.json"):
                llm.generate(prompt, SamplingParams(max_tokens=5, **extra), progress=False)


def test_dummy_weights_are_the_same_on_both_backends(tmp_path, device):
    (tmp_path / "config.json").write_bytes((Path(model_folder("demo")) / "config.json").read_bytes())
    options = {"load_format": "dummy", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 2}
    outputs = []
    for backend in ("jax", "torch"):
        with LLM(str(tmp_path), backend=backend, device=device, progress=False, **options, seed=3) as llm:
            params = SamplingParams(temperature=0, max_tokens=16, logprobs=1)
            outputs.append(llm.generate([[1, 2, 3]], params, progress=False)[0].outputs[0])
    assert outputs[0].token_ids == outputs[1].token_ids
    assert len(set(outputs[0].token_ids)) > 1
    assert math.isclose(outputs[0].cumulative_logprob, outputs[1].cumulative_logprob, rel_tol=1e-5)
