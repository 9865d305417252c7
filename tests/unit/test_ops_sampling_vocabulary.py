"""The sampler over vocabularies of all sizes: masses are exact up to 2^19 words, and what was
drawn up to 2^18 words stays.
"""

import numpy as np
import pytest

from twinfer.ops import resolve
from twinfer.ops.namespaces import namespace
from twinfer.ops.reference import sampling

NUMPY = namespace("numpy")
ROWS = 12
TOP_P = 0.05, 0.3, 0.5, 0.7, 0.9, 0.999
TOP_K = 0, 0, 0, 0, 5, 50_000


def mixed(n: int, seed: int) -> np.ndarray:
    """n numbers in [0, 2^32) that no version of a library changes."""
    x = (np.arange(n, dtype=np.uint64) + np.uint64(1 + seed * n)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return x >> np.uint64(32)


def distances(vocab: int, kind: str, seed: int) -> np.ndarray:
    """How far in Q16 the words are from the best: [vocab] int32, one of them 0."""
    noise = mixed(vocab, seed)
    if kind == "level":
        # Next to no distance: the sum of the weights is as large as it gets.
        far = 2 * (noise % np.uint64(4))
    elif kind == "slope":
        far = noise % np.uint64(3 * sampling.ONE)
    else:
        # Exponentially many words at each distance: about as much mass in each octave.
        far = np.uint64(18 * sampling.ONE) - noise % np.uint64(17 * sampling.ONE)
    far = far.astype(np.int32)
    far[int(noise[0] % np.uint64(vocab))] = 0
    return far


def arguments(vocab: int, filtered: bool = True) -> dict:
    """Rows of three kinds under all of TOP_P and TOP_K."""
    kinds = [("level", "slope", "steep")[row % 3] for row in range(ROWS)]
    scores = -np.stack([distances(vocab, kind, row) for row, kind in enumerate(kinds)])
    seeds = (mixed(2 * ROWS, 99) >> np.uint64(1)).astype(np.int32).reshape(2, ROWS)
    some = np.arange(ROWS, dtype=np.int32)
    top_p = np.array([TOP_P[row // 2] for row in range(ROWS)])
    return {
        "logits": (scores / sampling.ONE).astype(np.float32),
        "scores": scores,
        "position": some * 7,
        "seed_lo": seeds[0],
        "seed_hi": seeds[1],
        "greedy": some * 0,
        "scale": np.ones(ROWS, np.float32),
        "top_k": np.array([TOP_K[row % 6] for row in range(ROWS)], np.int32),
        "top_p": np.rint(top_p * sampling.ONE).astype(np.int32),
        "min_p": some * 0 + sampling.FAR,
        "filtered": filtered,
    }


def tokens(given: dict, framework: str = "numpy") -> np.ndarray:
    """What the op draws on a framework."""
    convert = CONVERT[framework]
    placed = {k: convert(v) if isinstance(v, np.ndarray) else v for k, v in given.items()}
    return np.asarray(resolve(framework).bind().sample(*placed.values()))


def _jax(x: np.ndarray):
    import jax.numpy as jnp

    return jnp.asarray(x)


def _torch(x: np.ndarray):
    import torch

    return torch.from_numpy(x)


CONVERT = {"numpy": np.asarray, "jax": _jax, "torch": _torch}


GOLDEN = {
    1000: (
        [325, 633, 732, 839, 901, 483, 542, 909, 796, 490, 140, 861],
        [0, 3317, 98250, 2, 51598, 140152, 4, 87001, 278777, 6, 195885, 724124],
    ),
    32_000: (
        [2738, 26300, 23837, 21010, 17570, 25270, 3528, 30010, 131, 8087, 24144, 25909],
        [0, 4168, 99276, 2, 54037, 129801, 4, 89660, 284105, 6, 195884, 714086],
    ),
    151_936: (
        [2738, 75664, 140409, 111602, 49739, 3380, 127401, 3363, 6548, 8087, 109566, 72788],
        [0, 4178, 99318, 2, 54135, 132265, 4, 89207, 282751, 6, 195957, 716372],
    ),
    262_143: (
        [193584, 130603, 77090, 243779, 170551, 84115, 78844, 184579, 199708, 8087, 115298, 256986],
        [0, 4242, 99454, 2, 54332, 131183, 4, 89616, 283898, 6, 195924, 716901],
    ),
    262_144: (
        [193584, 238133, 223548, 243779, 79135, 161039, 5605, 210206, 193163, 8087, 187191, 25909],
        [0, 4242, 99454, 2, 54334, 131183, 4, 89617, 283898, 6, 195924, 716912],
    ),
}
"""By vocabulary: the tokens of `arguments`, and the limits of top-p alone, as they were when 2^18
words were the most.
"""
LARGE = 262_145, 262_208, 262_400, 1 << 19


@pytest.mark.parametrize("vocab", GOLDEN)
def test_vocabularies_up_to_2_18_keep_their_tokens(vocab):
    given = arguments(vocab)
    drawn, limits = GOLDEN[vocab]
    assert tokens(given).tolist() == drawn
    assert top_p_limits(given).tolist() == limits


def top_p_limits(given: dict) -> np.ndarray:
    """The limits of top-p where no other filter is before it: [row]."""
    far, keep = -given["scores"], given["scores"] > sampling.MASKED
    return sampling._top_p_limit(NUMPY, far, keep, given["top_p"])


def exact_limit(far: np.ndarray, top_p: int) -> int:
    """The limit of one row by integers of 64 bits."""
    weight = sampling.exp2_negative(NUMPY, far).astype(np.int64)
    if far.size > 1 << 18:
        weight = weight >> 1
    order = np.argsort(far, kind="stable")
    mass = weight[order].cumsum()
    drop = max(0, int(mass[-1]).bit_length() - 28)
    total = int(mass[-1]) >> drop
    wanted = (((total >> 14) * top_p) >> 2) + (((total & 16383) * top_p) >> 16)
    return int(far[order][np.argmax((mass >> drop) >= wanted)])


@pytest.mark.parametrize("vocab", [262_144, *LARGE])
def test_limits_of_large_vocabularies_are_exact(vocab):
    given = arguments(vocab)
    want = [
        exact_limit(-scores, top_p)
        for scores, top_p in zip(given["scores"], given["top_p"].tolist(), strict=True)
    ]
    assert top_p_limits(given).tolist() == want


@pytest.mark.parametrize("vocab", LARGE)
def test_weights_of_26_bits_would_overflow_in_large_vocabularies(vocab):
    weight = sampling.exp2_negative(NUMPY, np.zeros((1, vocab), np.int32))
    high, _ = sampling._mass(NUMPY, weight)
    assert int(high[0]) != vocab * ((1 << 26) - 1) >> 13


@pytest.mark.parametrize("vocab", [262_144, *LARGE])
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_masses_of_flat_rows_are_exact(framework, vocab):
    """All words are as far as the best: no sum is larger."""
    space = namespace(framework)
    far = CONVERT[framework](np.zeros((2, vocab), np.int32))
    high, low = sampling._mass(space, sampling._weights(space, far))
    exact = vocab * ((1 << (26 if vocab <= 1 << 18 else 25)) - 1)
    assert np.asarray(high).tolist() == [exact >> 13] * 2
    assert np.asarray(low).tolist() == [exact & 8191] * 2


LARGE = (262_208, 262_400, 1 << 19)
SLOW_DRAWS = [
    pytest.param(framework, vocab, marks=pytest.mark.slow)
    for framework, vocab in [("torch", 1 << 19), *(("jax", vocab) for vocab in LARGE)]
]


@pytest.mark.parametrize(("framework", "vocab"), [("torch", 262_208), *SLOW_DRAWS])
def test_frameworks_draw_the_same_tokens_from_large_vocabularies(framework, vocab):
    given = arguments(vocab)
    np.testing.assert_array_equal(tokens(given, framework), tokens(given))


@pytest.mark.parametrize("framework", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_everything_sized_by_the_vocabulary_takes_262400_words(framework):
    """Penalties, bias and mask reach the last words, and greedy sampling finds them."""
    rows, vocab = 3, 262_400
    last = vocab - 1 - np.arange(rows, dtype=np.int32)
    logits = -(mixed(rows * vocab, 5) % np.uint64(8)).astype(np.float32).reshape(rows, vocab)
    logits[np.arange(rows), last] = 3.0
    bias_ids = np.full((rows, 4), -1, np.int32)
    bias_ids[:, 0] = last - 5
    mask = np.full((rows, vocab // 32), -1, np.int32)
    mask[1, -1] = 0  # the last 32 words, and so the best of row 1
    one, none = np.ones(rows, np.float32), np.zeros(rows, np.int32)
    given = {
        "logits": logits, "history": last[:, None],
        "history_row": np.arange(rows, dtype=np.int32), "last": none - 1,
        "prompt_len": none, "presence": none,
        "frequency": none + 2 * sampling.ONE, "repetition": one, "repetition_inverse": one,
        "bias_ids": bias_ids, "bias": np.where(bias_ids >= 0, 100 * sampling.ONE, 0),
        "mask": mask,
    }  # fmt: skip
    given["bias"] = given["bias"].astype(np.int32)
    convert, ops = CONVERT[framework], resolve(framework).bind()
    scores = np.asarray(ops.penalties(*(convert(x) for x in given.values())))
    np.testing.assert_array_equal(scores, resolve("numpy").bind().penalties(*given.values()))
    assert scores[[0, 2], last[[0, 2]]].tolist() == [sampling.ONE] * 2
    assert (scores[1, -32:] == sampling.MASKED).all()
    assert scores.argmax(1)[[0, 2]].tolist() == (last - 5)[[0, 2]].tolist()
    assert np.asarray(ops.greedy_sample(convert(logits))).tolist() == last.tolist()
    _, rank, best, _ = ops.top_logprobs(convert(logits), convert(last))
    assert np.asarray(rank).tolist() == [1] * rows
    assert np.asarray(best)[:, 0].tolist() == last.tolist()
