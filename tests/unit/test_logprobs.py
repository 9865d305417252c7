"""The log-probabilities of a step as a client gets them, against a definition row by row."""

from types import SimpleNamespace

import numpy as np
import pytest

from twinfer.shared.engine import LEAST_LOGPROB, Logprob, _wanted_logprobs
from twinfer.shared.step import TopLogprobs


def top_logprobs(rows, seed):
    """Of so many rows; some end in words that cannot come, the last is of one that was chosen."""
    rng = np.random.default_rng(seed)
    top = -np.sort(rng.exponential(3, (rows, 20)).astype(np.float32))
    top[1::3, 4:] = -np.inf
    ids = rng.permuted(np.tile(np.arange(100, dtype=np.int32), (rows, 1)), axis=1)[:, :20]
    chosen = top[:, 2].copy()
    chosen[-1] = -np.inf
    return TopLogprobs(chosen, rng.integers(1, 90, rows, np.int32), ids, top)


def row_by_row(top, row, token, count):
    logprobs = {token: Logprob(max(float(top.chosen[row]), LEAST_LOGPROB), int(top.rank[row]))}
    for place in range(count):
        value = max(float(top.top[row, place]), LEAST_LOGPROB)
        logprobs[int(top.top_ids[row, place])] = Logprob(value, place + 1)
    return logprobs


@pytest.mark.parametrize("wanted", [(5,), (0,), (20,), (None,), (None, 3), (0, 5, None, 20, 1) * 4])
def test_each_request_gets_the_numbers_of_its_row(wanted):
    top = top_logprobs(2 * len(wanted), len(wanted))
    rng = np.random.default_rng(1)
    indices = rng.permutation(2 * len(wanted))[: len(wanted)].tolist()
    tokens = [int(top.top_ids[index, 2]) for index in indices]
    requests = [SimpleNamespace(params=SimpleNamespace(logprobs=count)) for count in wanted]
    found = list(_wanted_logprobs(top, requests, tokens, indices))
    asked = [i for i, count in enumerate(wanted) if count is not None]
    expected = [row_by_row(top, indices[i], tokens[i], wanted[i]) for i in asked]
    assert found == expected
    # The token that came is first, also for OpenAI's clients.
    assert [next(iter(one)) for one in found] == [tokens[i] for i in asked]
    for one in found:
        assert all(type(token) is int for token in one)
        assert all(
            type(value.logprob) is float and type(value.rank) is int for value in one.values()
        )
