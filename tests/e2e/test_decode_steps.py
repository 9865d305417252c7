"""Several decode steps without the host (docs/adr/0005): the tokens of single steps, in fewer
steps.
"""

from dataclasses import replace

import numpy as np
import pytest

from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.engine import Engine
from twinfer.shared.errors import ConfigError
from twinfer.shared.models.config_json import load_config
from twinfer.shared.request import FinishReason
from twinfer.shared.sampling_params import SamplingParams

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, 900, n) for n in (3, 40, 17)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=33),
    SamplingParams(temperature=0.8, seed=3, max_tokens=25),
    SamplingParams(temperature=0.9, top_p=0.6, seed=4, max_tokens=40),
]


# JAX compiles a program for each length of a loop.
@pytest.fixture(
    params=[
        pytest.param("jax", marks=pytest.mark.slow),
        pytest.param("torch", marks=pytest.mark.gpu),
    ]
)
def engines(request, checkpoints, device):
    """engines(decode_steps): an engine of the backend."""
    folder, _ = checkpoints("qwen3")
    made = []

    def make(decode_steps, **options):
        config = EngineConfig(
            model=folder, backend=request.param, device=device, dtype="float32", max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=32, decode_steps=decode_steps,
            # Not a share of the device, which engines of other tests may have.
            **({"num_pages": 64} | options),
        )  # fmt: skip
        made.append(Engine(config, load_config(folder), folder))
        return made[-1]

    yield make
    for engine in made:
        engine.scheduler.check_integrity()
        engine.close()


def complete(engine, params, abort=None):
    """(outputs, finish reasons, steps), one request aborted after a few steps if asked."""
    first = engine._step_id
    requests = [
        engine.add(f"r{i}", prompt, p)
        for i, (prompt, p) in enumerate(zip(PROMPTS, params, strict=True))
    ]
    tokens, ended, turns = {r.request_id: [] for r in requests}, {}, 0
    while engine.has_work:
        for update in engine.step():
            assert update.request_id not in ended, "a token came after the last one"
            tokens[update.request_id] += update.tokens
            if update.finish_reason is not None:
                ended[update.request_id] = update.finish_reason
        turns += 1
        if abort is not None and turns == 3:
            engine.abort(f"r{abort}")
    assert ended == {r.request_id: r.finish_reason for r in requests}
    assert tokens == {r.request_id: r.output for r in requests}
    return (
        [r.output for r in requests],
        [r.finish_reason for r in requests],
        engine._step_id - first,
    )


def test_loops_give_the_tokens_of_single_steps(engines):
    single, several = engines(1), engines(6)
    want, _, steps = complete(single, PARAMS)
    assert complete(several, PARAMS)[:2] == (want, [FinishReason.LENGTH] * 3)
    assert complete(several, PARAMS)[2] < steps / 2

    # A request that ends early, in the middle of a loop, on its own token.
    stops = [PARAMS[0], *(replace(PARAMS[i], stop_token_ids=(want[i][9],)) for i in (1, 2))]
    cut, reasons, _ = complete(single, stops)
    assert FinishReason.STOP in reasons
    assert complete(several, stops)[:2] == (cut, reasons)

    outputs, reasons, _ = complete(several, PARAMS, abort=1)
    assert outputs[::2] == want[::2]
    assert outputs[1] == want[1][: len(outputs[1])]
    assert reasons[1] is FinishReason.ABORT

    # What the host has to see between two tokens keeps it in the loop.
    watched = [replace(PARAMS[0], stop=("never",)), replace(PARAMS[1], logprobs=1), PARAMS[2]]
    assert complete(several, watched)[0] == want
    # By now, everything has run.
    assert several.worker.compilations_after_ready() == 0


@pytest.mark.slow
def test_the_cache_is_written_in_place(engines):
    engine = engines(2)
    if engine.config.backend == "torch":
        pytest.skip("torch writes where it is told")
    worker = engine.worker
    for key, program in worker._programs.items():
        if "backbone" in program.name or "loop" in program.name:
            aliased = program.compiled.memory_analysis().alias_size_in_bytes
            assert aliased >= worker._kv.nbytes, key


@pytest.mark.slow
def test_one_step_at_a_time_without_overlap(engines):
    want, _, _ = complete(engines(1), PARAMS)
    assert complete(engines(4, async_scheduling=False), PARAMS)[0] == want


@pytest.mark.parametrize("number", [0, 65, True, "8"])
def test_the_option_is_checked(number):
    with pytest.raises(
        ConfigError, match=r"decode_steps: got .*, allowed is an integer from 1 to 64"
    ):
        EngineConfig(model="demo", decode_steps=number)


def test_loops_are_not_captured(checkpoints, tmp_path):
    folder, _ = checkpoints("qwen3")
    config = EngineConfig(model=folder, decode_steps=2, capture=str(tmp_path / "new"), device="cpu")
    with pytest.raises(ConfigError, match="capture: keeps steps with decode_steps 1, got 2"):
        resolve(config, load_config(folder), DeviceInfo("cpu", "cpu", 1 << 34))
