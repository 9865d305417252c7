"""What a step takes on several devices, from what it takes on one: the model of
shared/step_cost.py, and how far it is off.

    python scripts/cost_tp.py --measured out.json            # of scripts/bench_tp.py
    python scripts/cost_tp.py --model llama3.1-70b --shards 2 --one 1:31.7,8:32.0 --link peers
"""

from __future__ import annotations

import argparse
import sys
from math import inf
from pathlib import Path
from typing import Any

from twinfer.serving.parser import OneLineParser, argument, whole_number
from twinfer.serving.program import run_program
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.locate import model_folder
from twinfer.shared.option_text import json_object, words
from twinfer.shared.step_cost import LINKS, number_of_sums, step_ms

BFLOAT16 = 2
PROMPTS = 8192
"""Tokens of a step of prompts."""


def compare(measured: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(what, modelled, measured) of the runs that a file of scripts/bench_tp.py has."""
    model = load_config(model_folder(measured["model"]))
    engines = {name: found for name, found in measured["engines"].items() if "decode_ms" in found}
    one, rows = engines["tp 1"], []
    for name, found in engines.items():
        shards = found["options"].get("tensor_parallel_size", 1)
        if shards == 1:
            continue
        link = LINKS[name.split()[-1]]
        for batch, took in found["decode_ms"].items():
            alone = one["decode_ms"][batch]
            modelled = step_ms(model, alone, int(batch), BFLOAT16, shards, link)
            rows.append((f"{name}, decode b = {batch}, ms", modelled, took))
        alone = PROMPTS / one["prefill_tok_s"] * 1e3
        modelled = 1e3 * PROMPTS / step_ms(model, alone, PROMPTS, BFLOAT16, shards, link)
        rows.append((f"{name}, prefill, tokens/s", modelled, found["prefill_tok_s"]))
    return rows


def results(path: str) -> dict[str, Any]:
    """What a file of results holds."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    return json_object(text)


def times(text: str) -> dict[int, float]:
    """Batch sizes, and the milliseconds of a step of each."""
    pairs = [pair.partition(":") for pair in words(text)]
    try:
        found = {int(batch): float(took) for batch, _, took in pairs}
    except ValueError:
        found = {}
    if not found or not all(batch > 0 and 0 < took < inf for batch, took in found.items()):
        raise ValueError(f"{text!r} is not times such as 1:3.8,64:5.3")
    return found


def main() -> None:
    """Print a table."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--measured", type=argument(results), help="a file that scripts/bench_tp.py wrote"
    )
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--shards", type=whole_number(1), default=2)
    parser.add_argument(
        "--one",
        type=argument(times),
        default={},
        help="BATCH:MS of one device, with commas between",
    )
    parser.add_argument("--link", choices=LINKS, default="peers")
    arguments = parser.parse_args()
    if arguments.measured:
        try:
            rows = compare(arguments.measured)
        except KeyError as error:
            parser.error(f"argument --measured: it has no {error}; --parts engines measures that")
        for what, modelled, took in rows:
            print(f"{what:42} {modelled:10.2f} {took:10.2f}  {modelled / took - 1:+.1%}")
        return
    link = LINKS[arguments.link]
    print(f"{arguments.link}: {link.source}")
    model = load_config(model_folder(arguments.model))
    for batch, one in arguments.one.items():
        took = step_ms(model, one, batch, BFLOAT16, arguments.shards, link)
        size = batch * BFLOAT16 * model.hidden_size
        print(f"b = {batch}: {took:.2f} ms, {number_of_sums(model)} sums of {size} bytes")


if __name__ == "__main__":
    sys.exit(run_program(main))
