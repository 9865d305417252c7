"""Ranks that sum through each other's memory, as processes in Triton's interpreter."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton")


def run(tmp_path, world, dtype):
    for name, empty in (("sums", b"\xff"), ("best", b"\0"), ("scales", b"\0")):
        for rank in range(world):
            (tmp_path / f"{name}{rank}").write_bytes(empty * (1 << 16))
    script = Path(__file__).with_name("peer_process.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    started = []
    for rank in range(world):
        command = [sys.executable, script, str(rank), str(world), tmp_path, dtype]
        with (tmp_path / f"said{rank}").open("w") as said:
            started.append(subprocess.Popen(command, env=environment, stderr=said))
    try:
        # The others wait for one that has failed.
        while None in (found := [process.poll() for process in started]) and not any(found):
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()
            process.wait()
    said = [(tmp_path / f"said{rank}").read_text() for rank in range(world)]
    assert found == [0] * len(started), "\n".join(said)


@pytest.mark.parametrize(
    ("world", "dtype"), [(2, "bfloat16"), pytest.param(3, "float32", marks=pytest.mark.slow)]
)
def test_a_few_rows_are_summed_in_the_order_of_ranks(tmp_path, world, dtype):
    """And the most probable tokens chosen; a peer that does not come makes all of it NaN, or no
    token.
    """
    run(tmp_path, world, dtype)
