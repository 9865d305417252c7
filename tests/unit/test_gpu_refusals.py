"""What a GPU start refuses, or leaves to another implementation, before anything wrong can run."""

import dataclasses

import pytest

from twinfer.gpu.worker import fit_mode
from twinfer.ops import resolve as resolve_plan
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.errors import ConfigError
from twinfer.shared.models.config import parse_config
from twinfer.shared.models.shapes import SHAPES

MODEL = parse_config(SHAPES["qwen3-0.6b"])
GPU = DeviceInfo("cuda", "a GPU", 80 << 30)
NATIVE = resolve_plan("torch", enable=("none",))


def replaced(plan, op, **properties):
    """The plan with another implementation of an op."""
    implementation = dataclasses.replace(plan[op].implementation, **properties)
    choice = dataclasses.replace(plan[op], implementation=implementation)
    return dataclasses.replace(plan, choices={**plan.choices, op: choice})


def compilation(**options):
    config, _ = resolve(EngineConfig(model="m", backend="torch", compilation_config=options), MODEL, GPU)
    return config.compilation


@pytest.mark.parametrize("road", ["regional", "piecewise"])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE", None])
def test_no_piece_of_a_graph_holds_what_reads_the_host(road, mode):
    """Without a split there, a graph would keep the lengths of its capture: those of padding, all of them 0."""
    plans = {"decode": replaced(NATIVE, "paged_attention", host_metadata=mode != "FULL_AND_PIECEWISE"), "mixed": NATIVE}
    asked = {"road": road} | ({"cudagraph_mode": mode} if mode else {})
    wrong = [[]] if road == "regional" else [[], ["rms_norm"]]
    for ops in wrong:
        with pytest.raises(ConfigError) as raised:
            fit_mode(compilation(**asked, splitting_ops=ops), plans)
        kind = "mixed" if mode == "FULL_AND_PIECEWISE" else "decode"
        for part in (f"splitting_ops: got {ops}", f"must name paged_attention: in {kind} steps", "'native'", "leave"):
            assert part in str(raised.value)
    for ops in ({}, {"splitting_ops": ["paged_attention"]}):
        fitted, _ = fit_mode(compilation(**asked, **ops), plans)
        assert fitted.cudagraph_mode.name == (mode or "PIECEWISE")


def test_what_reads_nothing_on_the_host_may_be_in_a_piece():
    kernels = replaced(NATIVE, "paged_attention", host_metadata=False)
    asked = compilation(cudagraph_mode="PIECEWISE", splitting_ops=[])
    assert fit_mode(asked, {"decode": kernels, "mixed": kernels})[0].splitting_ops == ()
    other = replaced(kernels, "write_kv", host_metadata=True)
    with pytest.raises(ConfigError, match="must name write_kv: in mixed steps"):
        fit_mode(asked, {"decode": kernels, "mixed": other})
    with pytest.raises(ConfigError, match="in decode steps write_kv is 'native', which reads lengths on the host"):
        fit_mode(compilation(cudagraph_mode="FULL"), {"decode": other, "mixed": kernels})


def test_where_there_are_no_graphs_nothing_must_be_split():
    asked = compilation(cudagraph_mode="NONE", splitting_ops=[])
    assert fit_mode(asked, {"decode": NATIVE, "mixed": NATIVE}) == (asked, [])
