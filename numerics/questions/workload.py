"""What engines are asked for when their service is compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...shared.errors import ConfigError
from ...shared.sampling_params import SamplingParams
from ...shared.step import STOP_SLOTS
from ..sides.serving import Ask
from ..sides.steps import check_prompt, default_prompts
from ..sides.subject import Subject

NEW_TOKENS = 24
LONG_TOKENS = 48
"""The same of the one request that fills the context: it goes on when the others have ended."""
BEST = 8
"""Log-probabilities of a position that are asked for."""
SPREAD = 0x9E3779B97F4A7C15 >> 12
"""Seeds are multiples of it, so that both halves of each say something."""


def workload(
    subject: Subject, prompts: Sequence[np.ndarray] | None = None, loops: bool = False
) -> list[Ask]:
    """Requests that reach every kind of step. `prompts` stand for those of its own. `loops`: none
    asks for what the host must see between two tokens.

    The first wave has more requests than run at once. Its first fills the context, holds the first
    page, and ends last. In it are two whose second pages are equal and whose first are not. The
    second wave begins with what the first computed.

    Raises ConfigError for a context that is too short for these, RequestError for a prompt that
    is too long for it.
    """
    rng, page = np.random.default_rng(subject.seed), subject.page_size
    longest = subject.max_model_len - NEW_TOKENS
    if subject.max_model_len <= 2 * page:
        raise ConfigError(
            f"max_model_len: got {subject.max_model_len}, allowed is at least {2 * page + 1} to "
            "serve: prompts of two pages and a token"
        )
    if prompts is None:
        given = [ids[:longest] for ids in default_prompts(subject, subject.seed)]
    else:
        given = list(prompts)
        for index, ids in enumerate(given):
            check_prompt(ids, index, subject, 1, longest)
    words = np.concatenate(given)

    def some(count: int) -> np.ndarray:
        """Tokens of the prompts in another order."""
        return rng.choice(words, max(count, 0)).astype(np.int32)

    room = longest - 2 * page
    shared = some(page)
    twins = [np.concatenate([some(page), shared, some(min(5, room))]) for _ in range(2)]
    after = min(LONG_TOKENS, subject.max_model_len // 2)
    context = some(subject.max_model_len - after)
    first = [context, *given, *twins, *(some(min(n, longest)) for n in (2 * page + 3, 7, page))]
    again = [np.concatenate([ids[:-1], some(6)])[:longest] for ids in (*twins, *given[:4])]
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.9, "min_p": 0.3},
    ]
    if not loops:
        bias = {int(word): 4.0 for word in words[:3]}
        settings += [
            {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
            {"temperature": 0.7, "presence_penalty": 0.3, "logit_bias": bias},
        ]
    asks: list[Ask] = []
    for wave, group in enumerate((first, again)):
        for prompt in group:
            index = len(asks)
            params = SamplingParams(
                seed=(1000 + index) * SPREAD, ignore_eos=True,
                max_tokens=NEW_TOKENS - index % 9 if index else after,
                # The programs without log-probabilities run too, and those of prompts.
                logprobs=BEST if wave == 0 and not loops else None,
                # The first two fill more than a step: one of their prompts is read in parts.
                prompt_logprobs=BEST if wave == 0 and not loops and index % 4 < 2 else None,
                **settings[index % len(settings)],
            )  # fmt: skip
            asks.append(Ask(prompt, params, wave))
    for extra in _particular(words, rng, subject.model.vocab_size, loops):
        index = len(asks)
        common = {"seed": (1000 + index) * SPREAD, "max_tokens": 12, "ignore_eos": True}
        params = SamplingParams(**common | extra)
        asks.append(Ask(some(min(9, longest)), params, 1, drawn_seed(subject.seed, index)))
    return asks


def _particular(
    words: np.ndarray, rng: np.random.Generator, vocab: int, loops: bool
) -> Iterator[dict[str, Any]]:
    """What the last requests ask for: no seed, stop ids, and masks. One stops for sure, by a bias,
    as soon as it may. Of four tokens, those that may follow change with each token.
    """
    yield {"seed": None}
    # As many as a loop of decode steps stops early for.
    few = sorted({*words.tolist()})[: min(STOP_SLOTS, vocab // 4)]
    yield {"min_tokens": 3, "stop_token_ids": few}
    if loops:
        return
    stop = int(words[-1])
    yield {
        "temperature": 0.0, "min_tokens": 4, "stop_token_ids": [stop], "logit_bias": {stop: 100.0},
    }  # fmt: skip
    yield {"allowed_token_ids": sorted({*rng.integers(0, vocab, 12).tolist()})}
    few = rng.choice(vocab, 4, replace=False).tolist()
    banned = [*((token, token) for token in few), (few[0], few[1]), (few[2], few[3], few[0])]
    yield {"allowed_token_ids": few, "banned_sequences": banned}


def drawn_seed(seed: int, number: int) -> int:
    """What an engine with `seed` draws for its request `number`, which names none: 64 bits."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
