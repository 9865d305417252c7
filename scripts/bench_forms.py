"""What output of a form costs: microseconds a token of streams that are free, masked, and bound to
a JSON schema.

`python scripts/bench_forms.py --model qwen3-0.6b --device cuda`: the shape with random weights and
the demo model's tokenizer, through `LLM.generate`. `--threads` are those of llguidance; with
`--no-ahead` the host waits for masks before it packs the next step.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from twinfer.serving.llm import LLM
from twinfer.shared import grammars
from twinfer.shared.models.locate import model_folder
from twinfer.shared.sampling_params import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 40},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def folder_of(model):
    """The shape of `model`, with the demo model's tokenizer."""
    folder = Path(tempfile.mkdtemp(prefix="twinfer-forms-"))
    shutil.copy(Path(model_folder(model)) / "config.json", folder)
    for path in Path(model_folder("demo")).glob("*token*"):
        shutil.copy(path, folder)
    return folder


def microseconds(llm, settings, prompts):
    """Of a token, by the clock."""
    began = time.perf_counter()
    outputs = llm.generate(prompts, settings, progress=False, return_errors=True)
    seconds = time.perf_counter() - began
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    return 1e6 * seconds / count, count


def main():
    """Prints a line for each kind of streams."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=grammars.MOST_THREADS)
    parser.add_argument("--ahead", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    grammars.MOST_THREADS = arguments.threads
    if not arguments.ahead:
        grammars.FEW = 1 << 30
    count = arguments.streams
    prompts = [[5 + i % 7 + j for j in range(64)] for i in range(count)]
    base = SamplingParams(temperature=0.7, max_tokens=arguments.length, seed=1, ignore_eos=True)
    free = [base.with_seed(i) for i in range(count)]
    bound = SamplingParams(
        temperature=0.7, max_tokens=arguments.length, structured_outputs={"json": SCHEMA}
    )
    forms = [bound.with_seed(i) for i in range(count)]
    masked = SamplingParams(
        temperature=0.7, max_tokens=arguments.length, ignore_eos=True, banned_token_ids=(5,)
    )
    kinds = {
        "free": free,
        "masked": [masked.with_seed(i) for i in range(count)],
        "one bound": [*free[1:], forms[0]],
        "bound": forms,
    }
    load = {} if arguments.model == "demo" else {"load_format": "dummy"}
    found = {}
    with LLM(
        str(folder_of(arguments.model)) if load else "demo",
        backend=arguments.backend,
        device=arguments.device,
        progress=False,
        max_model_len=512,
        max_num_seqs=count,
        enable_prefix_caching=False,
        **load,
    ) as llm:
        for name, settings in kinds.items():
            runs = [microseconds(llm, settings, prompts) for _ in range(arguments.repeats + 1)][1:]
            times = [run[0] for run in runs]
            found[name] = min(times)
            ratio = found[name] / found["free"]
            print(
                f"{name}: {min(times):.1f} us a token at best, {statistics.median(times):.1f} in "
                f"the median, {runs[0][1]} tokens; {ratio:.2f} times free",
                flush=True,
            )
        found["late"] = llm.engine.worker.compilations_after_ready()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
