"""What guessed tokens gain: milliseconds a token of decodes by how many are guessed and how many of
them are right.

    python scripts/bench_guesses.py --model demo --guesses 3,7 --right 0,50,100 [--requests 1,8]

Each row has an engine of its own, without guesses or with up to so many in a step. What is guessed
is not looked up: it is the text itself, as the engine without guesses wrote it, with a mistake in
some places, so that `--right` percent of the guesses are right. A shape runs with random weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from twinfer.serving.llm import LLM
from twinfer.serving.parser import OneLineParser, output_file, whole_number, whole_numbers
from twinfer.serving.program import run_program
from twinfer.shared import scheduler
from twinfer.shared.drafts import SpeculativeConfig
from twinfer.shared.ngrams import NgramFilter
from twinfer.shared.sampling_params import SamplingParams

PROMPT = 64


class Texts:
    """Guesses from texts that are known, of which some are wrong."""

    def __init__(self, texts: list[np.ndarray], right: int) -> None:
        self._texts, self._right = texts, right
        self._random = np.random.default_rng(0)

    def look_up(self, tokens: np.ndarray, config: SpeculativeConfig, most: int) -> np.ndarray:
        """As `drafts.look_up`."""
        size = len(tokens)
        for text in self._texts:
            if np.array_equal(text[:PROMPT], tokens[:PROMPT]):
                found = text[size : size + max(0, most)]
                wrong = self._random.integers(0, 100, len(found)) >= self._right
                return np.where(wrong, found ^ 1, found).astype(np.int32)
        return tokens[:0]


def measure(llm: LLM, prompts: list[list[int]], tokens: int, rounds: int) -> dict[str, Any]:
    """Medians over rounds: all requests run from their first token to their last."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    asked: Any = [{"prompt_token_ids": ids} for ids in prompts]
    spent, texts = [], []
    for _ in range(rounds + 1):
        step, began = llm.engine._step_id, time.perf_counter()
        outputs = llm.generate(asked, params, progress=False)
        spent.append((time.perf_counter() - began, llm.engine._step_id - step))
        texts = [output.outputs[0].token_ids for output in outputs]
    seconds, steps = (statistics.median(part) for part in zip(*spent[1:], strict=True))
    return {
        "ms_a_token": 1e3 * seconds / tokens,
        "ms_a_step": 1e3 * seconds / steps,
        "texts": texts,
    }


def main() -> int:
    """Exit code 1 if an engine wrote another text with guesses than without."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--guesses", type=whole_numbers(1), default=[3, 7])
    parser.add_argument("--right", type=whole_numbers(0), default=[0, 50, 100])
    parser.add_argument("--requests", type=whole_numbers(1), default=[1])
    parser.add_argument("--max-num-seqs", type=whole_number(2), default=16)
    parser.add_argument("--tokens", type=whole_number(2), default=128)
    parser.add_argument("--rounds", type=whole_number(1), default=3)
    parser.add_argument("--json", type=output_file, metavar="FILE")
    given = parser.parse_args()
    rows, same = [], True
    print("| requests | guesses | right | ms a token | ms a step | tokens equal |")
    print("|---|---|---|---|---|---|")
    for requests in given.requests:
        texts: list[np.ndarray] = []
        for guesses, right in [(0, 0), *((n, p) for n in given.guesses for p in given.right)]:
            config = SpeculativeConfig(guesses) if guesses else None
            with (
                mock.patch.object(NgramFilter, "may_repeat", lambda _, rows, __: rows >= 0),
                mock.patch.object(scheduler, "look_up", Texts(texts, right).look_up),
                LLM(
                    given.model, backend=given.backend, device=given.device, dtype=given.dtype,
                    load_format="auto" if given.model == "demo" else "dummy", progress=False,
                    max_num_seqs=given.max_num_seqs, max_model_len=PROMPT + given.tokens,
                    speculative_config=config,
                ) as llm,
            ):  # fmt: skip
                random = np.random.default_rng(1)
                size = (requests, PROMPT)
                prompts = random.integers(0, llm.engine.model.vocab_size, size).tolist()
                found = measure(llm, prompts, given.tokens, given.rounds)
            whole = [np.array(a + b) for a, b in zip(prompts, found.pop("texts"), strict=True)]
            texts = texts or whole
            equal = all(map(np.array_equal, texts, whole))
            same &= equal
            row = {
                "requests": requests,
                "guesses": guesses,
                "right": right,
                **found,
                "equal": equal,
            }
            rows.append(row)
            print(
                f"| {requests} | {guesses} | {right} % | {found['ms_a_token']:.2f} | "
                f"{found['ms_a_step']:.2f} | {'yes' if equal else 'no'} |",
                flush=True,
            )
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(run_program(main))
