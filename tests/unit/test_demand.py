"""What is known of the requests before an engine starts: what it changes, and what is refused
afterwards.
"""

import pytest

from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.demand import ANYTHING, Demand
from twinfer.shared.errors import RequestError
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.locate import model_folder
from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.step import PROCESSING, SAMPLERS

CPU = DeviceInfo("cpu", "cpu", 8 << 30)
GREEDY = SamplingParams(temperature=0)


def resolved(demand, backend="jax", device=CPU, **options):
    model = load_config(model_folder("demo"))
    return resolve(EngineConfig(model="demo", backend=backend, **options), model, device, demand)


def table(demand, **options):
    config, _ = resolved(demand, **options)
    return config.table().decode_sizes, config.table().mixed_sizes, config.max_num_seqs


@pytest.mark.parametrize(
    ("params", "samplers"),
    [
        (GREEDY, {"greedy"}),
        (SamplingParams(temperature=0.7), {"random"}),
        (SamplingParams(temperature=0.7, top_k=3), {"filtered"}),
        (SamplingParams(temperature=0.7, top_p=0.9999999), {"random"}),  # rounds to 1
        (SamplingParams(temperature=0, top_k=3), {"greedy"}),
        # A chunk of a prompt samples nothing, with the greedy sampler.
        (SamplingParams(temperature=0, logit_bias={3: 1.0}), {"greedy", "processed"}),
        (SamplingParams(temperature=0.7, top_k=3, min_tokens=2), {"filtered", "masked"}),
        (SamplingParams(temperature=0, bad_words=["a"]), {"greedy", "masked"}),
    ],
    # A set's order differs between processes, and the parallel run compares the names.
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_the_samplers_of_a_request(params, samplers):
    demand = Demand.of([(5, params)])
    assert set(demand.samplers) == samplers
    demand.check(params)


def test_sizes_add_up_over_completions():
    demand = Demand.of([(5, SamplingParams(n=3)), (7, GREEDY)])
    assert (demand.requests, demand.prompt_tokens) == (4, 22)
    assert Demand.of([]) == ANYTHING


def test_the_table_is_that_of_the_requests():
    assert table(Demand.of([(5, GREEDY)])) == ((1,), (16,), 1)
    assert table(Demand.of([(100, GREEDY)])) == ((1,), (128,), 1)
    assert table(Demand.of([(40, GREEDY)] * 3)) == ((1, 4), (128,), 4)
    assert table(ANYTHING) == ((1, 8, 16), (16, 32, 64, 128, 256, 512), 16)
    # More than there is room for at a time: later prompts come a few at a time.
    assert table(Demand.of([(5, GREEDY)] * 40)) == ((1, 8, 16), (16, 32, 64, 128, 256), 16)
    # A prompt that is longer than a step comes in chunks of any size.
    assert table(Demand.of([(900, GREEDY)])) == ((1,), (16, 32, 64, 128, 256, 512), 1)


def test_the_torch_backend_captures_less_too():
    device = DeviceInfo("cuda", "NVIDIA H200", 140 << 30)
    config, changes = resolved(Demand.of([(40, GREEDY)] * 3), "torch", device)
    assert config.compilation.cudagraph_capture_sizes == (1, 2, 4)
    assert config.table().mixed_sizes == (128,)
    assert "max_num_seqs: None -> 4 (enough for 3 requests)" in map(str, changes)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"max_num_seqs": 8}, ((1, 8), (16,), 8)),
        ({"max_num_batched_tokens": 64}, ((1,), (16, 64), 1)),
        ({"decode_sizes": (16,)}, ((16,), (16, 32, 64, 128, 256, 512), 16)),
        ({"mixed_sizes": (512,)}, ((1, 8, 16), (512,), 16)),
        ({"enable_chunked_prefill": False}, ((1,), (16, 1024), 1)),
    ],
    ids=str,
)
def test_what_is_given_stays(options, sizes):
    assert table(Demand.of([(5, GREEDY)]), **options) == sizes


def test_stored_programs_are_of_a_table_whose_sizes_no_demand_changes():
    config, _ = resolved(Demand.of([(5, GREEDY)]), aot_folder="somewhere")
    assert config.demand == Demand(samplers=("greedy",), logprobs=False, prompt_logprobs=False)
    assert config.table() == resolved(ANYTHING)[0].table()
    assert config.max_num_seqs == 16


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(temperature=0.5), "temperature"),
        (SamplingParams(temperature=0.5, top_p=0.5), "top_k, top_p, min_p"),
        (SamplingParams(temperature=0, presence_penalty=1.0), "penalties"),
        (SamplingParams(temperature=0, min_tokens=1), "min_tokens"),
        (SamplingParams(temperature=0, bad_words=["a"]), "bad_words"),
        (SamplingParams(temperature=0, logprobs=0), "logprobs"),
        (SamplingParams(temperature=0, prompt_logprobs=1), "prompt_logprobs"),
    ],
    ids=str,
)
def test_a_request_that_needs_more_is_refused(params, field):
    ANYTHING.check(params)
    with pytest.raises(RequestError, match=field) as error:
        Demand.of([(5, GREEDY)]).check(params)
    assert "this engine was started for" in str(error.value)


def test_a_sampler_stands_in_for_lesser_ones():
    for sampler in SAMPLERS:
        assert ANYTHING.sampler_for(sampler) == sampler
    filtered = Demand(samplers=("filtered",))
    assert [filtered.sampler_for(sampler) for sampler in SAMPLERS] == [
        "filtered",
        "filtered",
        "filtered",
        None,
        None,
    ]
    # These read what steps of other requests do not have.
    for sampler in PROCESSING:
        alone = Demand(samplers=(sampler,))
        assert [alone.sampler_for(s) for s in SAMPLERS if s != sampler] == [None] * 4
