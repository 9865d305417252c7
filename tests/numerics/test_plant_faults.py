"""The faults that scripts/plant_faults.py plants are where it says. The script takes an hour."""

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from twinfer.numerics.faults.catalogue import CATALOGUE
from twinfer.ops import Plan, testing
from twinfer.ops.testing import run

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("plant_faults", ROOT / "scripts/plant_faults.py")
plant_faults = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = plant_faults  # where dataclasses look for annotations
spec.loader.exec_module(plant_faults)
FAULTS = plant_faults.FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault, tmp_path):
    copy = tmp_path / fault.file
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / fault.file).read_text())
    before = plant_faults.plant(tmp_path, fault)
    assert copy.read_text() != before
    compile(copy.read_text(), fault.file, "exec")
    re.compile(fault.cause)


def test_there_are_forty_of_different_names():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40


def test_a_fault_without_its_place_is_an_error(tmp_path):
    (tmp_path / "x.py").write_text("a = 1\n")
    fault = plant_faults.Fault("f", "torch", "x.py", "b = 2", "b = 3", "")
    with pytest.raises(ValueError, match="0 times, must be 1"):
        plant_faults.plant(tmp_path, fault)


def test_faults_of_the_self_test_are_planted_in_every_implementation(monkeypatch):
    """In a backend's ops and in no other's: the reference stays right."""
    monkeypatch.setattr(Plan, "bind", Plan.bind)  # what it was comes back
    uncached = testing.bound_function.__wrapped__
    monkeypatch.setattr(testing, "bound_function", uncached)
    rng = np.random.default_rng(0)
    given = {"x": rng.normal(size=(2, 64)), "weight": np.eye(64), "bias": None}
    given = {k: v if v is None else v.astype(np.float32) for k, v in given.items()}
    plant_faults.spoil("torch", "")
    assert np.allclose(run("linear", "torch", None, given)[0], given["x"])
    plant_faults.spoil("torch", "k-tail-dropped")
    assert np.allclose(run("linear", "numpy", None, given)[0], given["x"])
    assert not run("linear", "torch", None, given)[0][:, -8:].any()


def test_most_faults_of_the_self_test_are_in_ops_that_a_model_calls():
    found = plant_faults.catalogued("torch")
    in_ops = {fault.name for fault in CATALOGUE.values() if fault.place != "engine"}
    left_out = in_ops - {fault.name for fault in found}
    assert left_out == {"scalar-dropped", "int8-wrapped", "int8-truncated", "dequantize-next-scale",
                        "adapter-off-by-one"}  # fmt: skip
    assert {fault.model for fault in found} == {"dense", "experts"}
