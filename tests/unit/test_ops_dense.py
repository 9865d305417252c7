"""Native implementations of the dense and paged ops against the float64 oracle, in both frameworks."""

import ml_dtypes
import numpy as np
import pytest

from twinfer.ops import resolve

FRAMEWORKS = ["jax", "torch"]
ORACLE = resolve("numpy").bind()


def arrays(framework, *xs):
    if framework == "jax":
        import jax.numpy as jnp

        return [None if x is None else jnp.asarray(x) for x in xs]
    import torch

    from twinfer.ops.namespaces.torch_ import from_numpy

    return [
        None if x is None else from_numpy(np.array(x)) if isinstance(x, np.ndarray) else torch.tensor(x) for x in xs
    ]


def run(framework, op, *args, **static):
    function = getattr(resolve(framework).bind(), op)
    outs = function(*arrays(framework, *args), **static)
    outs = outs if isinstance(outs, tuple) else (outs,)
    return [np.asarray(o.float() if framework == "torch" and o.is_floating_point() else o) for o in outs]


def oracle(op, *args, **static):
    """The reference in float64 on exactly the inputs given."""
    wide = [a.astype(np.float64) if a is not None and a.dtype.kind not in "iu" else a for a in args]
    outs = getattr(ORACLE, op)(*wide, **static)
    return outs if isinstance(outs, tuple) else (outs,)


def check(framework, op, *args, ulp, **static):
    """Every element within `ulp` units of the storage dtype's precision, relative to the row's largest element."""
    eps = float(ml_dtypes.finfo(args[0].dtype).eps)
    for got, want in zip(run(framework, op, *args, **static), oracle(op, *args, **static), strict=True):
        want = np.asarray(want, np.float64)
        scale = np.maximum(np.abs(want).max(axis=-1, keepdims=True), 1e-30)
        worst = (np.abs(got.astype(np.float64) - want) / scale).max()
        assert worst <= ulp * eps, f"{op} on {framework}: {worst / eps:.2f} ulp of the row's largest"


def normal(rng, *shape, dtype=np.float32, scale=1.0):
    return (rng.normal(size=shape) * scale).astype(dtype)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
class TestDense:
    def test_rms_norm_with_an_outlier_and_a_zero_row(self, framework, dtype):
        rng = np.random.default_rng(0)
        x = normal(rng, 7, 96)
        x[1] = 0
        x[2, 5] = 300
        x[3] *= 1e-3
        check(framework, "rms_norm", x.astype(dtype), normal(rng, 96, dtype=dtype), eps=1e-6, ulp=4)

    def test_rms_norm_of_heads(self, framework, dtype):
        rng = np.random.default_rng(1)
        check(framework, "rms_norm", normal(rng, 5, 3, 32, dtype=dtype), normal(rng, 32, dtype=dtype), eps=1e-5, ulp=4)

    def test_fused_add_rms_norm(self, framework, dtype):
        rng = np.random.default_rng(2)
        x, r, w = (normal(rng, *s, dtype=dtype) for s in ((9, 64), (9, 64), (64,)))
        bound = resolve(framework).bind()
        fused = bound.fused_add_rms_norm(*arrays(framework, x, r, w), 1e-6)
        total = bound.add(*arrays(framework, x, r))
        apart = bound.rms_norm(total, *arrays(framework, w), 1e-6)
        for a, b in zip(fused, (apart, total), strict=True):
            a, b = (np.asarray(y.float() if framework == "torch" else y) for y in (a, b))
            np.testing.assert_array_equal(a, b)

    def test_linear_with_and_without_bias(self, framework, dtype):
        rng = np.random.default_rng(3)
        x, w, b = (normal(rng, *s, dtype=dtype) for s in ((5, 70), (33, 70), (33,)))
        check(framework, "linear", x, w, b, ulp=8)
        check(framework, "linear", x, w, None, ulp=8)

    def test_rotary_of_a_part_of_the_head(self, framework, dtype):
        rng = np.random.default_rng(4)
        angles = rng.uniform(0, 7, (6, 12))
        q, k = normal(rng, 6, 4, 32, dtype=dtype), normal(rng, 6, 2, 32, dtype=dtype)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        check(framework, "rotary_embedding", q, k, cos, sin, ulp=4)

    def test_silu_and_mul(self, framework, dtype):
        rng = np.random.default_rng(5)
        check(framework, "silu_and_mul", normal(rng, 6, 50, dtype=dtype, scale=4.0), ulp=4)

    def test_embedding_is_exact(self, framework, dtype):
        rng = np.random.default_rng(6)
        table = normal(rng, 11, 8, dtype=dtype)
        ids = np.array([0, 10, 3, 3], np.int32)
        (got,) = run(framework, "embedding", ids, table)
        np.testing.assert_array_equal(got.astype(np.float32), table[ids].astype(np.float32))


def attention_case(rng, lengths, queries, heads, kv_heads, size, page, dtype, requests=None, tokens=None):
    """A paged cache with permuted pages, NaN in every slot that nothing may read, and padding behind."""
    order = sorted(range(len(lengths)), key=lambda i: queries[i] != 1)
    lengths, queries = [lengths[i] for i in order], [queries[i] for i in order]
    requests, tokens = requests or len(lengths), tokens or sum(queries)
    need = [-(-n // page) for n in lengths]
    pages = sum(need) + 3
    free = list(rng.permutation(pages - 1))
    kv = np.full((pages, page, 2 * kv_heads, size), np.nan, np.float32)
    table = np.zeros((requests, max(need) + 1), np.int32)
    for i, n in enumerate(lengths):
        for j in range(need[i]):
            table[i, j] = free.pop()
            used = min(page, n - j * page)
            kv[table[i, j], :used] = rng.normal(size=(used, 2 * kv_heads, size))
    start = np.full(requests + 1, sum(queries), np.int32)
    start[: len(queries)] = np.cumsum([0, *queries])[:-1]
    lens = np.zeros(requests, np.int32)
    lens[: len(lengths)] = lengths
    q = np.zeros((tokens, heads, size), np.float32)
    q[: sum(queries)] = rng.normal(size=(sum(queries), heads, size))
    counts = np.array([queries.count(1), len(lengths)], np.int32)
    return q.astype(dtype), kv.astype(dtype), table, start, lens, counts


CASES = {
    "decode": dict(lengths=[1, 16, 17, 100, 33], queries=[1] * 5, heads=4, kv_heads=2, size=32, page=16),
    "decode padded": dict(lengths=[5, 40], queries=[1, 1], heads=4, kv_heads=4, size=16, page=8, requests=8, tokens=8),
    "prefill": dict(lengths=[37], queries=[37], heads=6, kv_heads=1, size=96, page=16),
    "long prefill": dict(lengths=[300], queries=[300], heads=2, kv_heads=1, size=16, page=16),
    "chunk": dict(lengths=[150], queries=[20], heads=4, kv_heads=2, size=64, page=16),
    # With a window of 40, the oldest slot that is seen is 127: the last one of a block of 128.
    "a window's edge on a block's": dict(lengths=[167], queries=[1], heads=2, kv_heads=1, size=16, page=16),
    "mixed": dict(lengths=[9, 64, 130, 31, 7], queries=[1, 64, 2, 1, 7], heads=8, kv_heads=2, size=32, page=16),
    "mixed padded": dict(
        lengths=[9, 50, 3], queries=[1, 30, 3], heads=4, kv_heads=2, size=32, page=4, requests=8, tokens=64
    ),
    "more rows than tokens": dict(
        lengths=[9, 5], queries=[1, 5], heads=4, kv_heads=2, size=32, page=16, requests=32, tokens=16
    ),
}
STATIC = dict(scale=0.17, window=0, soft_cap=0.0)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", CASES)
class TestAttention:
    @pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
    @pytest.mark.parametrize("extra", [{}, {"window": 5}, {"window": 40}, {"soft_cap": 3.0}], ids=str)
    def test_against_the_oracle(self, framework, name, dtype, extra):
        case = attention_case(np.random.default_rng(7), dtype=dtype, **CASES[name])
        static = STATIC | extra | {"max_query_len": int(np.diff(case[3]).max())}
        # Two roundings in bfloat16: the weights and the output.
        check(framework, "paged_attention", *case, **static, ulp=2 if dtype != np.float32 else 16)

    def test_rows_of_no_request_are_zero(self, framework, name):
        case = attention_case(np.random.default_rng(8), dtype=np.float32, **CASES[name])
        real = int(case[3][-1])
        (got,) = run(framework, "paged_attention", *case, **STATIC, max_query_len=int(np.diff(case[3]).max()))
        assert not got[real:].any()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_write_kv_touches_its_slots_only(framework):
    rng = np.random.default_rng(9)
    kv = normal(rng, 5, 4, 6, 8)
    k, v = normal(rng, 7, 3, 8), normal(rng, 7, 3, 8)
    slots = np.array([3, 0, -1, 9, 15, -1, 4], np.int32)
    want = ORACLE.write_kv(kv, k, v, slots)
    (got,) = run(framework, "write_kv", kv.copy(), k, v, slots)
    np.testing.assert_array_equal(got.reshape(20, 6, 8)[:19], want.reshape(20, 6, 8)[:19])


def test_the_check_rejects_a_wrong_epsilon_and_a_skipped_tail():
    """The bound of `rms_norm` above must see these faults, or it proves nothing."""
    rng = np.random.default_rng(10)
    x, w = normal(rng, 8, 256) * np.float32(1e-2), normal(rng, 256)
    want = ORACLE.rms_norm(x.astype(np.float64), w.astype(np.float64), 1e-6)
    scale = np.abs(want).max(-1, keepdims=True)
    wrong = [
        ORACLE.rms_norm(x.astype(np.float64), w.astype(np.float64), 1e-5),
        x * w / np.sqrt((x[:, :-4].astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6),
        want * 1.001,
    ]
    for fault in wrong:
        assert (np.abs(fault - want) / scale).max() > 4 * np.finfo(np.float32).eps
