"""Sampling defaults of generation_config.json: what is read, what is refused."""

import json

import pytest

from twinfer.shared.errors import ConfigError, ModelError
from twinfer.shared.generation_config import default_params
from twinfer.shared.sampling_params import SamplingParams


def write(folder, **fields):
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_what_is_not_there_changes_nothing(tmp_path):
    assert default_params(tmp_path) == (SamplingParams(), [])
    fields = {
        "eos_token_id": [1, 2],
        "do_sample": False,
        "temperature": None,
        "top_p": 1.0,
        "top_k": 0,
        "max_length": 9,
    }
    assert default_params(write(tmp_path, **fields)) == (SamplingParams(), [])


def test_the_fields_that_are_read(tmp_path):
    params, changes = default_params(
        write(tmp_path, temperature=0.6, top_k=20, max_new_tokens=2048)
    )
    assert params == SamplingParams(temperature=0.6, top_k=20, max_tokens=2048)
    assert [str(change) for change in changes] == [
        "temperature: 1.0 -> 0.6 (generation_config.json)",
        "top_k: 0 -> 20 (generation_config.json)",
        "max_tokens: 16 -> 2048 (generation_config.json)",
    ]
    assert default_params(tmp_path, "none") == (SamplingParams(), [])


def test_a_temperature_that_the_sampler_has_not_is_the_least_that_it_has(tmp_path):
    """Models made from Qwen2.5-VL have 1e-6; vLLM takes it so too."""
    _, changes = default_params(write(tmp_path, max_new_tokens=16))
    assert [change.field for change in changes] == ["max_tokens"], "as many as usual, but given"
    params, changes = default_params(write(tmp_path, temperature=1e-06))
    assert params == SamplingParams(temperature=0.01)
    assert [str(change) for change in changes] == [
        "temperature: 1.0 -> 0.01 (generation_config.json)"
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -0.001}, "temperature: got -0.001, allowed is 0 (greedy), or 0.01 to 10"),
        ({"temperature": "hot"}, "temperature: got 'hot', allowed is 0 (greedy), or 0.01"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0, allowed is an integer from 1"),
        ({"top_p": True}, "top_p: got True, allowed is a number of more than 0"),
    ],
)
def test_what_cannot_be_had_is_named_with_its_file_and_the_way_out(tmp_path, fields, words):
    with pytest.raises(ModelError) as refused:
        default_params(write(tmp_path, **fields))
    assert words in str(refused.value)
    assert str(refused.value).startswith(f"{tmp_path}/generation_config.json: ")
    assert "--generation-config none" in str(refused.value)
    assert default_params(tmp_path, "none")[0] == SamplingParams()


def test_unknown_sources_and_broken_files(tmp_path):
    with pytest.raises(ConfigError, match="generation_config: got 'vllm', allowed are auto, none"):
        default_params(tmp_path, "vllm")
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ModelError, match="is not a JSON object"):
        default_params(tmp_path)


def test_fields_that_go_before_those_of_the_file(tmp_path):
    write(tmp_path, temperature=0.6, top_k=20)
    over = {"temperature": 0.7, "max_new_tokens": 99, "top_p": None}
    params, changes = default_params(tmp_path, "auto", over)
    assert params == SamplingParams(temperature=0.7, top_k=20, max_tokens=99)
    assert [str(change) for change in changes] == [
        "temperature: 1.0 -> 0.7 (override-generation-config)",
        "top_k: 0 -> 20 (generation_config.json)",
        "max_tokens: 16 -> 99 (override-generation-config)",
    ]
    alone = SamplingParams(temperature=0.7, max_tokens=99)
    assert default_params(tmp_path, "none", over)[0] == alone
    for wrong, words in (
        ({"temp": 1}, "override-generation-config: has temp, allowed are temperature, top_p"),
        ({"top_p": 7}, "override-generation-config: top_p: got 7, allowed is a number"),
    ):
        with pytest.raises(ConfigError) as refused:
            default_params(tmp_path, "auto", wrong)
        assert str(refused.value).startswith(words)
        assert "--generation-config none" not in str(refused.value)
