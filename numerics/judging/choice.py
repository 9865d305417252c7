"""What a request's sampling parameters make of logits, in float64: the token that it should get.

By the numbers that the user gave: what the engine encodes them as is part of what is judged. The
sampler computes in fixed point, so a choice that its rounding decides is a tie.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from ...ops.cases.plain_sampling import draw, gumbel, kept, random_bits
from ...shared.sampling_params import SamplingParams

UNIT = 2.0**-16
"""The sampler's fixed point, of scores and of distances in log2 units."""
LARGEST = 8192.0
"""Logits are kept within it."""


def _rounding(value: float) -> float:
    """How far a number may be off in the sampler's fixed point."""
    return 0.0 if (value / UNIT).is_integer() else UNIT / 2


class Choice:
    """The sampler's choice with a seed of 64 bits behind `prompt` [tok] and `output` [tok], the
    tokens so far. Forms and the model's own stop ids mask nothing here.
    """

    def __init__(
        self, params: SamplingParams, seed: int, prompt: np.ndarray, output: list[int]
    ) -> None:
        self.params, self.seed, self.output = params, seed, output
        self.seen = np.unique(np.concatenate([prompt, np.asarray(output, np.int32)]))
        self.counts = Counter(output)
        self.position = len(prompt) + len(output)

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """The tokens [row] of logits [row vocab], -1 of a row that is not finite."""
        return np.asarray([self._choose(row)[0] for row in logits], np.int32)

    def takes(self, logits: np.ndarray, token: int) -> np.ndarray:
        """Whether rounding may make it `token`, for logits [row vocab]: [row] bool."""
        return np.asarray([self._choose(row)[1][token] for row in logits], bool)

    def _choose(self, logits: np.ndarray) -> tuple[int, np.ndarray]:
        """The token of one row [vocab], and which it may be, [vocab] bool."""
        if not np.isfinite(logits).all():
            return -1, np.zeros(len(logits), bool)
        params, words = self.params, np.arange(len(logits))
        scores, error = self._scores(logits)
        gap = scores.max() - scores
        if params.temperature == 0.0:
            # Of equal scores the largest logit, of equal logits the first.
            first = int(np.lexsort((words, -logits.astype(np.float64), gap))[0])
            return first, (gap <= 2 * error) | (words == first)
        scale = np.log2(np.e) / params.temperature
        far = gap * scale
        # Scores, the product with the scale, and the limit of min-p are rounded; float32 has the
        # scale to 2^-24 and the product too.
        error = 2 * error * scale + UNIT + 64.0 * 2.0**-23
        sure = maybe = np.isfinite(far)
        if params.min_p > 0.0 or params.top_k > 0 or params.top_p < 1.0:
            limit = -np.log2(params.min_p) if params.min_p > 0.0 else np.inf
            sure, maybe = kept(
                far, limit, max(params.top_k, 0), max(params.top_p, UNIT), error, UNIT / 2
            )
        noise = gumbel(random_bits(words, self.position, self.seed))
        return draw(far, noise, sure, maybe, error)

    def _scores(self, logits: np.ndarray) -> tuple[np.ndarray, float]:
        """Logits [vocab] after penalties, bias and masks, in nats [vocab], minus infinity of a
        masked token; and how far rounding may put any of them off.
        """
        params = self.params
        scores, error = logits.astype(np.float64), UNIT / 2
        if params.repetition_penalty != 1.0:
            of_seen = scores[self.seen]
            scores[self.seen] = np.where(
                of_seen > 0.0,
                of_seen / params.repetition_penalty,
                of_seen * params.repetition_penalty,
            )
            error += 2.0**-23 * float(np.abs(scores).max())
        scores = np.clip(scores, -LARGEST, LARGEST)
        for token, count in self.counts.items():
            scores[token] -= params.frequency_penalty * count + params.presence_penalty
        for token, bias in params.logit_bias.items():
            scores[token] += bias
        most = max(self.counts.values(), default=0)
        error += most * _rounding(params.frequency_penalty) + _rounding(params.presence_penalty)
        error += max(map(_rounding, params.logit_bias.values()), default=0.0)
        return np.where(self._allowed(len(scores)), scores, -np.inf), error

    def _allowed(self, vocab: int) -> np.ndarray:
        """The tokens that may follow, [vocab] bool."""
        params, output = self.params, self.output
        allowed = np.full(vocab, params.allowed_token_ids is None)
        allowed[list(params.allowed_token_ids or ())] = True
        allowed[list(params.banned_token_ids)] = False
        if len(output) < params.min_tokens:
            allowed[list(params.stop_token_ids)] = False
        for *start, last in params.banned_sequences:
            if output[len(output) - len(start) :] == start:
                allowed[last] = False
        return allowed
