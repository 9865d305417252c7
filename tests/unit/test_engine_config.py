"""What an engine's options become: how many tokens a step may have, how many words a model."""

from dataclasses import replace

import pytest

from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.errors import ConfigError, UnsupportedModel
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.locate import model_folder

DEMO = load_config(model_folder("demo"))
LLAMA = load_config(model_folder("llama3-8b"))


def resolved(model, memory=1 << 36, **options):
    return resolve(
        EngineConfig(model="demo", backend="torch", **options),
        model,
        DeviceInfo("cuda", "a GPU", memory),
    )


@pytest.mark.parametrize("asked", [10**9, 513, None])
def test_a_step_has_no_more_tokens_than_requests_can_have(asked):
    config, changes = resolved(
        DEMO, max_num_batched_tokens=asked, max_num_seqs=4, max_model_len=128
    )
    assert config.max_num_batched_tokens == 512
    (change,) = [change for change in changes if change.after == 512]
    assert str(change).endswith(
        "-> 512 (max_num_seqs * max_model_len is 4 * 128: no step has more tokens)"
    )


@pytest.mark.parametrize("asked", [512, 300])
def test_what_can_meet_in_a_step_is_left_alone(asked):
    config, changes = resolved(
        DEMO, max_num_batched_tokens=asked, max_num_seqs=4, max_model_len=128
    )
    assert config.max_num_batched_tokens == asked
    assert not [change for change in changes if change.field == "max_num_batched_tokens"]


def test_a_step_that_no_memory_holds_is_refused_with_the_arithmetic():
    # 256 requests of 8192 tokens: 2 097 152 of them, 14 336 numbers of 4 bytes each.
    needed = 256 * 8192 * 14336 * 4
    with pytest.raises(ConfigError) as refused:
        resolved(LLAMA, needed - 1, max_num_batched_tokens=10**9)
    assert str(refused.value) == (
        "max_num_batched_tokens: got 2097152; a hidden state of 14336 numbers of 4 bytes for each "
        "of them takes "
        f"{needed} bytes, the device has {needed - 1}"
    )
    assert (
        resolved(LLAMA, needed, max_num_batched_tokens=10**9)[0].max_num_batched_tokens == 2097152
    )
    # JAX cannot always say how much memory a device has.
    assert resolved(LLAMA, 0, max_num_batched_tokens=10**9)[0].max_num_batched_tokens == 2097152


def test_a_vocabulary_has_at_most_2_19_words():
    for words in (262_208, 262_400, 1 << 19):
        resolved(replace(DEMO, vocab_size=words))
    with pytest.raises(UnsupportedModel) as refused:
        resolved(replace(DEMO, vocab_size=(1 << 19) + 1))
    assert str(refused.value) == (
        "vocab_size: got 524289, the sampler's integers allow at most 524288"
    )
