"""`twinfer numerics rollout`: one side generates, the other computes the same tokens as prompts.

Three questions are asked of the log-probabilities of both. Reinforcement learning draws with one
program and trains with another: how far are the importance ratios of the drawn tokens from 1, and
how heavy is their tail? Does the difference grow with the position? And do both give a text the
same perplexity?
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...shared.errors import ConfigError
from ...shared.sampling_params import SamplingParams
from ..judging.gates import FEWEST, Family, mode_of
from ..judging.metrics import independent, log_softmax, trend
from ..judging.record import Report
from ..judging.served import POOLED
from ..judging.server_metrics import GROWTH
from ..progress import Progress, silent
from ..showing.report import rollout_facts
from ..sides.serving import Answer, Ask, serve
from ..sides.steps import default_prompts, make_owned_steps
from ..sides.subject import Subject, Target, name_sides
from .model import Comparison

TOKENS = 10_000
JUDGED, SEQUENCES = 256, 2
"""Tokens of a sequence, and sequences, whose noise the references say: they run on the host."""
FIRST = 16
"""Tokens of a prompt."""
QUANTILES = (0.0001, 0.001, 0.01, 0.5, 0.99, 0.999, 0.9999)
CLIPPED = 0.8, 1.2
"""Importance ratios outside of these are clipped by common policy losses."""
UNIT = 2.0**-23
"""Nats that float32 log-probabilities are apart."""
QUESTIONS = 3


Figures = dict[str, Any]


@dataclass(slots=True)
class RolloutReport(Report):
    """The answers, `figures` by name.

    `sigma` is the difference of both sides over what rounding makes of it, at tokens whose noise
    the references computed, and `growth` that of its logarithm with each doubling of the position,
    at the same tokens; `limit` and `growth_limit` are what is allowed.

    `ratios` are importance ratios exp(b - a) of the tokens that side a drew. Their `mean` has the
    standard error `mean_error`; `effective` is the share of tokens that weights of these ratios are
    worth, `kl` the divergence of b from a in nats by the estimator ratio - 1 - log(ratio).

    `drift` are differences b - a in nats of the tokens at positions from `first` to `last`.

    `perplexity` is that of both sides on a text, None without one; `difference` of their mean
    log-probabilities in nats a token, b - a, with its standard `error`.
    """

    kind = "rollout"
    sides: tuple[str, ...]
    figures: Figures

    @property
    def has_compared(self) -> bool:
        return bool(self.figures["ratios"]["tokens"])

    def body(self) -> dict[str, Any]:
        return {"sides": self.sides, **self.figures}

    def cases(self) -> dict[tuple[str, str], list[str]]:
        return {("rollout", "log-probabilities"): self.problems}


def check_rollout(
    subject: Subject, targets: Sequence[Target], *, tokens: int = TOKENS,
    text: np.ndarray | None = None, progress: Progress = silent,
) -> RolloutReport:  # fmt: skip
    """Let the first target draw `tokens` tokens at temperature 1 and the second compute them as
    prompts, and both a `text` [tok].

    Raises ConfigError, ModelError, BackendUnavailable.
    """
    longest = subject.max_model_len - 1
    if tokens < 1:
        raise ConfigError(f"rollout_tokens: got {tokens}, allowed is at least 1")
    if text is not None and len(text) < 2:
        raise ConfigError(f"text: got {len(text)} tokens, allowed is at least 2")
    if longest <= FIRST:
        raise ConfigError(
            f"max_model_len: got {subject.max_model_len}, allowed is more than {FIRST + 1}"
        )
    started = time.perf_counter()
    names = tuple(name_sides(targets))
    drawn = serve(subject, targets[0], _asks(subject, tokens), progress=progress, streams=False)
    sequences = [answer.sequence for answer in drawn.answers]
    windows = [] if text is None else _windows(text, longest)
    computed = serve(
        subject, targets[1], [_scored(ids) for ids in (*sequences, *windows)], progress=progress,
        streams=False,
    )  # fmt: skip
    a = [_drawn(answer) for answer in drawn.answers]
    b = [_of_prompt(answer) for answer in computed.answers]
    positions = np.concatenate([FIRST + np.arange(len(x)) for x in a])
    differences = [y[FIRST - 1 :] - x for x, y in zip(a, b, strict=False)]
    delta = np.concatenate(differences)
    progress("the noise of the references")
    noise = _Noise(subject, [ids[: JUDGED + 1] for ids in sequences[:SEQUENCES]])
    noise.run_owned(make_owned_steps(subject, noise.sequences, 1), progress)
    known = _known(differences, noise.found)
    sigma, limit = _sigma(subject.dtype, *known[1:])
    growth, growth_limit = _growth(*known)
    figures: Figures = {
        "growth": growth, "growth_limit": growth_limit, "sigma": sigma, "limit": limit,
        "ratios": _ratios(delta), "drift": list(_reaches(positions, delta)), "perplexity": None,
    }  # fmt: skip
    if windows:
        of_text = serve(
            subject, targets[0], [_scored(ids) for ids in windows], progress=progress,
            streams=False,
        )  # fmt: skip
        of_a = [_of_prompt(answer) for answer in of_text.answers]
        of_b = b[len(sequences) :]
        figures["perplexity"] = _perplexity(np.concatenate(of_a), np.concatenate(of_b))
    report = RolloutReport(names, figures)
    report.problems += _problems(names, figures, float(np.mean(delta**2)))
    if not np.isfinite(delta).all():
        report.problems.append("a log-probability is not finite")
    report.environment = {
        "model": subject.name, "dtype": subject.dtype, "tokens": len(delta), "seed": subject.seed,
        "sides": dict(zip(names, (drawn.environment, computed.environment), strict=True)),
    }  # fmt: skip
    report.seconds = time.perf_counter() - started
    return report


# --- what is served
# --------------------------------------------------------------------------------------------------


def _asks(subject: Subject, tokens: int) -> list[Ask]:
    """Requests for so many tokens, each as long as a sequence may be."""
    room = subject.max_model_len - 1 - FIRST
    lengths = [min(room, tokens - start) for start in range(0, tokens, room)]
    words = np.concatenate(default_prompts(subject, subject.seed))
    starts = [7 * i % (len(words) - FIRST) for i in range(len(lengths))]
    return [
        Ask(
            words[start : start + FIRST],
            SamplingParams(
                temperature=1.0, seed=1000 + i, max_tokens=length, ignore_eos=True, logprobs=1
            ),
        )
        for i, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]


def _scored(ids: np.ndarray) -> Ask:
    """A request for the log-probabilities of a sequence."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    return Ask(ids, params)


def _windows(text: np.ndarray, longest: int) -> list[np.ndarray]:
    """A text in pieces that a request may have; the token before a piece is its first."""
    starts = range(0, len(text) - 1, longest - 1)
    return [text[start : start + longest] for start in starts]


def _drawn(answer: Answer) -> np.ndarray:
    """Log-probabilities [tok] of the tokens that were drawn."""
    pairs = zip(answer.tokens, answer.logprobs, strict=True)
    return np.asarray([top[token].logprob for token, top in pairs])


def _of_prompt(answer: Answer) -> np.ndarray:
    """Log-probabilities [tok - 1] of the tokens of a prompt behind its first."""
    tops = answer.prompt_logprobs or []
    pairs = zip(answer.ask.prompt[1:].tolist(), tops[1:], strict=True)
    return np.asarray([math.nan if top is None else top[token].logprob for token, top in pairs])


class _Noise(Comparison):
    """What rounding makes of the log-probability of each token of sequences."""

    def __init__(self, subject: Subject, sequences: Sequence[np.ndarray]) -> None:
        super().__init__(subject, {}, "P", layers=(), taps=())
        self.found = [np.full(len(ids) - 1, np.nan) for ids in sequences]
        self.sequences = sequences

    def _logits(self, exact: np.ndarray, faithful: np.ndarray) -> None:
        for row, (sequence, position) in enumerate(self.places()):
            if position < len(self.found[sequence]):
                token = self.sequences[sequence][position + 1]
                right, noisy = (log_softmax(x[row])[token] for x in (exact, faithful))
                self.found[sequence][position] = noisy - right


# --- what they say
# --------------------------------------------------------------------------------------------------


def _known(
    differences: Sequence[np.ndarray], noises: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(positions, differences, noise) of the tokens that were drawn and whose noise is known."""
    found = []
    for delta, noise in zip(differences, noises, strict=False):
        of_drawn = noise[FIRST - 1 :][: len(delta)]
        found.append((FIRST + np.arange(len(of_drawn)), delta[: len(of_drawn)], of_drawn))
    positions, delta, noise = (np.concatenate(parts) for parts in zip(*found, strict=True))
    # No log-probability in float32 is nearer than about an ulp.
    return positions, delta, np.sqrt(noise**2 + UNIT**2)


def _sigma(dtype: str, delta: np.ndarray, noise: np.ndarray) -> tuple[float, float]:
    """(the difference over that of two noises, what is allowed)."""
    power = noise**2
    sigma = float(np.sqrt((delta**2).sum() / (2.0 * power.sum())))
    spread = Family(QUESTIONS).spread(max(independent(power), FEWEST))
    return sigma, POOLED[mode_of(dtype)] * spread


def _ratios(delta: np.ndarray) -> Figures:
    ratio = np.exp(delta)
    low, high = CLIPPED
    return {
        "tokens": len(ratio),
        "mean": float(ratio.mean()),
        "mean_error": float(ratio.std() / len(ratio) ** 0.5),
        "quantiles": {f"{q:g}": float(np.quantile(ratio, q)) for q in QUANTILES},
        "smallest": float(ratio.min()),
        "largest": float(ratio.max()),
        "clipped": float(((ratio < low) | (ratio > high)).mean()),
        "effective": float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
        "kl": float((ratio - 1.0 - delta).mean()),
    }


def _reaches(positions: np.ndarray, delta: np.ndarray) -> Iterator[Figures]:
    """Differences by position: the limits of each part are twice those of the one before."""
    first = FIRST
    while first <= positions.max():
        here = delta[(positions >= first) & (positions < 2 * first)]
        last = min(2 * first - 1, int(positions.max()))
        yield {
            "first": first, "last": last, "tokens": len(here), "mean": float(here.mean()),
            "rms": float(np.sqrt((here**2).mean())), "largest": float(np.abs(here).max()),
        }  # fmt: skip
        first *= 2


def _growth(positions: np.ndarray, delta: np.ndarray, noise: np.ndarray) -> tuple[float, float]:
    """(growth of the logarithm of difference over noise with each doubling of the position, what
    is allowed), by regression over parts of equally many tokens. (0, 0) if all bits are equal, or
    the positions span too little to say.

    The noise of a token depends on how likely it is, and so on the position. Near the start two
    sides share most of their roundings, and part from there on: only what is more than two
    independent roundings counts.
    """
    x = np.log2(positions.astype(np.float64))
    parts = np.array_split(np.argsort(x, kind="stable"), min(40, len(x) // 25))
    if len(parts) < 4 or np.ptp(x) < 1.0:
        return 0.0, 0.0
    of_delta, of_noise = (
        np.asarray([(values[part] ** 2).mean() for part in parts]) for values in (delta, noise)
    )
    if not (of_delta > 0).all():
        return 0.0, 0.0
    centre = np.asarray([x[part].mean() for part in parts])
    y = np.log(np.maximum(of_delta / (2.0 * of_noise), 1.0)) / 2.0
    slope, error = trend(centre, y)
    return slope, GROWTH + Family(QUESTIONS).spread(1, len(parts) - 2) * error


def _perplexity(a: np.ndarray, b: np.ndarray) -> Figures:
    delta = b - a
    return {
        "tokens": len(delta), "a": float(np.exp(-a.mean())), "b": float(np.exp(-b.mean())),
        "difference": float(delta.mean()), "error": float(delta.std() / len(delta) ** 0.5),
    }  # fmt: skip


def _problems(names: Sequence[str], found: Figures, power: float) -> Iterator[str]:
    """What chance and rounding do not explain. `power`: mean square of the differences."""
    pair, text = f"{names[1]} beside {names[0]}", found["perplexity"]
    if not found["sigma"] <= found["limit"]:
        yield (
            f"{pair}: log-probabilities differ by {found['sigma']:.3g} of what two roundings "
            f"make, allowed is {found['limit']:.3g}"
        )
    if not found["growth"] <= found["growth_limit"]:
        yield (
            f"{pair}: the difference grows with the position by {found['growth']:.3g} of "
            f"its noise a doubling, allowed is {found['growth_limit']:.3g}"
        )
    if text is not None:
        # Independent errors of this power shift a mean by half of it, on each side.
        explained = power + Family(QUESTIONS).deviations * text["error"]
        if not abs(text["difference"]) <= explained:
            yield (
                f"{pair}: the text is {text['difference']:.3g} nats a token more likely, rounding "
                f"explains {explained:.2g}"
            )


# --- the view
# --------------------------------------------------------------------------------------------------


def render(report: RolloutReport) -> str:
    """The verdict and the three tables in few lines."""
    e, (a, b) = report.environment, report.sides
    lines = [
        f"{report.word}: {e['model']} in {e['dtype']}, {report.seconds:.1f} s",
        f"{a} drew {report.figures['ratios']['tokens']} tokens, {b} computed them",
        *(f"{name}: {figures}" for name, figures in rollout_facts(report.figures)),
    ]
    return "\n".join([*lines, *report.problems])
