"""What output of a form costs: microseconds a token of streams that are free, masked, and bound to
a JSON schema.

`python scripts/bench_forms.py --model qwen3-0.6b --device cuda`: the shape with random weights and
the demo model's tokenizer, through `LLM.generate`. `--threads` are those of llguidance (0: none but
ours), `--lexers` a grammar's; with `--no-ahead` the host waits for masks before it packs the next
step.
`--parts` tells where the host's time of a step goes, `--looks` what masks take without a model.
"""

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import llguidance
import numpy as np

from twinfer.serving.llm import LLM
from twinfer.serving.parser import OneLineParser, output_file, whole_number
from twinfer.serving.program import run_program
from twinfer.shared import engine, grammars
from twinfer.shared.models.locate import model_folder
from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.structured_outputs import StructuredOutputs

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
    config = json.loads((Path(model_folder(model)) / "config.json").read_text())
    # Of the tokenizer that is there.
    config["eos_token_id"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    for path in Path(model_folder("demo")).glob("*token*"):
        shutil.copy(path, folder)
    return folder


def microseconds(llm, settings, prompts):
    """Of a token, by the clock."""
    began = time.perf_counter()
    outputs = llm.generate(prompts, settings, progress=False)
    seconds = time.perf_counter() - began
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    return 1e6 * seconds / count, count


def looks(count, steps=60):
    """Milliseconds that the tokens and masks of a step take over 151 936 words, by the clock and of
    processor time, and those until the host's own thread goes on.
    """
    grammars.LEXERS_S = 1.0
    made = grammars.Grammars(model_folder("demo"), 151_936, [0])
    form, random = StructuredOutputs("json", json.dumps(SCHEMA)), Random(1)
    matchers = [made.start(form, None) for _ in range(count)]
    spent = []
    for _ in range(steps):
        tokens = []
        for matcher in matchers:
            bits = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
            tokens.append(int(random.choice(np.flatnonzero(bits).tolist())))
        before, began = time.process_time(), time.perf_counter()
        look = made.advance(list(zip(matchers, tokens, strict=True)))
        advanced = time.perf_counter() - began
        look.done()
        spent.append((time.perf_counter() - began, time.process_time() - before, advanced))
        for place, matcher in enumerate(matchers):
            if matcher.finished or matcher.stuck:
                matchers[place] = made.start(form, None)
    clock, processor, advanced = (
        1e3 * statistics.median(part) for part in zip(*spent, strict=True)
    )
    print(
        f"masks of {count} texts, {grammars.MOST_LEXERS} lexers, {grammars.MOST_THREADS} threads: "
        f"{clock:.2f} ms by the clock, "
        f"{processor:.2f} of processor time; {advanced:.2f} until the host goes on",
        flush=True,
    )


class Direct:
    """Serves one text after another in the thread that asks, in place of llguidance's threads."""

    def __init__(self, num_threads=None):
        pass

    def consume_token_par(self, followed):
        """As llguidance's."""
        return [matcher.consume_token(token) for matcher, token in followed]

    def unsafe_compute_mask_ptr(self, places, start, stride, count):
        """As llguidance's."""
        for matcher, row in places:
            matcher.unsafe_compute_mask_ptr(start + row * stride, stride)


class Parts:
    """Adds up the clock's seconds that functions take, by their names."""

    def __init__(self):
        self.seconds = {}
        self.steps = 0

    def time(self, owner, name):
        """Have the calls of `owner.name` timed."""
        inner = getattr(owner, name)

        def timed(*arguments, **named):
            began = time.perf_counter()
            try:
                return inner(*arguments, **named)
            finally:
                spent = time.perf_counter() - began
                self.seconds[name] = self.seconds.get(name, 0.0) + spent
                self.steps += name == "execute"

        setattr(owner, name, timed)

    def watch(self, core):
        """The parts of a step of the engine `core`; `_read` holds `_advance_matchers`, and that
        `advance`; `_step` holds all.
        """
        self.time(core.scheduler, "schedule")
        self.time(engine, "pack")
        for name in ("_step", "_read", "_advance_matchers", "_finish_look"):
            self.time(core, name)
        self.time(core.grammars, "advance")
        for name in ("execute", "sample"):
            self.time(core.worker, name)

    def told(self):
        """Microseconds of a step by part, and forget them."""
        found = {name: 1e6 * s / max(1, self.steps) for name, s in self.seconds.items()}
        self.seconds, self.steps = {}, 0
        return ", ".join(f"{name} {us:.0f}" for name, us in found.items())


def main():
    """Prints a line for each kind of streams."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=whole_number(1), default=64)
    parser.add_argument("--length", type=whole_number(1), default=128)
    parser.add_argument("--repeats", type=whole_number(1), default=3)
    parser.add_argument("--threads", type=int, default=grammars.MOST_THREADS)
    parser.add_argument("--lexers", type=int, default=grammars.MOST_LEXERS)
    parser.add_argument("--ahead", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=output_file, metavar="FILE")
    parser.add_argument("--parts", action="store_true", help="microseconds of a step by part")
    parser.add_argument("--looks", action="store_true", help="the masks alone, without a model")
    arguments = parser.parse_args()
    grammars.MOST_THREADS, grammars.MOST_LEXERS = arguments.threads, arguments.lexers
    if arguments.threads == 0:
        llguidance.LLExecutor = Direct
    if not arguments.ahead:
        grammars.FEW = 1 << 30
    count = arguments.streams
    if arguments.looks:
        for lexers, threads in itertools.product((1, 2, 4, 8), repeat=2):
            if threads >= lexers:
                grammars.MOST_LEXERS, grammars.MOST_THREADS = lexers, threads
                looks(count)
        return
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
        parts = Parts()
        if arguments.parts:
            parts.watch(llm.engine)
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
            if arguments.parts:
                print(f"    of a step: {parts.told()} us", flush=True)
        found["late"] = llm.engine.worker.compilations_after_ready()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    sys.exit(run_program(main))
