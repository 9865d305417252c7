"""The static cost of TPU kernels: how libtpu's schedules are read, and that kernels here cost no
more than JAX's.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from twinfer.tpu import static_cost
from twinfer.tpu.kernels import blocks

SCRIPTS = Path(__file__).parents[2] / "scripts"
needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")

# A loop (>) over blocks of the cache in a grid (none), with a loop (>>) that starts copies, one
# that does not, and two matrix products, of which the unit is not yet done where the loops end.
# Marked as outside of their loop: jumps back, the empty bundles in their shadow, and one bundle
# more.
SCHEDULE = [
    ("", "{ %s0 = inlined_call_operand.vmem }", {}),
    (">", "{ %s1 = sadd }", {}),
    (">>", "{ %2 = dma.hbm_to_vmem }", {}),
    (">>", "{ %s3 = sadd }", {}),
    (">", "{ %4 = sbr.rel (!%p1) target = $region1 }", {}),
    ("", "{}", {}),
    (">>", "{ %v5 = vlaneseq }", {}),
    ("", "{ %s10 = smov (%p2) }", {}),
    (">", "{ %v6 = vmatpush }", {"MXU": 2, "VLOAD": 1, "VLOAD:FILL": 1}),
    (">", "{ %v7 = vmatmul }", {"MXU": 1, "VSTORE": 2, "VSTORE:SPILL": 2}),
    ("", "{ %8 = sbr.rel (!%p2) target = $region0 }", {}),
    ("", "{}", {}),
    ("", "{ %9 = vst }", {"VSTORE": 1, "MXU": 2}),
]
STARTS = (1, 2, 6)
"""The first bundles of loops."""
UNITS = [
    "MXU",
    "XLU",
    "VALU",
    "VPOP",
    "EUP",
    "VLOAD",
    "VLOAD:FILL",
    "VSTORE",
    "VSTORE:SPILL",
    "SALU",
]
MEMORY = """#allocation1 [shape = 'u32[144,128]{1,0:T(1,128)}', space=vmem, size = 0x100, scoped, tag = 'x']
  #allocation2 [shape = 's32[4]{0}', space=smem, size = 0x4, scoped, tag = 'scratch operand']
  #allocation3 [shape = 's32[2,1,4096,128]{3,2,1,0:T(8,128)}', space=vmem, size = 0x400, scoped, tag = 'y']
"""


def texts(schedule):
    first = ["LB" if i in STARTS else "  " for i in range(len(schedule))]
    bundles = "".join(
        f"  0x{i:x} {first[i]}: {marks} {text}\n" for i, (marks, text, _) in enumerate(schedule)
    )
    rows = [" ".join(str(used.get(unit, 0)) for unit in UNITS) for *_, used in schedule]
    units = "\n".join(
        ["== CAPACITY:", ", ".join(UNITS), "4 3 4 2 1 3 3 1 1 2", "== UTILIZATION:", *rows, ""]
    )
    return "LH: loop header\n\n" + bundles, units


def test_a_schedule_is_counted():
    bundles, units = texts(SCHEDULE)
    cost = static_cost.cost_of("kernel", bundles, units, MEMORY)
    assert cost == static_cost.KernelCost("kernel", 13, 2, 1, 0x500, block=10, page=4)
    assert cost.issued(1) == 10
    assert cost.issued(3) == 18


def test_a_schedule_without_products_has_no_block():
    bundles, units = texts(SCHEDULE[:4])
    assert static_cost.cost_of("copy", bundles, units, "").block == 0


def test_a_schedule_that_is_not_understood_is_no_result():
    bundles, units = texts(SCHEDULE)
    with pytest.raises(ValueError, match="13 bundles, and the units of 12"):
        static_cost.cost_of("kernel", bundles, units.rsplit("\n", 2)[0] + "\n", "")


def test_every_entry_of_the_table_is_sound():
    """Blocks are whole pages of any size and whole steps, and the default and the interpreters'
    are there.
    """
    table = json.loads(blocks.TABLE.read_text())
    assert {"default", "none"} <= table.keys()
    for name, sizes in table.items():
        entry = blocks.BlockSizes(**sizes)
        for block, step in (
            (entry.decode_kv, entry.decode_step),
            (entry.mixed_kv, entry.mixed_step),
        ):
            assert block % min(block, step) == 0, name
            assert block % 128 == 0, name
        assert entry.mixed_tokens % 8 == 0, name


def test_the_most_special_entry_counts(tmp_path, monkeypatch):
    path = tmp_path / "blocks.json"
    entry = dict(decode_kv=512, decode_requests=8, mixed_kv=256, mixed_tokens=32, vmem_mib=None)
    table = {
        "default": entry,
        "TPU v4": entry | {"decode_kv": 256},
        "TPU v4, bfloat16, 8 heads of 128": entry,
    }
    table["TPU v4, bfloat16, 8 heads of 128"] = entry | {"decode_kv": 1024}
    path.write_text(json.dumps(table))
    monkeypatch.setattr(blocks, "TABLE", path)
    sizes = blocks.block_sizes.__wrapped__
    assert sizes("TPU v4", "bfloat16", 8, 128).decode_kv == 1024
    assert sizes("TPU v4", "bfloat16", 1, 128).decode_kv == 256
    assert sizes("TPU v5", "bfloat16", 8, 128).decode_kv == 512


@needs_libtpu
def test_libtpu_is_the_release_that_jax_asks_for():
    from importlib.metadata import version

    wanted = [Requirement(text) for text in requires("jax")]
    mine = [r for r in wanted if r.name == "libtpu" and r.marker.evaluate({"extra": "tpu"})]
    assert len(mine) == 1
    assert version("libtpu") in mine[0].specifier


@needs_libtpu
def test_libtpu_is_left_alone_where_there_is_no_tpu():
    """A user of this machine does not read complaints about TPUs, and nothing waits for one."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    code = "from twinfer.tpu.worker import find_device; print(find_device('auto').platform)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.strip() in ("cpu", "cuda")
    assert "TPU" not in done.stderr


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("calls", ["half a block", "a shard of 8"])
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_kernels_cost_no_more_than_the_stock_one(chip, calls):
    """A sample of what `scripts/compare_kernels.py` compares."""
    command = [
        sys.executable,
        str(SCRIPTS / "compare_kernels.py"),
        "--chips",
        chip,
        "--calls",
        calls,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
