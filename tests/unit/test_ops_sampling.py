"""The sampler: bitwise the same in every framework, and the distribution that it should be."""

import numpy as np
import pytest

from twinfer.ops import resolve
from twinfer.ops.cases import load_all, plain_sampling
from twinfer.ops.cases.sampling import UNDECIDED, _PenalisedSample, _Sample
from twinfer.ops.namespaces import namespace
from twinfer.ops.reference import sampling
from twinfer.ops.testing import TESTING, ci_cases, oracle
from twinfer.shared.sampling_encoding import (
    encode_bias,
    encode_mask,
    encode_processors,
    encode_sampling,
)
from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.step import BIAS_SLOTS

load_all()
NUMPY = resolve("numpy").bind()
NUMPY_SPACE = namespace("numpy")
FIELDS = ("position", "seed_lo", "seed_hi", "greedy", "scale", "top_k", "top_p", "min_p")


def encode(params, seeds, positions):
    """The sampling fields of rows that all have `params`."""
    rows = [encode_sampling(params, seed) for seed in seeds]
    out = {
        k: np.array([r[k] for r in rows], np.float32 if k == "scale" else np.int32) for k in rows[0]
    }
    return out | {"position": np.asarray(positions, np.int32)}


def draw(logits, fields, filtered=True, scores=None, framework="numpy"):
    ops = resolve(framework).bind()
    convert = {"numpy": lambda x: x, "jax": _jax, "torch": _torch}[framework]
    logits = convert(logits)
    scores = ops.quantize_logits(logits) if scores is None else convert(scores)
    return np.asarray(ops.sample(logits, scores, *(convert(fields[k]) for k in FIELDS), filtered))


def _jax(x):
    import jax.numpy as jnp

    return jnp.asarray(x)


def _torch(x):
    import torch

    return torch.from_numpy(np.array(x))


QUICK_DRAWS = [("torch", 2), ("torch", 33), ("torch", 1000), ("torch", 5003)]
SLOW_DRAWS = [pytest.param("jax", vocab, marks=pytest.mark.slow) for vocab in (2, 33, 1000, 5003)]


@pytest.mark.parametrize(("framework", "vocab"), [*QUICK_DRAWS, *SLOW_DRAWS])
def test_every_framework_draws_the_same_tokens(framework, vocab):
    rng = np.random.default_rng(vocab)
    for spread in (0.01, 1.0, 8.0, 100.0):
        logits = (rng.normal(size=(24, vocab)) * spread).astype(np.float32)
        logits[0] = 1.0
        logits[1, : vocab // 2] = np.nan
        logits[2, 0] = np.inf
        rows = [
            encode_sampling(
                SamplingParams(
                    temperature=float(rng.choice([0, 0.01, 0.7, 1, 10])),
                    top_k=int(rng.integers(0, vocab + 2)),
                    top_p=float(rng.choice([0.01, 0.5, 0.9, 1.0])),
                    min_p=float(rng.choice([0, 0.05, 1.0])),
                ),
                int(rng.integers(2**63)),
            )
            for _ in range(24)
        ]
        fields = {
            k: np.array([r[k] for r in rows], np.float32 if k == "scale" else np.int32)
            for k in rows[0]
        }
        fields["position"] = rng.integers(0, 10**6, 24).astype(np.int32)
        for filtered in (False, True):
            want = draw(logits, fields, filtered)
            np.testing.assert_array_equal(draw(logits, fields, filtered, framework=framework), want)


@pytest.mark.parametrize("framework", [pytest.param("jax", marks=pytest.mark.slow), "torch"])
def test_penalties_are_the_same_integers(framework):
    rng = np.random.default_rng(3)
    rows, vocab, length = 8, 203, 50
    logits = (rng.normal(size=(rows, vocab)) * 5).astype(np.float32)
    logits[0, 7] = np.nan
    params = [
        SamplingParams(
            presence_penalty=float(rng.uniform(-2, 2)),
            frequency_penalty=float(rng.uniform(-2, 2)),
            repetition_penalty=float(rng.uniform(0.5, 2)),
            logit_bias={int(t): float(rng.uniform(-100, 100)) for t in rng.integers(0, vocab, 5)},
            banned_token_ids=tuple(int(t) for t in rng.integers(0, vocab, 9)),
        )
        for _ in range(rows)
    ]
    fields = penalty_fields(
        params, rng.integers(-1, vocab, (rows, length)).astype(np.int32), 20, vocab
    )
    want = NUMPY.penalties(logits, **fields)
    convert = _jax if framework == "jax" else _torch
    got = (
        resolve(framework)
        .bind()
        .penalties(convert(logits), **{k: convert(v) for k, v in fields.items()})
    )
    np.testing.assert_array_equal(np.asarray(got), want)


def penalty_fields(params, history, prompt_len, vocab):
    rows = len(params)
    bias_ids, bias = (
        np.full((rows, BIAS_SLOTS), -1, np.int32),
        np.zeros((rows, BIAS_SLOTS), np.int32),
    )
    mask = np.full((rows, -(-vocab // 32)), -1, np.int32)
    scalars = [encode_processors(p) for p in params]
    for i, p in enumerate(params):
        ids, values = encode_bias(p)
        bias_ids[i, : len(ids)], bias[i, : len(ids)] = ids, values
        words = encode_mask(p, vocab)
        if words is not None:
            mask[i] = words
    fields = {
        k: np.array([s[k] for s in scalars], np.float32 if k.startswith("repetition") else np.int32)
        for k in scalars[0]
    }
    lens = np.full(rows, prompt_len, np.int32)
    return fields | {
        "history": history,
        "history_row": np.arange(rows, dtype=np.int32),
        "last": np.full(rows, -1, np.int32),
        "prompt_len": lens,
        "bias_ids": bias_ids,
        "bias": bias,
        "mask": mask,
    }


def test_penalties_are_what_the_float64_formula_says():
    rng = np.random.default_rng(4)
    vocab = 97
    logits = (rng.normal(size=(1, vocab)) * 4).astype(np.float32)
    params = SamplingParams(
        presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.3,
        logit_bias={5: 2.5, 90: -3.0},
        banned_token_ids=(2, 3),
    )  # fmt: skip
    history = np.array([[5, 9, 9, 1, 40, 40, 40, 8, -1, -1]], np.int32)
    got = NUMPY.penalties(logits, **penalty_fields([params], history, 3, vocab))[0]
    x = logits[0].astype(np.float64)
    seen, count = np.unique(history[history >= 0]), np.bincount([1, 40, 40, 40, 8], minlength=vocab)
    x[seen] = np.where(x[seen] > 0, x[seen] / 1.3, x[seen] * 1.3)
    x = x - 0.3 * count - 0.7 * (count > 0)
    x[5] += 2.5
    x[90] -= 3.0
    allowed = np.ones(vocab, bool)
    allowed[[2, 3]] = False
    # Each of the four terms is rounded to Q16 on its own, the frequency penalty once per
    # occurrence.
    np.testing.assert_allclose(got[allowed] / 65536, x[allowed], atol=4 / 65536 + 1e-5)
    assert (got[~allowed] == sampling.MASKED).all()


def frequencies(logits, params, draws=200_000):
    """How often each token is drawn, over `draws` (seed, position) pairs."""
    counts = np.zeros(logits.shape[0], np.int64)
    for first in range(0, draws, 20_000):
        index = np.arange(first, first + 20_000)
        fields = encode(params, [0] * len(index), index % 1000)
        fields["seed_lo"] = (index // 1000).astype(np.int32)
        counts += np.bincount(
            draw(np.tile(logits, (len(index), 1)), fields, True),
            minlength=len(counts),
        )
    return counts


def expected(logits, params):
    """The float64 distribution after temperature, min-p, top-k and top-p, in this order."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    keep = p >= params.min_p * p.max()
    if params.top_k > 0:
        keep &= p >= np.sort(np.where(keep, p, 0))[::-1][: params.top_k][-1]
    p = np.where(keep, p, 0) / np.where(keep, p, 0).sum()
    order = np.argsort(-p, kind="stable")
    inside = np.cumsum(p[order]) - p[order] < params.top_p
    keep = np.zeros_like(keep)
    keep[order[inside]] = True
    p = np.where(keep, p, 0)
    return p / p.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=3.0, top_k=7),
        SamplingParams(temperature=1.2, top_k=20, top_p=0.9, min_p=0.02),
        *(
            pytest.param(SamplingParams(**one), marks=pytest.mark.slow)
            for one in (
                {"temperature": 0.6},
                {"temperature": 1.0, "top_p": 0.8},
                {"temperature": 1.0, "min_p": 0.1},
            )
        ),
    ],
    ids=str,
)
def test_draws_follow_the_float64_distribution(params):
    from scipy.stats import chi2

    logits = (np.random.default_rng(5).normal(size=30) * 2).astype(np.float32)
    counts, p = frequencies(logits, params), expected(logits, params)
    draws = counts.sum()
    assert not counts[p == 0].any()
    likely = p * draws >= 5
    statistic = ((counts - p * draws)[likely] ** 2 / (p * draws)[likely]).sum()
    assert statistic < chi2.ppf(0.9999, likely.sum() - 1), "chi-square"
    assert np.abs(counts / draws - p).sum() / 2 < 3 * np.sqrt(likely.sum() / draws), (
        "total variation"
    )


def test_the_distribution_test_sees_a_temperature_off_by_two_percent():
    from scipy.stats import chi2

    logits = (np.random.default_rng(5).normal(size=30) * 2).astype(np.float32)
    counts = frequencies(logits, SamplingParams(temperature=1.02))
    p = expected(logits, SamplingParams(temperature=1.0))
    likely = p * counts.sum() >= 5
    statistic = ((counts - p * counts.sum())[likely] ** 2 / (p * counts.sum())[likely]).sum()
    assert statistic > chi2.ppf(0.9999, likely.sum() - 1)


def test_top_p_keeps_as_little_as_holds_the_mass():
    """Probabilities 1/2, 1/4, 1/4: the first token alone holds exactly half."""
    logits = np.log(np.array([[0.5, 0.25, 0.25]])).astype(np.float32)
    for top_p, kept in ((0.5, {0}), (0.51, {0, 1, 2}), (0.75, {0, 1, 2})):
        fields = encode(SamplingParams(temperature=1.0, top_p=top_p), [3] * 200, np.arange(200))
        assert set(draw(np.tile(logits, (200, 1)), fields).tolist()) == kept


@pytest.mark.slow
def test_top_p_that_is_met_exactly_keeps_nothing_more():
    """Weights 2^26 - 1, twice 2^25 - 1, and 1: the first holds half of the sum to the last bit,
    and half is asked.
    """
    distance = np.array([[0, 1, 1, 25]])
    assert (
        sampling.exp2_negative(NUMPY_SPACE, (distance * sampling.ONE).astype(np.int32)).sum()
        == (2**26 - 1) * 2
    )
    logits = (-distance * np.log(2.0)).astype(np.float32)
    for top_p, kept in ((0.5, {0}), (0.5 + 1 / 65536, {0, 1, 2})):
        fields = encode(SamplingParams(temperature=1.0, top_p=top_p), [3] * 200, np.arange(200))
        fields["scale"][:] = 1.0
        scores = (-distance * sampling.ONE).astype(np.int32).repeat(200, axis=0)
        for framework in ("numpy", "torch", "jax"):
            drawn = draw(np.tile(logits, (200, 1)), fields, scores=scores, framework=framework)
            assert set(drawn.tolist()) == kept


def test_all_bits_of_a_seed_count():
    logits = np.zeros((64, 5000), np.float32)
    draws = {
        tuple(draw(logits, encode(SamplingParams(), [seed] * 64, np.arange(64))).tolist())
        for seed in (5, 5 + 2**31, 5 + 2**32, 5 + 2**63, -5)
    }
    assert len(draws) == 5


def test_noise_is_gumbel_to_the_stated_precision():
    xp = namespace("numpy")
    bits = np.arange(0, 2**31, 2**31 // 999_983, dtype=np.int64).astype(np.int32)
    u = (bits.astype(np.float64) + 0.5) / 2**31
    want = -np.log2(-np.log2(u))
    assert np.abs(sampling.gumbel_log2(xp, bits) / 65536 - want).max() < 1.4e-4


def test_bits_are_uniform_and_independent_over_tokens_positions_and_seeds():
    xp = namespace("numpy")
    token, position, seed = (np.arange(n, dtype=np.int32) for n in (512, 64, 16))
    bits = sampling.hash_tokens(
        xp,
        token[:, None, None],
        position[None, :, None],
        seed[None, None, :],
        seed[None, None, :] * 0,
    )
    assert (bits >= 0).all()
    u = bits.astype(np.float64) / 2**31
    assert abs(u.mean() - 0.5) < 4 / np.sqrt(12 * u.size)
    for axis in range(3):
        a, b = (np.take(u, range(k, u.shape[axis] - 1 + k), axis) for k in (0, 1))
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(a.size)
    assert len(np.unique(bits)) > 0.999 * bits.size


def test_ties_go_to_the_lower_token_id_and_greedy_sees_differences_below_the_fixed_point():
    logits = np.zeros((2, 9), np.float32)
    logits[0, [3, 7]] = 1.0
    logits[1, [3, 7]] = 1.0, np.nextafter(np.float32(1), np.float32(2))
    fields = encode(SamplingParams(temperature=0.0), [1, 1], [0, 0])
    assert draw(logits, fields).tolist() == [3, 7]
    assert NUMPY.greedy_sample(logits).tolist() == [3, 7]


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_top_logprobs(framework):
    rng = np.random.default_rng(6)
    logits = (rng.normal(size=(5, 300)) * 3).astype(np.float32)
    logits[1, 10:14] = 20.0
    chosen = np.array([0, 11, 299, 5, 7], np.int32)
    convert = _jax if framework == "jax" else _torch
    lp, rank, ids, top = (
        np.asarray(x)
        for x in resolve(framework).bind().top_logprobs(convert(logits), convert(chosen))
    )
    wide = logits.astype(np.float64)
    want = (
        wide
        - np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - wide.max(-1, keepdims=True)
    )
    np.testing.assert_allclose(lp, want[np.arange(5), chosen], atol=2e-5)
    order = np.argsort(-wide, axis=-1, kind="stable")
    np.testing.assert_array_equal(ids, order[:, :20])
    np.testing.assert_allclose(top, np.take_along_axis(want, order[:, :20], 1), atol=2e-5)
    assert rank.tolist() == [int(np.where(order[i] == chosen[i])[0][0]) + 1 for i in range(5)]


# --- what judges the sampler
# --------------------------------------------------------------------------------------------------

HASHED = [
    ((0, 0, 0), 288260088),
    ((1, 2, 3 + (4 << 32)), 314172625),
    ((151935, 131071, 2**63 - 5), 106762342),
    ((7, 1000000, 123456789 * 2**32 + 2**31), 2130550275),
]
"""(token, position, seed) and the 31 bits that they have on every backend."""


@pytest.mark.parametrize(("given", "bits"), HASHED)
def test_the_bits_of_a_token_never_change(given, bits):
    token, position, seed = given
    values = encode_sampling(SamplingParams(), seed)
    columns = [np.array([x], np.int32) for x in (token, position)]
    seeds = [np.array([values[name]], np.int32) for name in ("seed_lo", "seed_hi")]
    assert sampling.hash_tokens(NUMPY_SPACE, *columns, *seeds).tolist() == [bits]
    assert plain_sampling.random_bits(np.array([token]), position, seed).tolist() == [bits]


def test_the_finaliser_is_that_of_murmurhash3():
    """Known values of `fmix32`."""
    x = np.array([0, 1, 0xFFFFFFFF], np.uint64)
    assert plain_sampling._finalise(x).tolist() == [0, 0x514E28B7, 0x81F16F39]


def test_weights_are_powers_of_two_to_the_stated_precision():
    far = np.arange(27 << 16, dtype=np.int32)[None]
    got = sampling.exp2_negative(NUMPY_SPACE, far)[0]
    least, most = plain_sampling._weights(far[0] / 65536, 0.0)
    # So many words have one bit less.
    assert ((got >> 1 >= least) & (got >> 1 <= most)).all()
    least, most = plain_sampling._weights(far[0, ::8] / 65536, 0.0)
    assert ((got[::8] >= least) & (got[::8] <= most)).all()


FAULTS = {
    "top-p before top-k": ("_top_p_limit", lambda right: _top_p_of_all),
    "top-k one more": (
        "_top_k_limit",
        lambda right: lambda xp, far, keep, k: right(xp, far, keep, xp.where(k > 0, k + 1, 0)),
    ),
    "top-p passed, not reached": (
        "_top_p_limit",
        lambda right: lambda xp, far, keep, p: right(xp, far, keep, xp.minimum(p + 1, 65536)),
    ),
    "noise without position": (
        "hash_tokens",
        lambda right: lambda xp, token, position, *seed: right(xp, token, position * 0, *seed),
    ),
    "another hash": (
        "_mix",
        lambda right: lambda xp, x: right(xp, x) ^ 1,
    ),
    "noise of half size": (
        "gumbel_log2",
        lambda right: lambda xp, bits: right(xp, bits) >> 1,
    ),
    "weights too flat": (
        "exp2_negative",
        lambda right: lambda xp, x: right(xp, x >> 1),
    ),
    "counts end at 255": ("MAX_COUNT", lambda right: 255),
}
"""By what is wrong in the reference: which of its helpers, and what it becomes."""


def _top_p_of_all(xp, far, keep, top_p):
    return sampling._mass_limit(xp, far, sampling._weights(xp, far), top_p)


def differing(op):
    """Cases of an op in which its reference and its truth are not equal."""
    testing = TESTING[op]
    return [
        case.name
        for case in ci_cases(testing, "float32")
        if (oracle(op, case.arguments)[0] != oracle(op, case.arguments, testing.truth)[0]).any()
    ]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_truth_sees_faults_of_the_reference(fault, monkeypatch):
    helper, wrong = FAULTS[fault]
    monkeypatch.setattr(sampling, helper, wrong(getattr(sampling, helper)))
    assert differing("penalties" if helper == "MAX_COUNT" else "sample")
    if helper in ("hash_tokens", "_mix", "gumbel_log2"):
        assert differing("penalised_sample")


@pytest.mark.parametrize("op", ["sample", "penalised_sample"])
def test_the_truth_decides_every_row(op):
    for case in ci_cases(TESTING[op], "float32"):
        assert (oracle(op, case.arguments, TESTING[op].truth)[0] != UNDECIDED).all()


def test_what_mutants_of_the_sampler_are_made_of_is_right():
    for op, right in (("sample", _Sample("")), ("penalised_sample", _PenalisedSample(""))):
        for case in ci_cases(TESTING[op], "float32"):
            got, want = oracle(op, case.arguments, right)[0], oracle(op, case.arguments)[0]
            np.testing.assert_array_equal(got, want)


def test_rows_that_rounding_decides_are_said():
    """Two words whose noise differs by less than it may be off, and a mass that is just met."""
    all_ = np.ones(2, bool)
    noise = np.array([1.0, 1.0 + plain_sampling.NOISE_ERROR])
    assert plain_sampling.draw(np.zeros(2), noise, all_, all_)[1].all()
    far = np.array([0.0, -np.log2(1 / 3), -np.log2(1 / 3)])
    sure, maybe = plain_sampling.kept(far, 64.0, 0, 0.6)
    assert (sure.tolist(), maybe.tolist()) == ([True, False, False], [True, True, True])
