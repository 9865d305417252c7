"""Tokens a second of both workers beside transformers' `generate`, on this machine, in one process.

Greedy, the same prompts of token ids, the same number of new tokens, the same dtype and number of
threads. Engines and models are built and warmed up before. They run in turn, --repeats times, and
the fastest run counts. The tokens are compared too: a ratio of different texts is none.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from twinfer import LLM, SamplingParams
from twinfer.serving.parser import OneLineParser, whole_number
from twinfer.serving.program import run_program
from twinfer.shared.models.locate import model_folder

Tokens = list[list[int]]


def fastest(
    work: Mapping[str, Callable[[], Tokens]], repeats: int
) -> dict[str, tuple[float, Tokens]]:
    """(seconds of the fastest run, its tokens) by name. All run in turn, so that a machine's
    moods reach each.
    """
    found = {name: (float("inf"), run()) for name, run in work.items()}
    for _ in range(repeats):
        for name, run in work.items():
            start = time.perf_counter()
            tokens = run()
            found[name] = (min(found[name][0], time.perf_counter() - start), tokens)
    return found


def transformers_run(model: str, dtype: str, prompts: Tokens, length: int) -> Callable[[], Tokens]:
    """Greedy completions by transformers."""
    oracle = AutoModelForCausalLM.from_pretrained(
        model_folder(model), dtype=getattr(torch, dtype)
    ).eval()
    ids = torch.tensor(prompts)
    options = {
        "max_new_tokens": length,
        "eos_token_id": None,
        "do_sample": False,
        "use_cache": True,
    }

    def run() -> Tokens:
        with torch.inference_mode():
            out = oracle.generate(
                ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options
            )
        return out[:, ids.shape[1] :].tolist()

    return run


def engine_run(llm: LLM, prompts: Tokens, length: int) -> Callable[[], Tokens]:
    """Greedy completions by an engine."""
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    return lambda: [
        out.outputs[0].token_ids for out in llm.generate(prompts, params, progress=False)
    ]


def main() -> None:
    """Print a line for each batch size and worker."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="a checkpoint folder, or the word demo")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch-sizes", type=whole_number(1), nargs="+", default=[1, 16])
    parser.add_argument("--prompt-len", type=whole_number(1), default=64)
    parser.add_argument("--max-tokens", type=whole_number(1), default=64)
    parser.add_argument("--repeats", type=whole_number(1), default=7)
    arguments = parser.parse_args()
    print(f"{arguments.model}, {arguments.dtype}, {arguments.prompt_len} + {arguments.max_tokens} "
          "tokens, "
          f"{torch.get_num_threads()} threads")  # fmt: skip
    engines = {
        backend: LLM(
            arguments.model,
            backend=backend,
            device="cpu",
            dtype=arguments.dtype,
            max_num_seqs=max(arguments.batch_sizes),
            enable_prefix_caching=False,
            progress=False,
        )
        for backend in ("torch", "jax")
    }
    for size in arguments.batch_sizes:
        prompts = np.random.default_rng(0).integers(3, 300, (size, arguments.prompt_len)).tolist()
        work = {
            "transformers": transformers_run(
                arguments.model, arguments.dtype, prompts, arguments.max_tokens
            )
        }
        work |= {
            name: engine_run(llm, prompts, arguments.max_tokens) for name, llm in engines.items()
        }
        found = fastest(work, arguments.repeats)
        seconds, expected = found.pop("transformers")
        count = size * arguments.max_tokens
        print(f"batch {size:>3}  transformers  {count / seconds:9.0f} tok/s")
        for name, (own, tokens) in found.items():
            equal = int((np.array(tokens) == np.array(expected)).sum())
            print(f"batch {size:>3}  {name:<12}  {count / own:9.0f} tok/s  "
                  f"{seconds / own:5.2f} of "
                  "transformers, "
                  f"tokens equal {equal}/{count}")  # fmt: skip
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    sys.exit(run_program(main))
