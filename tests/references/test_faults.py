"""The comparison with transformers sees faults: wrong mathematics, states that are lost, and a family
whose data says something else.
"""

from dataclasses import replace

import pytest

from twinfer.tests.references.comparison import CHUNKS, GATE, MATHS, logits, oracle, worst
from twinfer.tests.references.spec import Attention, LatentAttention, Norm

ATTENTION_ARGUMENTS = "q k v start scale window chunk soft_cap sinks".split()


def attention_with(change):
    """Attention with the arguments replaced that `change` makes of all of them."""

    def attention(*values):
        arguments = dict(zip(ATTENTION_ARGUMENTS, values, strict=True))
        return MATHS.attention(**(arguments | change(**arguments)))

    return replace(MATHS, attention=attention)


def no_sinks(**_):
    return {"sinks": None}


def window_off_by_one(window, **_):
    return {"window": window + 1 if window else 0}


def chunk_as_window(chunk, **_):
    return {"window": chunk, "chunk": 0}


def no_soft_cap(**_):
    return {"soft_cap": 0.0}


def route_with(**changes):
    """Routing with some fields of `Route` replaced."""

    def route(logits, bias, how):
        return MATHS.route(logits, bias, replace(how, **changes))

    return replace(MATHS, route=route)


def unbiased_route(logits, bias, how):
    return MATHS.route(logits, None, how)


def decay_off(q, k, v, log_decay, beta, state):
    return MATHS.gated_delta_rule(q, k, v, log_decay * 1.01, beta, state)


def no_skip(x, dt, decay, b, c, skip, state):
    return MATHS.ssd(x, dt, decay, b, c, skip * 0, state)


def lost(function):
    """`function` of a state, which is its last argument, as if it was always the first call."""

    def forgetful(*arguments):
        return function(*arguments[:-1], arguments[-1] * 0)

    return forgetful


WRONG_MATHS = [
    ("gpt-oss", "sinks dropped", attention_with(no_sinks)),
    ("gpt-oss", "window off by one", attention_with(window_off_by_one)),
    ("llama4", "chunk as window", attention_with(chunk_as_window)),
    ("gemma2", "soft cap dropped", attention_with(no_soft_cap)),
    ("deepseek-v3", "bias of the choice dropped", replace(MATHS, route=unbiased_route)),
    ("deepseek-v3", "groups ignored", route_with(groups=1)),
    ("glm4-moe", "scale of the weights dropped", route_with(scale=1.0)),
    ("qwen3.5", "decay off by 1 %", replace(MATHS, gated_delta_rule=decay_off)),
    ("nemotron-h", "skip dropped", replace(MATHS, ssd=no_skip)),
]
LOST_STATES = [
    ("qwen3-next", replace(MATHS, causal_conv=lost(MATHS.causal_conv))),
    ("qwen3.5", replace(MATHS, gated_delta_rule=lost(MATHS.gated_delta_rule))),
    ("granite-hybrid", replace(MATHS, ssd=lost(MATHS.ssd))),
]


@pytest.mark.parametrize(("name", "fault", "maths"), WRONG_MATHS)
def test_wrong_mathematics_is_seen(name, fault, maths):
    built, want = oracle(name)
    assert worst(logits(built, maths), want) > GATE


@pytest.mark.parametrize(
    ("name", "maths"), LOST_STATES, ids=["convolution", "delta net", "state space"]
)
def test_a_state_that_is_lost_between_chunks_is_seen_by_chunks_alone(name, maths):
    built, want = oracle(name)
    assert worst(logits(built, maths), want) < GATE
    assert worst(logits(built, maths, CHUNKS), want) > GATE


def with_layers(built, change):
    """The reference with `change` made to each layer."""
    layers = tuple(change(layer) for layer in built.model.layers)
    return built._replace(model=replace(built.model, layers=layers))


def with_attention(built, **changes):
    """The reference with some fields of its attention replaced in all layers that have it."""

    def change(layer):
        mixer = layer.sublayers[0].mixer
        if not isinstance(mixer, Attention | LatentAttention):
            return layer
        first = replace(layer.sublayers[0], mixer=replace(mixer, **changes))
        return replace(layer, sublayers=(first, *layer.sublayers[1:]))

    return with_layers(built, change)


def with_model(built, **changes):
    return built._replace(model=replace(built.model, **changes))


def halves(built):
    return with_attention(built, pairs=False)


def one_rope(built):
    return with_attention(built, rope=0)


def weightless_norm_of_v_dropped(built):
    return with_attention(built, v_norm=None)


def scalars_dropped(built):
    return with_layers(built, lambda layer: replace(layer, scalar=False))


def first_layer_shared(built):
    """Sliding layers read the cache of layer 0, not of the last sliding layer."""

    def change(layer):
        attention = layer.sublayers[0].mixer
        if attention.shares is None or not attention.window:
            return layer
        first = replace(layer.sublayers[0], mixer=replace(attention, shares=0))
        return replace(layer, sublayers=(first, *layer.sublayers[1:]))

    return with_layers(built, change)


def per_layer_inputs_dropped(built):
    def change(layer):
        return replace(layer, sublayers=layer.sublayers[:-1])

    weights = replace(built.weights, layers=[layer[:-1] for layer in built.weights.layers])
    return with_layers(built, change)._replace(weights=weights)


def norm_dropped_after_rope(built):
    return with_attention(built, qk_norm=None)


def no_temperature(built):
    return with_attention(built, temperature=None)


def eps_of_other_norms(built):
    return with_attention(built, norm=Norm("rms", built.model.norm.eps))


def no_gate(built):
    return with_attention(built, gated=False)


def half_of_eps(built):
    def change(layer):
        norm = Norm("rms", built.model.norm.eps / 2)
        sublayers = [replace(sublayer, pre=norm) for sublayer in layer.sublayers]
        return replace(layer, sublayers=tuple(sublayers))

    return with_layers(built, change)


def plain_weight(built):
    return with_model(built, norm=Norm("rms", built.model.norm.eps))


def logits_not_scaled(built):
    return with_model(built, logits_scale=1.0)


def residual_not_scaled(built):
    def change(layer):
        sublayers = [replace(sublayer, scale=1.0) for sublayer in layer.sublayers]
        return replace(layer, sublayers=tuple(sublayers))

    return with_layers(built, change)


WRONG_DATA = [
    ("glm4", halves),
    ("gemma3", one_rope),
    ("gemma3", plain_weight),
    ("gemma4-31b", weightless_norm_of_v_dropped),
    ("gemma4-31b", scalars_dropped),
    ("gemma4-e2b", first_layer_shared),
    ("gemma4-e2b", per_layer_inputs_dropped),
    ("llama4", norm_dropped_after_rope),
    ("llama4", no_temperature),
    ("ministral3", no_temperature),
    ("mistral4", no_temperature),
    ("deepseek-v3", eps_of_other_norms),
    ("qwen3.5", no_gate),
    ("phi3", half_of_eps),
    ("granite-hybrid", logits_not_scaled),
    ("granite-hybrid", residual_not_scaled),
]


@pytest.mark.parametrize(("name", "fault"), WRONG_DATA)
def test_wrong_data_is_seen(name, fault):
    built, want = oracle(name)
    assert worst(logits(fault(built)), want) > GATE
