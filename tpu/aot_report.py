"""What `twinfer aot` says: what a model needs on a slice, and what each of its programs takes
and sends.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from ..shared.step_cost import Estimate

COLLECTIVE = re.compile(
    r"= .*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    r"|ragged-all-to-all)(?:-start)?\("
)


@dataclass(slots=True)
class ProgramCost:
    """One program, by the compiler's word: bytes on each device, and what it sends between devices.

    `results` are those that do not take the place of arguments. `collectives_per_layer` stand in
    the loop over layers, `collectives_per_step` outside of it; in an unrolled program all stand
    outside.
    """

    name: str
    seconds: float
    temporaries: int
    results: int
    code: int
    arguments: int
    collectives_per_layer: dict[str, int]
    collectives_per_step: dict[str, int]


@dataclass(slots=True)
class AotReport:
    """What a model needs on a slice. Bytes are per device.

    `besides` is what is held besides the cache, by what for. Where weights and one request do not
    fit, nothing is compiled: it is empty, and `num_pages` and `kv_tokens` are what would fit if
    steps took no memory. `ladder` counts the programs that a worker builds, of which `programs`
    were compiled here. `estimates` are no figures of the compiler's: what steps take by published
    rates of the chip. `step_message` is what each other host gets of a decode step of all requests.
    """

    model: str
    topology: str
    devices: int
    hosts: int
    tensor_parallel_size: int
    plan_hash: str
    memory: int
    weights: int
    page_size: int
    page_bytes: int
    changes: list[str]
    num_pages: int = 0
    kv_tokens: int = 0
    fits: bool = False
    seconds: float = 0.0
    besides: dict[str, int] = field(default_factory=dict)
    ladder: int = 0
    programs: list[ProgramCost] = field(default_factory=list)
    too_large: list[dict[str, Any]] = field(default_factory=list)
    estimates: list[Estimate] = field(default_factory=list)
    step_message: int = 0
    written_to: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {
            "estimates": [asdict(one) | {"ms": one.ms} for one in self.estimates]
        }

    def set_pages(self, pages: int, tokens: int) -> None:
        """Say how large the cache is."""
        self.num_pages, self.kv_tokens = pages, tokens


def program_cost(name: str, compiled: Any, seconds: float, bodies: int) -> ProgramCost:
    """What a compiled program takes; `bodies` of layers are in its loops, or none."""
    memory = compiled.memory_analysis()
    inside, outside = collectives(compiled.as_text() or "")
    if bodies:
        inside = Counter({kind: count / bodies for kind, count in inside.items()})
    else:  # no loop over layers: what is called from the entry computation is a part of it
        inside, outside = Counter(), inside + outside
    return ProgramCost(
        name,
        round(seconds, 2),
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.generated_code_size_in_bytes,
        memory.argument_size_in_bytes,
        dict(inside) if name.startswith("backbone") else {},
        dict(outside) if name.startswith("backbone") else dict(inside + outside),
    )


def collectives(text: str) -> tuple[Counter[str], Counter[str]]:
    """Collectives of an optimised HLO module: (inside of loops and what they call, in the entry
    computation).
    """
    inside: Counter[str] = Counter()
    outside: Counter[str] = Counter()
    entry = False
    for line in text.splitlines():
        if not line.startswith(" "):
            entry = line.startswith("ENTRY")
            continue
        found = COLLECTIVE.search(line)
        if found:
            (outside if entry else inside)[found[1]] += 1
    return inside, outside
