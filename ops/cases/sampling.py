"""Cases of the sampler: integers, judged bit for bit, but for the log-probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ..reference import sampling
from ..testing import Arguments, Case, Testing, judged_by
from . import plain_sampling
from .generators import generator, strided

# Written apart from the reference, which they judge: see `ops.reference.sampling`.
ONE, FAR, MASKED, MAX_LOGIT, MAX_COUNT, TOP = 65536, 1 << 22, -(2**31) + 1, 8192, 4096, 20
LOG2_E = 1.4426950408889634
UNDECIDED = -2
"""What the truth of a row is where rounding decides. Cases have no such rows."""


def _logits(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Rows of several spreads: flat, sharp, tied at the top, huge, and one with ties of the
    largest.
    """
    x = rng.normal(size=(rows, vocab)) * rng.choice([0.01, 1.0, 3.0, 8.0, 100.0], (rows, 1))
    x[0] = 1.0
    x[1, rng.integers(0, vocab, 5)] = x[1].max() + 2.0
    x[2] *= 1e6
    x[3] = np.round(x[3])  # ties everywhere
    return np.asarray(x.astype(np.float32))


def _big_logits() -> Arguments:
    return {"logits": _logits(generator("bench logits"), 64, 151936)}


# --- greedy_sample and quantize_logits
# -------------------------------------------------------------------------------


def _greedy_cases(dtype: str) -> Iterator[Case]:
    rng = generator("greedy_sample")
    x = _logits(rng, 8, 133)
    x[4, -1] = x[4].max() + 1.0
    # above its neighbours by one unit
    x[5, [7, 132]] = np.nextafter(np.float32(9e3), np.float32(1e4))
    x[5, 3] = 9e3
    x[7] = -1.0
    x[7, [2, 5]] = -0.0, 0.0  # equal
    x[6] = -3e38
    x[6, 99] = -1e30
    yield Case("ties", {"logits": x})
    yield Case("strided", {"logits": strided(x)})
    yield Case("not finite", {"logits": _with_not_finite(x)})
    yield Case("64 rows of 151936", _big_logits, ("bench",))


def _with_not_finite(logits: np.ndarray, first: int = 0) -> np.ndarray:
    """A copy with one entry that is no number in each of five rows from `first` on: the last row
    all of them.
    """
    x = logits.copy()
    column = x.shape[1] // 2
    for row, value in enumerate((np.nan, np.inf, -np.inf, -np.nan), first):
        x[row, column] = value
    x[first + 4] = np.nan
    return x


def _without_not_finite(logits: np.ndarray) -> np.ndarray:
    """A copy in which what is no number is small: what a sampler sees that takes it as masked."""
    return np.where(np.isfinite(logits), logits, np.float32(-3e38))


judged_by(
    "greedy_sample",
    Testing(
        _greedy_cases,
        dtypes=("float32",),
        bitwise=True,
        rows=("logits",),
        mutants={
            "ties to the higher id": lambda xp, logits: (
                logits.shape[1] - 1 - np.argmax(logits[:, ::-1], axis=-1)
            ).astype(np.int32),
            "off by one": lambda xp, logits: (np.argmax(logits, axis=-1) + 1).astype(np.int32),
            "last 64 words skipped": lambda xp, logits: np.argmax(logits[:, :-64], axis=-1).astype(
                np.int32
            ),
            "bfloat16": lambda xp, logits: np.argmax(_to_bfloat16(logits), axis=-1).astype(
                np.int32
            ),
            "Q16 only": lambda xp, logits: np.argmax(
                sampling.quantize_logits(xp, logits), axis=-1
            ).astype(np.int32),
            "magnitudes": lambda xp, logits: np.argmax(np.abs(logits), axis=-1).astype(np.int32),
            "not finite as masked": lambda xp, logits: np.argmax(
                _without_not_finite(logits), axis=-1
            ).astype(np.int32),
            "minus infinity as masked": lambda xp, logits: sampling.greedy_sample(
                xp, np.where(logits == -np.inf, np.float32(-3e38), logits)
            ),
        },
    ),
)


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    return (x.view(np.int32) & -65536).view(np.float32)


def _quantize_cases(dtype: str) -> Iterator[Case]:
    rng = generator("quantize_logits")
    x = _logits(rng, 8, 133)
    x[4] = (rng.integers(-200, 200, 133) + 0.5) / ONE  # halves: ties go to the even neighbour
    x[5] = np.linspace(-9000, 9000, 133)
    x[6, :4] = np.nan, np.inf, -np.inf, -0.0
    x[7] *= np.float32(1e-20)
    yield Case("hostile", {"logits": x})
    yield Case("64 rows of 151936", _big_logits, ("bench",))


def _wrong_quantize(xp: Any, logits: Any, fault: str) -> Any:
    limit = 4096.0 if fault == "limit 4096" else 8192.0
    scaled = np.clip(logits.astype(np.float64), -limit, limit) * (
        ONE // 2 if fault == "Q15" else ONE
    )
    if fault == "cut":
        scores = np.trunc(scaled)
    elif fault == "ties upwards":
        scores = np.floor(scaled + 0.5)
    else:
        scores = np.rint(scaled)
    nan = 0 if fault == "NaN as 0" else MASKED
    scores = np.where(np.isnan(logits), nan, scores)
    if fault == "infinity masked":
        scores = np.where(np.isinf(logits), MASKED, scores)
    return scores.astype(np.int32)


judged_by(
    "quantize_logits",
    Testing(
        _quantize_cases,
        dtypes=("float32",),
        bitwise=True,
        rows=("logits",),
        mutants={
            fault: partial(_wrong_quantize, fault=fault)
            for fault in ("cut", "ties upwards", "Q15", "limit 4096", "NaN as 0", "infinity masked")
        },
        truth=partial(_wrong_quantize, fault=""),
    ),
)


# --- penalties
# --------------------------------------------------------------------------------------------------


def _penalty_arguments(
    rng: np.random.Generator, rows: int, vocab: int, length: int, slots: int
) -> Arguments:
    history = rng.integers(0, vocab, (rows, length)).astype(np.int32)
    history[:, length // 2 :] = rng.integers(0, max(2, vocab // 4), (rows, length - length // 2))
    history[1::2, -5:] = -1
    history[-1] = -1  # no history at all
    last = rng.integers(0, vocab, rows).astype(np.int32)
    last[np.arange(rows) % 3 != 1] = -1
    turned = np.roll(np.arange(rows), 3)  # entries in another order than the rows
    history_row = np.argsort(turned).astype(np.int32)
    history_row[-1 if rows < 6 else 5] = -1
    repetition = rng.uniform(0.5, 2.0, rows).astype(np.float32)
    presence, frequency = (
        np.rint(rng.uniform(-2, 2, rows) * ONE).astype(np.int32) for _ in range(2)
    )
    repetition[2], presence[2], frequency[2] = 1.0, 0, 0
    bias_ids = np.stack([rng.permutation(vocab)[:slots] for _ in range(rows)]).astype(np.int32)
    bias_ids[:, -2:] = -1
    mask = np.full((rows, -(-vocab // 32)), -1, np.int32)
    mask[3:] = rng.integers(-(2**31), 2**31, mask[3:].shape)
    logits = (rng.normal(size=(rows, vocab)) * 5).astype(np.float32)
    logits[0, :4] = np.nan, np.inf, -np.inf, -0.0
    return {
        "logits": logits, "history": history[turned], "history_row": history_row,
        "last": last,
        "prompt_len": rng.integers(0, length // 2, rows).astype(np.int32),
        "presence": presence, "frequency": frequency, "repetition": repetition,
        "repetition_inverse": (1 / repetition.astype(np.float64)).astype(np.float32),
        "bias_ids": bias_ids,
        "bias": np.rint(rng.uniform(-100, 100, bias_ids.shape) * ONE).astype(np.int32),
        "mask": mask,
    }  # fmt: skip


def _penalty_cases(dtype: str) -> Iterator[Case]:
    rng = generator("penalties")
    yield Case("odd vocabulary", _penalty_arguments(rng, 8, 203, 50, 7))
    many = _penalty_arguments(rng, 4, 40, 9000, 3)  # counts past their limit
    many["history"][many["history_row"][0]] = np.where(np.arange(9000) < 8000, 5, 6)
    many["prompt_len"][:], many["frequency"][:] = 0, 7
    many["mask"][:] = -1
    yield Case("one token 8000 times", many)
    yield Case(
        "64 rows of 151936",
        partial(_penalty_arguments, generator("bench penalties"), 64, 151936, 4096, 304),
        ("bench",),
    )


class _Penalties:
    """penalties with one thing wrong."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __call__(self, xp: Any, **a: Any) -> Any:
        change: dict[str, Callable[[], Any]] = {
            "prompt counted": lambda: {"prompt_len": a["prompt_len"] * 0},
            "prompt one shorter": lambda: {"prompt_len": a["prompt_len"] - 1},
            "frequency ignored": lambda: {"frequency": a["frequency"] * 0},
            "presence ignored": lambda: {"presence": a["presence"] * 0},
            "presence and frequency swapped": lambda: {
                "presence": a["frequency"],
                "frequency": a["presence"],
            },
            "repetition multiplies positives": lambda: {"repetition_inverse": a["repetition"]},
            "repetition divides negatives": lambda: {"repetition": a["repetition_inverse"]},
            "repetition of the output only": lambda: {
                "history": _output(a),
                "history_row": _each(a["last"]),
                "last": a["last"] * 0 - 1,
            },
            "mask bits reversed": lambda: {"mask": _reversed_bits(a["mask"])},
            "mask words of the row before": lambda: {"mask": np.roll(a["mask"], 1, axis=0)},
            "mask ignored": lambda: {"mask": a["mask"] * 0 - 1},
            "bias ignored": lambda: {"bias": a["bias"] * 0},
            "unused history is token 0": lambda: {"history": np.maximum(a["history"], 0)},
            "history of another row": lambda: {
                "history_row": np.where(a["history_row"] < 0, -1, _each(a["history_row"]))
            },
            "history of a row without": lambda: {"history_row": np.maximum(a["history_row"], 0)},
            "last token ignored": lambda: {"last": a["last"] * 0 - 1},
            "unused bias is token 0": lambda: {"bias_ids": np.maximum(a["bias_ids"], 0)},
        }
        if self.fault in change:
            return sampling.penalties(xp, **{**a, **change[self.fault]()})
        scores = sampling.penalties(xp, **a)
        open_, output = scores != MASKED, xp.count_tokens(_output(a), scores.shape[1])
        if self.fault == "presence of unseen tokens":
            return np.where(open_ & (output == 0), scores - a["presence"][:, None], scores)
        if self.fault == "counts without limit":
            over = np.maximum(output - MAX_COUNT, 0)
            return np.where(open_, scores - a["frequency"][:, None] * over, scores)
        if self.fault != "bias penalised too":
            return scores
        seen = xp.count_tokens(_history(a), scores.shape[1]) > 0
        bias = xp.add_at(np.zeros_like(scores), a["bias_ids"], a["bias"])
        return np.where(open_ & seen, scores + (bias * 0.1).astype(np.int32), scores)


def _plain_penalties(xp: Any, **a: Any) -> np.ndarray:
    """penalties row by row from its description, [row vocab] int32."""
    scores = np.empty(a["logits"].shape, np.int32)
    for row, logits in enumerate(a["logits"]):
        prompt, kept = int(a["prompt_len"][row]), int(a["history_row"][row])
        history = [] if kept < 0 else a["history"][kept].tolist()
        history += [-1] * (prompt - len(history)) + [int(a["last"][row])]
        counts = Counter(token for token in history[prompt:] if token >= 0)
        seen = {token for token in history if token >= 0}
        bias = Counter[int]()
        for token, added in zip(a["bias_ids"][row].tolist(), a["bias"][row].tolist(), strict=True):
            bias[token] += added
        tokens = np.arange(len(logits))
        was_seen = np.isin(tokens, list(seen))
        factor = np.where(logits > 0, a["repetition_inverse"][row], a["repetition"][row]).astype(
            np.float32
        )
        scaled = logits * (np.where(was_seen, factor, np.float32(1.0)) * np.float32(ONE))
        limit = MAX_LOGIT * ONE
        score = np.rint(np.clip(np.where(np.isnan(scaled), 0.0, scaled), -limit, limit))
        score = score.astype(np.int64)
        for token, count in counts.items():
            score[token] -= int(a["frequency"][row]) * min(count, MAX_COUNT)
            score[token] -= int(a["presence"][row])
        for token, added in bias.items():
            if token >= 0:
                score[token] += added
        open_ = (a["mask"][row][tokens // 32] >> (tokens % 32)) & 1
        scores[row] = np.where(np.isnan(logits) | (open_ == 0), MASKED, score)
    return scores


def _each(like: np.ndarray) -> np.ndarray:
    return np.arange(len(like), dtype=np.int32)


def _history(a: Arguments) -> np.ndarray:
    """The history of each row, with the last token."""
    row = a["history_row"][:, None]
    own = np.where(row < 0, -1, a["history"][a["history_row"]])
    return np.concatenate([own, a["last"][:, None]], axis=1)


def _output(a: Arguments) -> np.ndarray:
    history = _history(a)
    place = np.arange(history.shape[1])[None, :]
    return np.where(place >= a["prompt_len"][:, None], history, -1)


def _reversed_bits(mask: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), axis=1, bitorder="little")
    turned = bits.reshape(len(mask), -1, 32)[..., ::-1].reshape(len(mask), -1)
    return np.packbits(turned, axis=1, bitorder="little").view(np.int32)


PENALTY_FAULTS = (
    *(
        "prompt counted",
        "prompt one shorter",
        "frequency ignored",
        "presence ignored",
        "presence and frequency swapped",
    ),
    *(
        "repetition multiplies positives",
        "repetition divides negatives",
        "repetition of the output only",
    ),
    *("mask bits reversed", "mask words of the row before", "mask ignored", "bias ignored"),
    *(
        "unused history is token 0",
        "history of another row",
        "history of a row without",
        "last token ignored",
        "unused bias is token 0",
        "presence of unseen tokens",
        "counts without limit",
    ),
    "bias penalised too",
)

judged_by(
    "penalties",
    Testing(
        _penalty_cases,
        dtypes=("float32",),
        bitwise=True,
        rows=(
            *(
                "logits",
                "history_row",
                "last",
                "prompt_len",
                "presence",
                "frequency",
                "repetition",
                "repetition_inverse",
            ),
            *("bias_ids", "bias", "mask"),
        ),
        mutants={fault: _Penalties(fault) for fault in PENALTY_FAULTS},
        truth=_plain_penalties,
    ),
)


# --- sample
# --------------------------------------------------------------------------------------------------


def _sample_arguments(rng: np.random.Generator, rows: int, vocab: int, filtered: bool) -> Arguments:
    logits = _logits(rng, rows, vocab)
    logits[7, 10:13] = 8500.0, 9000.0, 8600.0  # equal scores: the logits decide in a greedy row
    logits = _with_not_finite(logits, 11)  # the last of them is a greedy row
    scores = sampling.quantize_logits(_numpy(), logits)
    scores[4, : vocab // 2] = MASKED
    temperature = rng.choice([0.3, 0.7, 1.0, 2.0], rows)
    top_k, top_p = rng.choice([0, 1, 2, 3, 20], rows), rng.choice([0.05, 0.3, 0.6, 0.9, 1.0], rows)
    min_p = rng.choice([0.0, 0.01, 0.1, 0.3], rows)
    # Rows with one filter alone, so that no other hides it.
    third = np.arange(rows) % 6
    top_k = np.where((third == 0) | (third == 1), 0, top_k)
    top_p = np.where((third == 1) | (third == 2), 1.0, top_p)
    min_p = np.where((third == 0) | (third == 2), 0.0, min_p)
    far = np.minimum(FAR, np.rint(-np.log2(np.maximum(min_p, 2.0**-64)) * ONE))
    greedy = (np.arange(rows) % 8 == 7) | (np.arange(rows) == 1)
    return {
        "logits": logits, "scores": scores,
        "position": rng.integers(0, 10**6, rows).astype(np.int32),
        "seed_lo": rng.integers(-(2**31), 2**31, rows).astype(np.int32),
        "seed_hi": rng.integers(-(2**31), 2**31, rows).astype(np.int32),
        "greedy": greedy.astype(np.int32),
        "scale": (LOG2_E / temperature).astype(np.float32), "top_k": top_k.astype(np.int32),
        "top_p": np.maximum(1, np.rint(top_p * ONE)).astype(np.int32),
        "min_p": far.astype(np.int32),
        "filtered": filtered,
    }  # fmt: skip


def _numpy() -> Any:
    from ..namespaces import namespace

    return namespace("numpy")


def _sample_cases(dtype: str) -> Iterator[Case]:
    rng = generator("sample")
    many = _sample_arguments(rng, 384, 131, True)
    yield Case("384 rows, filters", many)
    yield Case("384 rows, filters off", many | {"filtered": False})
    yield Case("top-p at the boundary", _boundary())
    yield Case("262208 words of nearly one weight", _many_words())
    yield Case(
        "64 rows of 151936",
        partial(_sample_arguments, generator("bench sample"), 64, 151936, True),
        ("bench",),
    )


def _boundary(rows: int = 64) -> Arguments:
    """The best token holds exactly the half that top-p asks for: 2^26 - 1 of it and of 2 (2^25 -
    1) + 1 beside it.
    """
    scores = np.array([[-ONE, 0, -ONE, -25 * ONE, MASKED]], np.int32).repeat(rows, axis=0)
    half = {"top_k": 0, "top_p": ONE // 2, "min_p": FAR, "greedy": 0, "seed_lo": 7, "seed_hi": 0}
    return {
        "logits": scores.astype(np.float32) / ONE, "scores": scores,
        "position": np.arange(rows, dtype=np.int32),
        "scale": np.ones(rows, np.float32), "filtered": True,
        **{name: np.full(rows, value, np.int32) for name, value in half.items()},
    }  # fmt: skip


def _many_words(rows: int = 3, vocab: int = 262_208) -> Arguments:
    """Weights of 26 bits overflow the sums. The words lie at four distances that hardly differ, so
    that each weighs as much as it can, and top-p takes the nearest of them.
    """
    rng = generator("sample many words")
    scores = (-2 * rng.integers(0, 4, (rows, vocab))).astype(np.int32)
    top_p = np.rint(np.linspace(0.3, 0.7, rows) * ONE).astype(np.int32)
    same = {"top_k": 0, "min_p": FAR, "greedy": 0, "seed_lo": 11, "seed_hi": 5}
    return {
        "logits": scores.astype(np.float32) / ONE, "scores": scores,
        "position": np.arange(rows, dtype=np.int32),
        "scale": np.ones(rows, np.float32), "top_p": top_p, "filtered": True,
        **{name: np.full(rows, value, np.int32) for name, value in same.items()},
    }  # fmt: skip


def _plain_sample(
    xp: Any,
    logits: np.ndarray,
    scores: np.ndarray,
    position: np.ndarray,
    seed_lo: np.ndarray,
    seed_hi: np.ndarray,
    greedy: np.ndarray,
    scale: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    filtered: bool,
) -> np.ndarray:
    """sample row by row from its description, [row] int32: filters by sorted distances and their
    cumulated weights, noise in float64. The distances alone are rounded as the op says.
    """
    tokens = np.full(len(logits), -1, np.int32)
    words = np.arange(logits.shape[1])
    for row in np.flatnonzero(np.isfinite(logits).all(axis=1)):
        gap = scores[row].max() - scores[row].astype(np.int64)
        if greedy[row] > 0:
            tokens[row] = np.lexsort((words, -logits[row].astype(np.float64), gap))[0]
            continue
        # A product of two float32 is exact in float64, so that this rounds it once.
        product = np.minimum(gap, 1 << 24) * np.float64(scale[row])
        far = np.rint(np.minimum(product.astype(np.float32), FAR)).astype(np.float64) / ONE
        far = np.where(scores[row] == MASKED, np.inf, far)
        sure = maybe = np.isfinite(far)
        if filtered:
            sure, maybe = plain_sampling.kept(
                far, min_p[row] / ONE, int(top_k[row]), top_p[row] / ONE
            )
        seed = (int(seed_hi[row]) << 32) + (int(seed_lo[row]) & 0xFFFFFFFF)
        bits = plain_sampling.random_bits(words, int(position[row]), seed)
        token, within = plain_sampling.draw(far, plain_sampling.gumbel(bits), sure, maybe)
        tokens[row] = token if within.sum() == 1 else UNDECIDED
    return tokens


class _Sample:
    """sample with one thing wrong."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __call__(self, xp: Any, **a: Any) -> Any:
        change: dict[str, Callable[[], Any]] = {
            "position ignored": lambda: {"position": a["position"] * 0},
            "position off by one": lambda: {"position": a["position"] + 1},
            "low half of the seed ignored": lambda: {"seed_lo": a["seed_lo"] * 0},
            "high half of the seed ignored": lambda: {"seed_hi": a["seed_hi"] * 0},
            "halves of the seed swapped": lambda: {
                "seed_lo": a["seed_hi"],
                "seed_hi": a["seed_lo"],
            },
            "min-p ignored": lambda: {"min_p": a["min_p"] * 0 + FAR},
            "top-k ignored": lambda: {"top_k": a["top_k"] * 0},
            "top-k one larger": lambda: {"top_k": np.where(a["top_k"] > 0, a["top_k"] + 1, 0)},
            "top-k one smaller": lambda: {
                "top_k": np.where(a["top_k"] > 1, a["top_k"] - 1, a["top_k"])
            },
            "top-p ignored": lambda: {"top_p": a["top_p"] * 0 + ONE},
            "greedy ignored": lambda: {"greedy": a["greedy"] * 0},
            "greedy by scores only": lambda: {"logits": a["logits"] * 0},
            "temperature ignored": lambda: {"scale": a["scale"] * 0 + np.float32(LOG2_E)},
            "temperature inverted": lambda: {"scale": np.float32(LOG2_E**2) / a["scale"]},
            "temperature off by two percent": lambda: {"scale": a["scale"] * np.float32(1.02)},
            "filters off": lambda: {"filtered": False},
            "not finite as masked": lambda: {"logits": _without_not_finite(a["logits"])},
        }
        if self.fault in change:
            return sampling.sample(xp, **{**a, **change[self.fault]()})
        return self._body(xp, a)

    def _body(self, xp: Any, a: Arguments) -> Any:
        scores, logits = a["scores"], a["logits"]
        best, keep = scores.max(-1, keepdims=True), scores > MASKED
        gap = best - np.maximum(scores, best - (1 << 24))
        far = xp.to_int(np.minimum(gap.astype(np.float32) * a["scale"][:, None], np.float32(FAR)))
        if a["filtered"]:
            keep = self._filter(xp, a, far, keep)
        token = np.arange(scores.shape[1], dtype=np.int32)
        if self.fault == "noise of the next token":
            token = token + 1
        seeds = (a["position"][:, None], a["seed_lo"][:, None], a["seed_hi"][:, None])
        noise = sampling.gumbel_log2(xp, sampling.hash_tokens(xp, token[None, :], *seeds))
        if self.fault == "noise in natural units":
            noise = (noise * 0.6931471805599453).astype(np.int32)
        total = np.where(keep, noise - far, MASKED)
        drawn = np.argmax(total, axis=-1)
        at_top = np.where((scores == best) & ~np.isnan(logits), logits, -np.inf)
        first = np.argmax(at_top, axis=-1)
        if self.fault == "greedy ties to the higher id":
            first = logits.shape[1] - 1 - np.argmax(at_top[:, ::-1], axis=-1)
        if self.fault == "masked tokens drawn":
            drawn = np.argmax(noise - np.where(scores == MASKED, 0, far), axis=-1)
        finite = np.isfinite(logits).all(axis=-1)
        return np.where(finite, np.where(a["greedy"] > 0, first, drawn), -1).astype(np.int32)

    def _filter(self, xp: Any, a: Arguments, far: Any, keep: Any) -> Any:
        if self.fault == "top-p before top-k":
            keep = keep & (far <= a["min_p"][:, None])
            keep = keep & (far <= sampling._top_p_limit(xp, far, keep, a["top_p"])[:, None])
            return keep & (far <= sampling._top_k_limit(xp, far, keep, a["top_k"])[:, None])
        if self.fault == "min-p last":
            whole = keep & (far <= sampling._top_k_limit(xp, far, keep, a["top_k"])[:, None])
            whole = whole & (far <= sampling._top_p_limit(xp, far, whole, a["top_p"])[:, None])
            return whole & (far <= a["min_p"][:, None])
        keep = keep & (far <= a["min_p"][:, None])
        limit = sampling._top_k_limit(xp, far, keep, a["top_k"])[:, None]
        keep = keep & (far <= limit)
        limit = sampling._top_p_limit(xp, far, keep, a["top_p"])[:, None]
        if self.fault == "26 bits in every vocabulary":
            weight = np.where(keep, sampling.exp2_negative(xp, far), 0)
            return keep & (far <= sampling._mass_limit(xp, far, weight, a["top_p"])[:, None])
        if self.fault == "top-p passed, not reached":
            return keep & (far <= _passing(xp, far, keep, a["top_p"])[:, None])
        if self.fault == "top-p one token short":
            return keep & ((far < limit) | (far == 0))
        if self.fault == "top-p one token more":
            after = np.where(keep & (far > limit), far, FAR).min(-1, keepdims=True)
            return keep & (far <= np.where(limit < FAR, after, limit))
        return keep & (far <= limit)


def _passing(xp: Any, far: Any, keep: Any, top_p: Any) -> Any:
    """The smallest distance within which tokens hold *more* than top-p of the mass; all of it
    where nothing does.
    """
    weight = np.where(keep, sampling.exp2_negative(xp, far), 0).astype(np.int64)
    order = np.argsort(far, axis=-1, kind="stable")
    mass = np.take_along_axis(weight, order, -1).cumsum(-1)
    more = mass * ONE > top_p[:, None].astype(np.int64) * mass[:, -1:]
    last = np.where(more.any(-1), more.argmax(-1), far.shape[1] - 1)
    return np.take_along_axis(np.take_along_axis(far, order, -1), last[:, None], -1)[:, 0]


SAMPLE_FAULTS = (
    *(
        "position ignored",
        "position off by one",
        "low half of the seed ignored",
        "high half of the seed ignored",
    ),
    *(
        "halves of the seed swapped",
        "min-p ignored",
        "top-k ignored",
        "top-k one larger",
        "top-k one smaller",
    ),
    *(
        "top-p ignored",
        "greedy ignored",
        "greedy by scores only",
        "temperature ignored",
        "temperature inverted",
    ),
    *(
        "temperature off by two percent",
        "filters off",
        "noise of the next token",
        "noise in natural units",
    ),
    *("greedy ties to the higher id", "masked tokens drawn", "top-p before top-k", "min-p last"),
    "not finite as masked",
    *("top-p one token short", "top-p one token more", "top-p passed, not reached"),
    "26 bits in every vocabulary",
)

judged_by(
    "sample",
    Testing(
        _sample_cases,
        dtypes=("float32",),
        bitwise=True,
        rows=(
            "logits",
            "scores",
            "position",
            "seed_lo",
            "seed_hi",
            "greedy",
            "scale",
            "top_k",
            "top_p",
            "min_p",
        ),
        mutants={fault: _Sample(fault) for fault in SAMPLE_FAULTS},
        truth=_plain_sample,
    ),
)


# --- penalised_sample
# --------------------------------------------------------------------------------------------------


def _penalised_arguments(rng: np.random.Generator, rows: int, vocab: int) -> Arguments:
    """Rows of all kinds, then greedy ones of which nothing is asked but one thing: in turn the
    history, the token behind it, the last slot of the bias, one bit of the mask, nothing.
    """
    a = _penalty_arguments(rng, rows, vocab, 50, 7)
    a |= _sample_arguments(rng, rows, vocab, True)
    del a["scores"]
    plain = np.arange(rows) >= rows // 2
    asks = np.arange(rows) % 5
    a["greedy"] = np.where(plain, 1, a["greedy"]).astype(np.int32)
    a["bias_ids"][:, -1] = np.where(asks == 2, rng.integers(0, vocab, rows), -1)
    a["history_row"] = np.where(plain & (asks != 0), -1, a["history_row"]).astype(np.int32)
    a["last"] = np.where(plain & (asks != 1), -1, a["last"]).astype(np.int32)
    a["repetition"][:] = 2.0
    a["repetition_inverse"][:] = 0.5
    for row in np.flatnonzero(plain):
        best = int(np.argmax(np.nan_to_num(a["logits"][row], posinf=0.0)))
        last = a["history"][a["history_row"][row]] if asks[row] == 0 else np.zeros(0, np.int32)
        last[:1] = best
        a["last"][row] = best if asks[row] == 1 else -1
        a["bias_ids"][row, :-1], a["mask"][row] = -1, -1
        if asks[row] == 2:
            a["bias_ids"][row, -1], a["bias"][row, -1] = best, -200 * ONE
        if asks[row] == 3:
            a["mask"][row, best >> 5] ^= np.int32(np.uint32(1 << (best & 31)).astype(np.int32))
    return a


def _penalised_cases(dtype: str) -> Iterator[Case]:
    rng = generator("penalised_sample")
    rows = _penalised_arguments(rng, 60, 203)
    yield Case("60 rows", rows)
    yield Case("filters off", rows | {"filtered": False})
    # More words than are listed have the largest logit.
    flat = rows | {
        "logits": np.ones((60, 3000), np.float32),
        "mask": np.full((60, 94), -1, np.int32),
    }
    yield Case("flat rows", flat)
    yield Case(
        "256 rows of 128256",
        partial(_penalised_arguments, generator("bench penalised_sample"), 256, 128_256),
        ("bench",),
    )


def _plain_penalised_sample(ops: Any, **a: Any) -> np.ndarray:
    """penalised_sample by the plain ones of its parts, [row] int32."""
    own = {name: a.pop(name) for name in PENALTIES}
    logits = a.pop("logits")
    scores = _plain_penalties(_numpy(), logits=logits, **own)
    return _plain_sample(_numpy(), logits, scores, **a)


PENALTIES = (
    *("history", "history_row", "last", "prompt_len", "presence", "frequency", "repetition"),
    *("repetition_inverse", "bias_ids", "bias", "mask"),
)
"""What penalties takes beside logits."""


class _PenalisedSample:
    """penalised_sample with one thing wrong."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __call__(self, ops: Any, **a: Any) -> Any:
        ids, mask = a["bias_ids"], a["mask"]
        column = np.arange(mask.shape[1])[None, :]
        changes: dict[str, dict[str, Any]] = {
            "history ignored": {"history_row": np.full_like(a["history_row"], -1)},
            "last token ignored": {"last": np.full_like(a["last"], -1)},
            "bias ignored": {"bias_ids": np.full_like(ids, -1)},
            "first slots of the bias alone": {
                "bias_ids": np.where(np.arange(ids.shape[1]) < ids.shape[1] - 1, ids, -1)
            },
            "mask ignored": {"mask": np.full_like(mask, -1)},
            "first words of the mask alone": {"mask": np.where(column < 2, mask, -1)},
            "every row greedy": {"greedy": np.ones_like(a["greedy"])},
            "no row greedy": {"greedy": np.zeros_like(a["greedy"])},
            "filters ignored": {"filtered": False},
        }
        token = sampling.penalised_sample(ops, **a | changes.get(self.fault, {}))
        first = sampling.greedy_sample(_numpy(), a["logits"])
        greedy = a["greedy"] > 0
        if self.fault == "greedy rows take the largest logit":
            return np.where(greedy, first, token)
        if self.fault == "of equal logits the last":
            last = a["logits"].shape[1] - 1 - np.argmax(a["logits"][:, ::-1], axis=1)
            return np.where(greedy & (token == first) & (token >= 0), last, token).astype(np.int32)
        if self.fault == "rows with infinities named":
            return np.where(token < 0, np.argmax(a["logits"], axis=1), token).astype(np.int32)
        return token


PENALISED_FAULTS = (
    *("history ignored", "last token ignored", "bias ignored", "first slots of the bias alone"),
    *("mask ignored", "first words of the mask alone", "every row greedy", "no row greedy"),
    *("filters ignored", "greedy rows take the largest logit", "of equal logits the last"),
    "rows with infinities named",
)

judged_by(
    "penalised_sample",
    Testing(
        _penalised_cases,
        dtypes=("float32",),
        bitwise=True,
        rows=(
            *("logits", "history_row", "last", "prompt_len", "presence", "frequency"),
            *("repetition", "repetition_inverse", "bias_ids", "bias", "mask"),
            *("position", "seed_lo", "seed_hi", "greedy", "scale", "top_k", "top_p", "min_p"),
        ),
        mutants={fault: _PenalisedSample(fault) for fault in PENALISED_FAULTS},
        truth=_plain_penalised_sample,
    ),
)


# --- top_logprobs
# --------------------------------------------------------------------------------------------------


def _top_cases(dtype: str) -> Iterator[Case]:
    rng = generator("top_logprobs")
    x = _logits(rng, 8, 133)
    x[4] -= 500.0
    chosen = np.array([0, 132, 5, 7, *rng.integers(0, 133, 4)], np.int32)
    chosen[1] = np.flatnonzero(x[1] == x[1].max())[-1]  # the last of the tied
    chosen[5] = np.argmin(x[5])
    yield Case("ties", {"logits": x, "chosen": chosen})
    small = {"logits": x[:, :7], "chosen": (chosen % 7).astype(np.int32)}
    small["logits"] = small["logits"] + np.float32(0.5)
    yield Case("fewer words than are asked for", small)
    zeros = np.where(rng.random((8, 133)) < 0.5, -0.0, 0.0).astype(np.float32)
    yield Case("zeros of both signs are equal", {"logits": zeros, "chosen": chosen})
    yield Case(
        "64 rows of 151936",
        lambda: {**_big_logits(), "chosen": np.arange(64, dtype=np.int32)},
        ("bench",),
    )


def _top_magnitude(a: Arguments) -> Any:
    """A difference of two numbers as large as the largest logit; ranks and ids are integers."""
    x, chosen = a["logits"], a["chosen"]
    best = np.abs(x.max(-1)) + np.log(x.shape[1])
    top = -np.sort(-x, axis=-1)[:, :TOP]
    at = np.abs(np.take_along_axis(x, chosen[:, None], 1)[:, 0])
    return at + best, None, None, np.abs(top) + best[:, None]


def _wrong_top(xp: Any, logits: Any, chosen: Any, fault: str) -> Any:
    best = logits.max(-1, keepdims=True)
    shifted = logits - best
    summed = (
        shifted[:, :-64] if fault == "last 64 words skipped" and logits.shape[1] > 64 else shifted
    )
    norm = np.log(np.exp(summed).sum(-1)) + best[:, 0]
    if fault == "logarithm of base 2":
        norm = np.log2(np.exp(shifted).sum(-1)) + best[:, 0]
    elif fault == "maximum not taken off":
        norm = np.log(np.exp(logits.astype(np.float32)).sum(-1))
    k = min(TOP, logits.shape[1])
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :k].astype(np.int32)
    if fault == "normalised over the best":
        norm = np.log(np.exp(np.take_along_axis(shifted, ids, 1)).sum(-1)) + best[:, 0]
    elif fault == "ties to the higher id":
        ids = (
            logits.shape[1] - 1 - np.argsort(-logits[:, ::-1], axis=-1, kind="stable")[:, :k]
        ).astype(np.int32)
    at = np.take_along_axis(logits, chosen[:, None], 1)[:, 0]
    token = np.arange(logits.shape[1])[None, :]
    tied = (logits == at[:, None]) & (token < chosen[:, None])
    before = logits > at[:, None]
    if fault != "rank without ties":
        before = before | tied
    rank = (before.sum(-1) + (0 if fault == "rank from 0" else 1)).astype(np.int32)
    top = np.take_along_axis(logits, ids, 1) - norm[:, None]
    if fault == "raw logit of the chosen":
        return at, rank, ids, top
    chosen_lp = at * 1.005 - norm if fault == "chosen scaled by 1.005" else at - norm
    return chosen_lp, rank, ids, np.roll(top, 1, axis=-1) if fault == "values shifted" else top


TOP_FAULTS = (
    *(
        "last 64 words skipped",
        "logarithm of base 2",
        "maximum not taken off",
        "normalised over the best",
    ),
    *("ties to the higher id", "rank without ties", "rank from 0", "raw logit of the chosen"),
    *("chosen scaled by 1.005", "values shifted"),
)

judged_by(
    "top_logprobs",
    Testing(
        _top_cases,
        dtypes=("float32",),
        magnitude=_top_magnitude,
        rows=("logits", "chosen"),
        mutants={fault: partial(_wrong_top, fault=fault) for fault in TOP_FAULTS},
        truth=partial(_wrong_top, fault=""),
    ),
)
