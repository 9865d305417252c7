"""What an engine's own programs passed from layer to layer, against both references.

Each token of each pass that an engine made is judged behind each layer, by its error over the
noise of the faithful reference at the same token. A layer that is wrong shows from its own output
on, so the first layer with a wrong token is where something goes wrong, and the first pass of it
says when.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .gates import HALF_ULP32, Family, Mode
from .metrics import DEVIATIONS, independent
from .served import OF_ROW, POOLED


class StreamErrors:
    """Mean squares [layer + 1, tok] over all passes of a run: errors, and noise. NaN where nothing
    was compared. `tokens` says what each token is.
    """

    def __init__(self, tokens: Sequence[str], layers: int) -> None:
        self.tokens, self.layers = tokens, layers
        self.error, self.noise = np.full((2, layers + 1, len(tokens)), np.nan)

    def look(
        self, layer: int, tokens: np.ndarray, got: np.ndarray, exact: np.ndarray, noisy: np.ndarray,
        drawn: np.ndarray | float = 0.0,
    ) -> None:  # fmt: skip
        """Compare streams [tok dim] float64 before layer `layer`, those of `tokens` [tok]. `drawn`
        [tok] is the mean square of other draws of the noise, which counts where it is more.
        """
        # No number in float32 is nearer than half a unit; the stream is two of them.
        unit = (2.0 * HALF_ULP32) ** 2 * np.mean(exact**2, 1)
        error = np.mean((got - exact) ** 2, 1)
        if layer == self.layers:
            # The last layer drops tokens that nothing is sampled from. A sampled one that is not
            # finite gives no token, which is found there.
            error = np.where(np.isnan(got).all(1), 0.0, error)
        self.error[layer, tokens] = np.where(np.isfinite(error), error, np.inf)
        self.noise[layer, tokens] = np.maximum(np.mean((noisy - exact) ** 2, 1), drawn) + unit

    def ratios(self, layer: int, tokens: np.ndarray) -> np.ndarray:
        """Error over noise of `tokens` behind a layer; noise counts as at least their mean."""
        noise = self.noise[layer, tokens]
        out: np.ndarray = np.sqrt(self.error[layer, tokens] / np.maximum(noise, noise.mean()))
        return out

    def allowed(self, mode: Mode) -> float:
        """What the ratio of one token may be."""
        return OF_ROW[mode] * Family(self.error.size).deviations

    def over(self, layer: int, tokens: np.ndarray, mode: Mode) -> float:
        """The largest share that one of `tokens` takes of what it is allowed behind a layer."""
        return float(self.ratios(layer, tokens).max(initial=0.0)) / self.allowed(mode)

    @property
    def missing(self) -> int:
        """Tokens that the references did not compute."""
        return int(np.isnan(self.error).any(0).sum())


def judge_streams(errors: StreamErrors, mode: Mode) -> tuple[tuple[float, ...], str]:
    """The verdict on all passes of one run: errors over noises [layer + 1] of all tokens, before
    the layers and behind each, and where something goes wrong first, "" if nothing does.
    """
    sigmas: list[float] = []
    first = ""
    allowed = errors.allowed(mode)
    for layer, (error, noise) in enumerate(zip(errors.error, errors.noise, strict=True)):
        compared = np.flatnonzero(~np.isnan(error))
        power = noise[compared]
        if not power.any():
            sigmas.append(0.0)
            continue
        sigma = float(np.sqrt(error[compared].sum() / power.sum()))
        sigmas.append(sigma)
        if first:
            continue
        limit = POOLED[mode] + DEVIATIONS / independent(power) ** 0.5
        ratios = errors.ratios(layer, compared)
        wrong = np.flatnonzero(ratios > allowed)
        where = "the embedding" if layer == 0 else f"layer.{layer - 1}"
        if len(wrong):
            token = errors.tokens[compared[wrong[0]]]
            first = (
                f"{where}, in {token}: {ratios[wrong[0]]:.3g} of its noise, allowed is "
                f"{allowed:.3g}; {len(wrong)} of {len(error)} tokens"
            )
        elif not sigma <= limit:
            first = f"{where}, over all tokens: sigma {sigma:.3g} > {limit:.3g}"
    return tuple(sigmas), first
