"""`LLM` on folders that are not a whole model: no tokenizer, no weights."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from twinfer import LLM, SamplingParams
from twinfer.shared.errors import ConfigError, EngineClosed, RequestError
from twinfer.shared.generation_config import FIELDS
from twinfer.shared.models.locate import model_folder

from .conftest import GREEDY_ONLY


def test_a_folder_without_a_tokenizer_works_with_token_ids(tmp_path, device):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((Path(model_folder("demo")) / name).read_bytes())
    options = {
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
    }
    with LLM(str(tmp_path), backend="torch", device=device, progress=False, **options) as llm:
        (out,) = llm.generate(
            [[305, 288, 8]], SamplingParams(temperature=0, max_tokens=5), progress=False
        )
        assert len(out.outputs[0].token_ids) == 5
        assert out.outputs[0].text == ""
        for prompt, extra in (("text", {}), ([5], {"stop": "x"})):
            with pytest.raises(RequestError, match=r"tokenizer\.json"):
                llm.generate(prompt, SamplingParams(max_tokens=5, **extra), progress=False)


def test_dummy_weights_are_the_same_on_both_backends(tmp_path, device):
    (tmp_path / "config.json").write_bytes(
        (Path(model_folder("demo")) / "config.json").read_bytes()
    )
    options = {"load_format": "dummy", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 2}
    few = {"decode_sizes": (2,), "mixed_sizes": (64,), "max_num_batched_tokens": 64}
    demand, outputs = replace(GREEDY_ONLY, logprobs=True), []
    for backend in ("jax", "torch"):
        with LLM(
            str(tmp_path),
            backend=backend,
            device=device,
            progress=False,
            demand=demand,
            seed=3,
            **options | (few if backend == "jax" else {}),
        ) as llm:
            params = SamplingParams(temperature=0, max_tokens=16, logprobs=1)
            outputs.append(llm.generate([[1, 2, 3]], params, progress=False)[0].outputs[0])
    assert outputs[0].token_ids == outputs[1].token_ids
    assert len(set(outputs[0].token_ids)) > 1
    assert math.isclose(outputs[0].cumulative_logprob, outputs[1].cumulative_logprob, rel_tol=1e-5)


def test_defaults_of_generation_config_json(tmp_path, device):
    shutil.copytree(model_folder("demo"), tmp_path, dirs_exist_ok=True)
    fields = {
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "max_new_tokens": 4,
    }
    (tmp_path / "generation_config.json").write_text(
        json.dumps(fields | {"do_sample": True, "eos_token_id": 0})
    )
    options = {
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 2,
        "progress": False,
        "backend": "torch",
    }
    with LLM(str(tmp_path), device=device, **options) as llm:
        want = SamplingParams(
            temperature=0.0, top_p=0.5, top_k=7, min_p=0.1, repetition_penalty=1.2, max_tokens=4
        )  # fmt: skip
        assert llm.default_params == want
        said = {
            change.field: change.after
            for change in llm.engine.report.changes
            if "generation" in change.why
        }
        assert said == {name: getattr(want, name) for name in FIELDS.values()}
        silent = llm.generate([[305, 288, 8]], progress=False)[0].outputs[0].token_ids
        assert len(silent) == 4
        assert silent == llm.generate([[305, 288, 8]], want, progress=False)[0].outputs[0].token_ids
        plain = llm.generate([[305, 288, 8]], SamplingParams(max_tokens=9, seed=2), progress=False)[
            0
        ].outputs[0]
        assert len(plain.token_ids) == 9
    with LLM(str(tmp_path), device=device, generation_config="none", **options) as llm:
        assert llm.default_params == SamplingParams()


def test_a_closed_engine_says_so(device):
    options = {
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 2,
        "progress": False,
        "backend": "torch",
    }
    llm = LLM("demo", device=device, **options)
    llm.close()
    for call in (lambda: llm.generate("x"), lambda: next(llm.stream("x")), llm.engine.step):
        with pytest.raises(EngineClosed, match="the engine is closed, make a new one"):
            call()
    llm.close()


def test_a_shape_is_a_model_with_dummy_weights(device):
    with pytest.raises(ConfigError, match=r"qwen3-0\.6b is a shape without weights"):
        LLM("qwen3-0.6b", backend="torch", device=device, progress=False)
