"""The faults that scripts/plant_faults.py plants are where it says. The script takes an hour."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

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
