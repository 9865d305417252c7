"""What a Pallas kernel costs by the schedule that libtpu's compiler made of it: no TPU is needed,
and none has run it.

A bundle is what a TPU core issues in one cycle. Waiting for memory is not in it, and how often a
loop is passed is not known: compare kernels by it, or block sizes of one kernel, and do not take it
for a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BUNDLES = "final_bundles"
UNITS = "final_hlo-static-per-bundle-utilization"
MEMORY = "pre-finalize-registers-and-allocations"

DUMP = re.compile(rf"(\d+-(.+))-\d+-({BUNDLES}|{UNITS}|{MEMORY})\.txt")
BUNDLE = re.compile(r"^ *(?:0x)?[0-9a-f]+ +([A-Z]{2})? *: *(>*) *\{(.*)", re.MULTILINE)
ALLOCATION = re.compile(r"^ *#allocation\d+ \[.*space=vmem, size = (0x[0-9a-f]+)", re.MULTILINE)
KERNEL = re.compile(r"%([\w.-]+) = [^\n]*custom_call_target=\"tpu_custom_call\"")
COPY = ("dma.hbm_to_vmem", "dma.done.wait")
PRODUCT = "vmat"
"""In the names of the matrix unit's instructions. That it is at work would not do: it is so for
some bundles after.
"""


@dataclass(frozen=True, slots=True)
class KernelCost:
    """The schedule of one kernel. Counts are of its text, in which a loop's body stands once.

    `spills` and `fills`: stores of vector registers that did not suffice, and loads of them.
    `vmem`: bytes. `block`: bundles of the loop around the matrix products with the loops inside it;
    `page`: those of them in loops over pages.
    """

    name: str
    bundles: int
    spills: int
    fills: int
    vmem: int
    block: int
    page: int

    def issued(self, pages: int) -> int:
        """Bundles to compute one block of `pages` pages: loops over its pages are passed as
        often.
        """
        return self.block + (pages - 1) * self.page


def dump_to(folder: Path) -> None:
    """Make libtpu write its schedules to `folder`. Call it before libtpu runs: it reads this
    once.
    """
    passes = f".*({BUNDLES}|{UNITS}|{MEMORY})"
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex={passes}"
    )
    # What comes from a cache is not scheduled.
    jax.config.update("jax_enable_compilation_cache", False)


def measure(
    function: Callable[..., Any], arguments: Sequence[Any], device: Any, folder: Path
) -> list[KernelCost]:
    """Compile a function of arrays like `arguments` for a device of a topology: what each kernel in
    it costs, by name.

    `folder` is the one of `dump_to`; it is emptied first. Raises what the compiler raises.
    """
    for old in folder.iterdir():
        old.unlink()
    mesh = Mesh(np.array([device]), ("x",))
    place = NamedSharding(mesh, PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in arguments]
    # The kernels' lowering asks the abstract mesh for the generation.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(function).lower(*arrays).compile()
    kernels = set(KERNEL.findall(compiled.as_text()))
    found = read(folder)
    if missing := kernels - found.keys():
        raise RuntimeError(
            f"libtpu wrote no schedule of {', '.join(sorted(missing))}: are the flags of dump_to "
            "set?"
        )
    return [found[name] for name in sorted(kernels)]


def read(folder: Path) -> dict[str, KernelCost]:
    """The cost of everything that libtpu scheduled into `folder`, by the name of its HLO
    instruction.
    """
    texts: dict[str, dict[str, str]] = {}
    names: dict[str, str] = {}
    for path in folder.iterdir():
        if dump := DUMP.fullmatch(path.name):
            names[dump[1]] = dump[2]
            texts.setdefault(dump[1], {})[dump[3]] = path.read_text()
    return {
        names[stamp]: cost_of(names[stamp], text[BUNDLES], text[UNITS], text.get(MEMORY, ""))
        for stamp, text in texts.items()
        if BUNDLES in text and UNITS in text
    }


def cost_of(name: str, bundles: str, units: str, memory: str) -> KernelCost:
    """The cost of one schedule from the three texts that libtpu writes of it."""
    names, _, _, *rows = units.splitlines()[1:] or [""] * 3
    columns = [column.strip() for column in names.split(",")]
    used = [dict(zip(columns, map(int, row.split()), strict=True)) for row in rows if row.strip()]
    marked = BUNDLE.findall(bundles)
    if len(marked) != len(used):
        raise ValueError(f"{name}: {len(marked)} bundles, and the units of {len(used)}")
    loops = _loops(marked)
    products = [i for i, bundle in enumerate(marked) if PRODUCT in bundle[2]]
    depth = min((len(loops[i]) for i in products), default=0)
    block = [
        i for i, path in enumerate(loops) if products and path[:depth] == loops[products[0]][:depth]
    ]
    inside: dict[int, list[int]] = {}
    for i in block:
        if len(loops[i]) > depth:
            inside.setdefault(loops[i][depth], []).append(i)
    pages = [
        loop for loop in inside.values() if any(word in marked[i][2] for i in loop for word in COPY)
    ]
    return KernelCost(
        name,
        len(marked),
        sum(row["VSTORE:SPILL"] for row in used),
        sum(row["VLOAD:FILL"] for row in used),
        sum(int(size, 16) for size in ALLOCATION.findall(memory)),
        len(block),
        sum(map(len, pages)),
    )


def _loops(marked: Sequence[tuple[str, str, str]]) -> list[tuple[int, ...]]:
    """The loops that each bundle (label, a `>` for each loop around it, text) is in, from the
    outermost inwards.

    LB labels the first bundle of a loop. The jump back, with the empty bundles in its shadow, is
    marked as outside of its loop, empty bundles not at all, and within a loop a bundle may be
    marked as outside of it.
    """
    found: list[tuple[int, ...]] = []
    recent: tuple[int, ...] = ()
    shadow = False
    for i, (label, marks, text) in enumerate(marked):
        depth = len(marks)
        path = found[-1] if found else ()
        shadow = ("sbr.rel (!" in text and len(path) > depth) or (shadow and text.startswith("}"))
        if not shadow and not text.startswith("}"):
            path = recent[: depth - 1] if label == "LB" else recent[:depth]
            path += (i,) * (depth - len(path))
            if label == "LB" or depth > len(recent):
                recent = path
        found.append(path)
    return found
