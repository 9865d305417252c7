"""What the requests of an engine may ask for, where that is known before it starts.

Each program takes seconds to compile, and a call with one greedy prompt needs few of them. The
default is anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..bucketing import smallest_at_least
from .errors import RequestError
from .sampling_encoding import sampler_of
from .sampling_params import SamplingParams
from .step import PROCESSING, SAMPLERS, Sampler

NEEDS: dict[Sampler, str] = {
    "greedy": "temperature",
    "random": "temperature",
    "filtered": "top_k, top_p, min_p",
    "masked": "structured_outputs, min_tokens, allowed_token_ids, banned_token_ids, "
    "banned_sequences, bad_words",
    "processed": "penalties, logit_bias",
}
"""The parameters that make a request need a sampler."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Sizes, which only choose defaults, and features: a request that needs another one is refused.

    requests       completions of all prompts; None is any number. More of them wait for each other
    prompt_tokens  tokens of all their prompts; None is any number. Longer prompts come in chunks
    samplers       what steps sample with; a request may use any that can do what it needs
    logprobs, prompt_logprobs  whether a request may ask for log-probabilities of its output, or of
                               its prompt
    streams        whether steps also give the residual stream behind each layer: for comparisons
    """

    requests: int | None = None
    prompt_tokens: int | None = None
    samplers: tuple[Sampler, ...] = SAMPLERS
    logprobs: bool = True
    prompt_logprobs: bool = True
    streams: bool = False

    @classmethod
    def of(cls, requests: Iterable[tuple[int, SamplingParams]]) -> Demand:
        """The demand of requests, each the tokens of its prompt and its parameters; of none,
        anything.
        """
        listed = list(requests)
        if not listed:
            return cls()
        samplers = {sampler for _, params in listed for sampler in samplers_of(params)}
        return cls(
            requests=sum(params.n for _, params in listed),
            prompt_tokens=sum(length * params.n for length, params in listed),
            samplers=tuple(sampler for sampler in SAMPLERS if sampler in samplers),
            logprobs=any(params.logprobs is not None for _, params in listed),
            prompt_logprobs=any(params.prompt_logprobs is not None for _, params in listed),
        )

    def check(self, params: SamplingParams) -> None:
        """Raise RequestError, which names the parameter, for a request that the engine has no
        programs for.
        """
        for sampler in samplers_of(params):
            if self.sampler_for(sampler) is None:
                allowed = ", ".join(self.samplers)
                raise RequestError(
                    NEEDS[sampler],
                    f"need the sampler {sampler!r}; this engine was started for {allowed} alone",
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None and not getattr(self, name):
                raise RequestError(
                    name,
                    f"got {getattr(params, name)}; this engine was started for requests without",
                )

    def sampler_for(self, sampler: Sampler) -> Sampler | None:
        """The first sampler of this demand that can do what `sampler` does, or None.

        Those that read processors stand in for no other: only steps of their own have the buffer.
        """
        if sampler in PROCESSING:
            return sampler if sampler in self.samplers else None
        able = SAMPLERS[SAMPLERS.index(sampler) :]
        found = [other for other in self.samplers if other in able and other not in PROCESSING]
        return found[0] if found else None

    def fitting_requests(self, default: int) -> int:
        """`default` rows for requests, or the power of two that is enough."""
        return default if self.requests is None else min(default, _power_of_two(self.requests))

    def fitting_tokens(self, default: int) -> int:
        """`default` tokens of a step, or the power of two that holds all prompts."""
        return (
            default
            if self.prompt_tokens is None
            else min(default, _power_of_two(max(16, self.prompt_tokens)))
        )

    def fitting_sizes(self, ladder: Sequence[int], max_requests: int) -> tuple[int, ...] | None:
        """The token counts of mixed steps that are worth a program, or None for all of `ladder`.

        If all prompts fit into one step together, then that step is the one that matters: a later
        one has the rest of a cached prompt, or a request that was preempted, and is padded.
        """
        if self.requests is None or self.prompt_tokens is None or self.requests > max_requests:
            return None
        size = smallest_at_least(ladder, self.prompt_tokens)
        return None if size is None else tuple(sorted({size, ladder[-1]}))


ANYTHING = Demand()


def samplers_of(params: SamplingParams) -> tuple[Sampler, ...]:
    """The samplers of a request's steps.

    One with processors also has steps that sample nothing (chunks of its prompt), and those are
    greedy ones; one with `min_tokens` loses its mask once it has them.
    """
    sampler = sampler_of(params)
    if sampler in PROCESSING:
        return "greedy", sampler
    return (sampler, "masked") if params.min_tokens else (sampler,)


def _power_of_two(number: int) -> int:
    return 1 << (max(1, number) - 1).bit_length()
