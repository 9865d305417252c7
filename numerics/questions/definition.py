"""Whether what both sides and both references share is right: the definitions of the model, of
narrow weights and of narrow caches.

No comparison of sides can show that. transformers is asked about the model, where it is installed;
narrow numbers are made once more apart from the ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...shared.models import decoder
from ..judging.gates import longest_sum, semantics
from ..judging.metrics import measure
from ..sides.narrow_cache import ApartEntries, RoundingChoice
from ..sides.reference import bound, reference_of
from ..sides.steps import empty_caches, make_owned_steps, owned_rows
from ..sides.subject import HostWeights, Subject, widened_layer
from .logits import TRANSFORMERS, transformers_embedding, transformers_logits

DEFINED = 6
"""Sequences that are looked at."""
SAME = 1e-6
"""Relative error of logits that are of the same numbers in float64, but for scales in float32."""
OFF = 0.51
"""Steps of a narrow number that a weight may be off: rounding to the next, and a little."""

Logits = Mapping[tuple[int, int], np.ndarray]
"""Logits [vocab] by (sequence, position)."""


class SharedDefinition:
    """Gathers `problems` of what is shared. `right` are logits of the exact reference, of the first
    DEFINED `sequences`.
    """

    def __init__(
        self, subject: Subject, weights: HostWeights, sequences: Sequence[np.ndarray], right: Logits
    ) -> None:
        self._subject, self._weights, self._right = subject, weights, right
        self._sequences = sequences[:DEFINED]
        self.problems: list[str] = []

    def ask_transformers(self) -> str:
        """Compare the exact reference with transformers in float32; what is to be said of it."""
        subject = self._subject
        logits, about = transformers_logits(subject, self._sequences, wide=True)
        right, alone = self._right, subject.weights_alone
        if alone.model != subject.model or alone.cache_dtype != subject.cache_dtype:
            # Of tokens and caches that are narrow it knows nothing: `check_narrow` looks at them.
            right = exact_logits(alone, self._sequences)
        places = sorted(self._right)
        got = np.stack([logits[prompt][position] for prompt, position in places])
        wanted = np.stack([right[place] for place in places])
        m = measure(got, wanted, wanted)
        model = subject.model
        gate = replace(semantics("logits", longest_sum(model), model.num_layers), slope=None)
        found = [*gate.complaints(m)]
        if found:
            prompt, position = places[m.worst[0]]
            self.problems.append(
                f"our definition: {TRANSFORMERS} {about['plan']} gives other logits ({found[0]}), "
                f"most at position {position} of sequence {prompt}; what all sides share is wrong, "
                "or theirs is"
            )
        return (
            f"{TRANSFORMERS} {about['plan']} in float32, {len(places)} positions, relative error "
            f"{m.rel_l2:.2g} (limit {gate.rel_l2:.2g})"
        )

    def check_embedding(self) -> None:
        """Compare the embedding with that of transformers in the run dtype, where it is multiplied
        by a number that may be rounded: in float32 it is the same.
        """
        spec, ids = decoder.model_of(self._subject.model), self._sequences[0]
        if spec.embedding_scale == 1.0 or self._subject.dtype == "float32":
            return
        theirs = transformers_embedding(self._subject.plain, ids)
        ours = decoder.embed(bound(exact=False), spec, self._weights.top(), ids).astype(np.float32)
        wrong = int((ours != theirs).any(1).sum())
        if wrong:
            self.problems.append(
                f"our definition: {TRANSFORMERS} gives {wrong} of {len(ids)} tokens another "
                f"embedding in {self._subject.dtype}; what all sides share is wrong, or theirs is"
            )

    def check_narrow(self) -> None:
        """Compare narrow weights and what a narrow cache holds with what is made apart from the
        ops.
        """
        if self._subject.quantization is not None:
            self._check_weights()
        if self._subject.cache_dtype != self._subject.dtype:
            self._check_cache()

    def _check_cache(self) -> None:
        subject = self._subject
        apart = ApartEntries(subject.cache_dtype, self._scales)
        found = exact_logits(subject.plain_cache, self._sequences, (apart,))
        places = sorted(self._right)
        got, right = (np.stack([x[place] for place in places]) for x in (self._right, found))
        m = measure(got, right, right)
        if not m.rel_l2 <= SAME:
            prompt, position = places[m.worst[0]]
            self.problems.append(
                "our definition: keys and values that a cache of "
                f"{subject.cache_dtype} holds, made apart from the ops, give other logits "
                f"(relative error {m.rel_l2:.3g} > {SAME:g}), most at position {position} of "
                f"sequence {prompt}; what all sides share is wrong"
            )

    def _scales(self, layer: int) -> Mapping[str, np.ndarray]:
        """Those of K and V of a layer: as the user gave them, else the checkpoint's, else 1."""
        given = self._subject.kv_cache_scales
        if given is None and self._subject.model.kv_scales is not None:
            return self._weights.layer(layer)
        heads = self._subject.layout.page_shape(layer)[1] // 2
        pairs = zip(("k_scale", "v_scale"), given or (1.0, 1.0), strict=True)
        return {name: np.full(heads, value, np.float32) for name, value in pairs}

    def _check_weights(self) -> None:
        plain = HostWeights(self._subject.plain)
        for layer in range(self._subject.model.num_layers):
            for name, (wide, step) in widened_layer(self._weights, layer).items():
                off = np.abs(wide - plain.layer(layer)[name].astype(np.float64))
                wrong = off > OFF * step
                if wrong.any():
                    self.problems.append(
                        f"our definition: layer.{layer}.{name} in {self._subject.quantization} is "
                        f"off by more than half a step in {wrong.mean():.1%} of the elements"
                    )


def exact_logits(
    subject: Subject, sequences: Sequence[np.ndarray], choices: Sequence[RoundingChoice] = ()
) -> dict[tuple[int, int], np.ndarray]:
    """Logits [vocab] of the exact reference by (sequence, position)."""
    owned = [*make_owned_steps(subject, sequences, 1)]
    steps = [step for step, _ in owned]
    reference = reference_of(subject, exact=True, choices=choices)
    runs = reference.run_steps(HostWeights(subject), empty_caches(subject, steps), steps)
    return {
        place: found[-1][row]
        for (step, owners), found in zip(owned, runs, strict=True)
        for row, place in enumerate(owned_rows(step, owners))
    }
