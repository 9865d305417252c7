"""What users of vLLM write in Python: it works as there, or the error says what stands in its
place.
"""

import dataclasses
import inspect
import re
from contextlib import closing

import numpy as np
import pytest

from twinfer import LLM, SamplingParams
from twinfer.serving import other_flags
from twinfer.serving.outputs import CompletionOutput, RequestOutput
from twinfer.shared.engine_config import EngineConfig
from twinfer.shared.errors import ConfigError, RequestError
from twinfer.shared.option_kinds import INT32_MAX
from twinfer.shared.options import options_of
from twinfer.shared.sampling_params import ELSEWHERE

OF_LLM = {
    "trust_remote_code": (True, "no code of a model"),
    "revision": ("main", "nothing is downloaded: hf download --revision"),
    "tokenizer_mode": ("slow", "the files in MODEL's folder decide"),
    "enable_lora": (True, "adapters are not supported"),
    "num_speculative_tokens": (3, "see speculative_config"),
    "cpu_offload_gb": (4, "stay on the devices"),
    "swap_space": (np.zeros(2), "stay on the devices"),
    "pipeline_parallel_size": (2, "tensor_parallel_size"),
    "data_parallel_size": (2, "twinfer serve --data-parallel-size"),
    "max_logprobs": (True, "at most 20"),
    "calculate_kv_scales": (1, "or kv_cache_scales"),
    "log_level": ("info", "see --verbose"),
    "cuda_graph_sizes": ([1], 'say compilation_config={"cudagraph_capture_sizes": '),
}
"""Options of vLLM's LLM that are none here: a value, and what the error says."""


@pytest.mark.parametrize("name", OF_LLM)
def test_options_of_vllm_are_answered(name):
    value, words = OF_LLM[name]
    with pytest.raises(ConfigError, match=f"{name}.*{words}"):
        LLM("demo", progress=False, **{name: value})


def test_values_of_vllm_are_answered():
    for (flag, value), words in other_flags.OTHER_VALUES.items():
        name = flag.removeprefix("--").replace("-", "_")
        if name not in {field.name for field in dataclasses.fields(EngineConfig)}:
            continue
        with pytest.raises(ConfigError, match=f"{name}: got {value}; {words}"):
            other_flags.checked_options({name: value})


def test_what_asks_for_nothing_is_no_error():
    given = {"num_speculative_tokens": None, "enable_lora": False, "trust_remote_code": False}
    assert other_flags.checked_options({**given, "max_num_seqs": 3}) == {"max_num_seqs": 3}
    with pytest.raises(ConfigError, match=r"unknown option 'max_seqs'.*max_num_seqs"):
        LLM("demo", progress=False, max_seqs=None)
    assert not other_flags.checked_options(
        {"pipeline_parallel_size": 1, "cpu_offload_gb": 0, "tokenizer_mode": "auto"}
    )
    assert not other_flags.checked_options({"cpu_offload_gb": 0.0, "hf_overrides": None})
    # Numbers and texts of numpy stand for Python's, as in the options that there are.
    assert not other_flags.checked_options(
        {"swap_space": np.float64(0), "max_logprobs": np.int64(20), "runner": np.str_("auto")}
    )
    # What vLLM has where nobody says anything.
    assert not other_flags.checked_options(
        {"hf_overrides": {}, "limit_mm_per_prompt": {}, "runner": "auto", "max_logprobs": 20}
    )
    with pytest.raises(ConfigError, match="compilation_config: got 3; say compile_level=3"):
        other_flags.checked_options({"compilation_config": 3})
    # What is an option here is never dropped.
    assert other_flags.checked_options({"enable_prefix_caching": False}) == {
        "enable_prefix_caching": False
    }


def test_answers_call_the_engines_options_by_their_names():
    flags = [flag for entry in options_of(EngineConfig).values() for flag in entry.flags]
    for flag in other_flags.ELSEWHERE:
        with pytest.raises(ConfigError) as raised:
            other_flags.checked_options({other_flags.option_of(flag): 7})
        answer = str(raised.value)
        assert not [flag for flag in flags if flag in re.findall("--[a-z-]+", answer)], answer


def test_no_option_here_is_answered_as_another_engines():
    ours = {field.name for field in dataclasses.fields(EngineConfig)}
    assert not ours & {other_flags.option_of(flag) for flag in other_flags.ELSEWHERE}


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_sampling_params_of_vllm_are_answered(name):
    with pytest.raises(RequestError, match=f"{name}.*") as raised:
        SamplingParams(**{name: 3})
    assert ELSEWHERE[name] in str(raised.value)


def test_unknown_sampling_params_name_the_nearest():
    with pytest.raises(RequestError, match=r"max_token.*max_tokens"):
        SamplingParams(max_token=3)
    with pytest.raises(RequestError, match=r"max_new_tokens.*'max_tokens'"):
        SamplingParams(max_new_tokens=None)
    with pytest.raises(RequestError, match="nothing_like_it"):
        SamplingParams(nothing_like_it=3)
    with pytest.raises(TypeError):
        SamplingParams(1, n=1)


@pytest.mark.parametrize(
    "given",
    [*({name: None} for name in sorted(ELSEWHERE)), {"bad_words": [], "best_of": 1},
     {"detokenize": True, "use_beam_search": False, "length_penalty": 1.0},
     {"length_penalty": 1}, {"best_of": np.int64(1), "length_penalty": np.float32(1.0)}],
    ids=str,
)  # fmt: skip
def test_sampling_params_that_ask_for_nothing_are_no_error(given):
    assert SamplingParams(n=2, **given) == SamplingParams(n=2)


def test_sampling_params_show_their_settings():
    """To `help` and notebooks; and another initialiser may stand before theirs."""
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert list(inspect.signature(SamplingParams).parameters) == names

    class Named(SamplingParams):
        def __init__(self, name, **settings):
            super().__init__(**settings)

    assert Named(name="a", n=3).n == 3
    with pytest.raises(RequestError, match="best_of"):
        Named(name="a", best_of=3)


def test_no_bound_on_tokens_is_as_many_as_fit():
    params = SamplingParams(max_tokens=None, temperature=0.0)
    assert params.max_tokens == INT32_MAX
    assert dataclasses.replace(params, max_tokens=4).max_tokens == 4


def test_an_output_is_finished_once_all_its_completions_are():
    done, open_ = CompletionOutput(0, finish_reason="stop"), CompletionOutput(1)
    assert RequestOutput("a", "x", [1], [done]).finished
    assert not RequestOutput("a", "x", [1], [done, open_]).finished
    assert RequestOutput("a", "x", [], error=RequestError("n", "wrong")).finished


def test_arguments_of_generate(tmp_path):
    with LLM("demo", backend="torch", device="cpu", progress=False, max_model_len=64) as llm:
        assert llm.get_tokenizer() is llm.tokenizer
        assert llm.get_default_sampling_params() == llm.default_params
        greedy = SamplingParams(temperature=0, max_tokens=4)
        asked = llm.generate(["the "], sampling_params=greedy, use_tqdm=False)
        assert asked[0].finished
        again = llm.generate("the ", greedy, progress=False, lora_request=None, priority=None)
        assert again[0].outputs[0].token_ids == asked[0].outputs[0].token_ids
        assert again[0].num_cached_tokens == 0  # less than a page
        assert llm.reset_prefix_cache()
        chat = [{"role": "user", "content": "hi"}]
        (answer,) = llm.chat(chat, sampling_params=greedy, use_tqdm=False)
        assert answer.finished
        (long,) = llm.generate(
            "the ", SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), progress=False
        )
        assert len(long.prompt_token_ids) + len(long.outputs[0].token_ids) == 64
        assert long.outputs[0].finish_reason == "length"
        for name, words in {
            "prompt_token_ids": "'prompt_token_ids'",
            "lora_request": "merge",
            "priority": "'priority'",
            "guided_options_request": "structured_outputs",
            "params": "sampling_params",
            "sampling_param": "sampling_params",
        }.items():
            with pytest.raises(RequestError, match=f"{name}.*{words}"):
                llm.generate(["the "], **{name: [1]})
        with pytest.raises(RequestError, match="use_tqdm: got 'no'"):
            llm.generate("the ", use_tqdm="no")
        with pytest.raises(RequestError, match=r"progress.*use_tqdm"):
            llm.generate("the ", use_tqdm=False, progress=False)


def test_what_was_kept_is_forgotten_unless_a_stream_runs():
    """Also behind a call that ended while a step was on its way."""
    params = SamplingParams(temperature=0, max_tokens=20)
    with LLM("demo", backend="torch", device="cpu", progress=False, max_model_len=128) as llm:
        prompt = "a word " * 20

        def cached(stop=()):
            again = dataclasses.replace(params, stop=stop)
            return llm.generate(prompt, again, progress=False)[0].num_cached_tokens

        (whole,) = llm.generate(prompt, params, progress=False)
        stop = (whole.outputs[0].text[4:8],)
        assert cached(stop) > 0
        assert llm.reset_prefix_cache()
        assert cached(stop) == 0
        with closing(llm.stream(prompt, params)) as stream:
            next(stream)
            assert not llm.reset_prefix_cache()
        assert llm.reset_prefix_cache()
        assert cached() == 0
        cached(stop)  # which leaves a step
    assert not llm.reset_prefix_cache()
