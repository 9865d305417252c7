"""What a scheme costs (`twinfer numerics quantization`): the same figures each time, more for fewer
bits, and by layer what this layer alone does.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

from twinfer.numerics.questions import quantization
from twinfer.numerics.questions.quantization import compared, quantization_cost
from twinfer.numerics.sides.steps import default_prompts
from twinfer.numerics.sides.subject import open_subject
from twinfer.serving.cli import main
from twinfer.shared.errors import ConfigError
from twinfer.shared.models.quantization import Quantization


@pytest.fixture(scope="module")
def cost():
    """cost(scheme) -> the report of the bundled model on one prompt, made once."""
    subject = open_subject("demo")
    prompts, made = default_prompts(subject, 0, (21,)), {}

    def get(scheme):
        if scheme not in made:
            made[scheme] = quantization_cost(subject, scheme, prompts)
        return made[scheme]

    return get


def test_fewer_bits_cost_more_and_the_figures_are_those_of_a_hash(cost):
    eight, four = cost("int8_weights"), cost("int4_g32")
    assert 0.0 < eight.kl < four.kl / 20
    assert eight.top1 >= four.top1
    for narrow, wide in zip(eight.layers, four.layers, strict=True):
        assert narrow.weights < 0.02 < wide.weights < 0.2
        assert narrow.output < wide.output
        assert narrow.alone < wide.alone
    assert [layer.alone for layer in four.ranked] == sorted(x.alone for x in four.layers)[::-1]
    subject = open_subject("demo")
    again = quantization_cost(subject, "int4_g32", default_prompts(subject, 0, (21,)))
    assert again.digest == four.digest != eight.digest
    assert json.loads(again.dumps())["digest"] == four.digest


def test_a_layer_that_is_worse_comes_first(monkeypatch):
    """Layer 3 with scales that are a tenth off: what the ranking is for."""
    subject = open_subject("demo")
    original = quantization.HostWeights.layer

    def spoiled(self, index):
        found = original(self, index)
        if index != 3 or "down_scale" not in found:
            return found
        return found | {"down_scale": found["down_scale"] * np.float32(1.1)}

    monkeypatch.setattr(quantization.HostWeights, "layer", spoiled)
    report = quantization_cost(subject, "int8_weights", default_prompts(subject, 0, (21,)))
    assert report.ranked[0].layer == 3
    others = [cost for cost in report.layers if cost.layer != 3]
    assert report.layers[3].weights > 3 * max(cost.weights for cost in others)
    assert report.layers[3].output > 2 * max(cost.output for cost in others)


def test_divergence_of_known_distributions():
    plain = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]))
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]))
    divergence, same, lead = compared(plain + 3.0, other)
    assert np.allclose(divergence, [0.25 * np.log(2), 0.0])
    assert same.tolist() == [False, True]
    assert np.allclose(lead, [np.log(2), np.log(8)])


def test_what_cannot_be_asked_is_refused_by_name(capsys):
    assert main(["numerics", "quantization", "demo", "--scheme", "int3"]) == 2
    assert "scheme: got 'int3', allowed are fp8" in capsys.readouterr().err
    subject = open_subject("demo")
    narrow = replace(subject.model, quantization=Quantization(quantization.WHEN_LOADED["int8"]))
    with pytest.raises(ConfigError, match="quantised already"):
        quantization_cost(replace(subject, model=narrow), "int8", [])
