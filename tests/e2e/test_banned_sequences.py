"""Sequences that an output may not have: against the same tokens one call at a time, each of which
bans what would complete one; on both workers.
"""

from dataclasses import replace
from itertools import chain, pairwise

import pytest

from twinfer.serving.llm import LLM
from twinfer.shared.banned_sequences import BannedSequences
from twinfer.shared.errors import RequestError
from twinfer.shared.sampling_params import SamplingParams

SIZES = {"max_model_len": 256, "max_num_seqs": 16, "page_size": 16, "dtype": "float32"}
PROMPTS = ["x = ", "def f(", "import ", "# "]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["torch", pytest.param("jax", marks=pytest.mark.slow)])
def llm(request):
    with LLM("demo", backend=request.param, device="cpu", progress=False, **SIZES) as it:
        yield it


def outputs(llm, prompts, settings):
    return [o.outputs[0] for o in llm.generate(prompts, settings, progress=False)]


def tokens(llm, prompts, settings):
    return [output.token_ids for output in outputs(llm, prompts, settings)]


def one_by_one(llm, prompt, params):
    """What is the most probable each time, of all that completes no sequence."""
    ids, found = llm.tokenizer.encode(prompt), []
    for _ in range(params.max_tokens):
        ends = [
            one[-1]
            for one in params.banned_sequences
            if found[max(0, len(found) + 1 - len(one)) :] == [*one[:-1]]
        ]
        step = replace(params, max_tokens=1, banned_token_ids=ends, banned_sequences=())
        ((token,),) = tokens(llm, [ids + found], step)
        found.append(token)
    return found


def bans(free):
    """Pairs, threes and fives of what a model writes freely, so that each of them matters."""
    return [
        (tuple(one[2:4]), tuple(one[6:9]), tuple(one[7:9]), tuple(one[11:16]), (one[20], one[20]))
        for one in free
    ]


def test_bad_words_are_the_tokens_that_they_have(llm):
    """As a text begins with each, and behind a space; of the same settings and of others."""
    encode = llm.tokenizer.encode
    free = outputs(llm, PROMPTS, GREEDY)
    words = [[w for w in one.text.split() if len(w) < 20][:9] for one in free]
    settings = [replace(GREEDY, bad_words=one) for one in words]
    found = tokens(llm, PROMPTS, settings)
    for ids, one in zip(found, words, strict=True):
        sequences = {tuple(encode(text)) for word in one for text in (word, f" {word}")}
        assert {len(sequence) > 1 for sequence in sequences} == {False, True}
        assert all(
            sequence != tuple(ids[place : place + len(sequence)])
            for sequence in sequences
            for place in range(len(ids))
        )
    assert found != [one.token_ids for one in free]
    assert found[:1] * 3 == tokens(llm, PROMPTS[:1] * 3, settings[0])
    (streamed,) = [
        [token for update in llm.stream(PROMPTS[0], settings[0]) for token in update.token_ids]
    ]
    assert streamed == found[0]
    spaced = replace(GREEDY, bad_words=[f" {word}" for word in words[0]])
    assert tokens(llm, PROMPTS[:1], spaced) == found[:1]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["a", ""], "has an entry of 0 characters"),
        (["a" * 257], "has an entry of 257 characters"),
        (["a"] * 513, "has 513 entries, at most 512"),
        (["a", 5], "allowed is at most 512 texts"),
        (["\U0010ffff" * 100], "has a text of 401 tokens, at most 64"),
        (["\ud800"], "is not valid Unicode"),
        ([f"{i}<>" for i in range(512)], "at most 1024"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_words_have_the_bounds_of_the_server(llm, words, why):
    with pytest.raises(RequestError, match=f"^bad_words: .*{why}"):
        llm.generate("x", replace(GREEDY, bad_words=words, banned_sequences=((1, 2),)))


def test_bad_words_need_a_tokenizer(llm, monkeypatch):
    with pytest.raises(RequestError, match=r"^bad_words: are texts, and an engine knows token ids"):
        llm.engine.add("0", [1, 2], replace(GREEDY, bad_words=["a"]))
    monkeypatch.setattr(llm, "tokenizer", None)
    with pytest.raises(RequestError, match=r"^bad_words: the model folder has no tokenizer.json"):
        llm.generate([[1, 2]], replace(GREEDY, bad_words=["a"]))


FEW_PAGES = {"num_pages": 12, "max_model_len": 64}


@pytest.mark.parametrize(
    "engines",
    [
        [FEW_PAGES | {"decode_steps": 4}],
        pytest.param(
            [FEW_PAGES, {"async_scheduling": False}, {"decode_steps": 4}], marks=pytest.mark.slow
        ),
    ],
)
def test_the_best_of_what_completes_none(llm, engines):
    """Alone and together, also among texts with a form and texts that are free."""
    free = tokens(llm, PROMPTS, GREEDY)
    settings = [replace(GREEDY, banned_sequences=one) for one in bans(free)]
    expected = [one_by_one(llm, p, s) for p, s in zip(PROMPTS, settings, strict=True)]
    assert [tokens(llm, [p], s)[0] for p, s in zip(PROMPTS, settings, strict=True)] == expected
    assert all(one != other for one, other in zip(expected, free, strict=True))
    form = SamplingParams(temperature=0, max_tokens=9, structured_outputs={"regex": "[a-f]{9,}"})
    plain = SamplingParams(temperature=0.8, seed=3, max_tokens=30)
    biased = [replace(one, logit_bias={300: 3.0}, frequency_penalty=0.5) for one in settings]
    alone = [tokens(llm, PROMPTS[:1], one)[0] for one in (form, plain, *biased)]
    mixed = [*settings, form, plain, *biased]
    found = tokens(llm, PROMPTS + PROMPTS[:1] * 6, mixed)
    assert found == expected + alone
    backend = llm.engine.config.backend
    for more in engines:
        options = {"backend": backend, "device": "cpu", "progress": False} | SIZES | more
        with LLM("demo", **options) as other:
            assert tokens(other, PROMPTS + PROMPTS[:1] * 6, mixed) == found
            assert "num_pages" not in more or other.engine.metrics().preemptions > 0
            assert not other.engine._matched


def test_a_token_that_is_taken_late_is_seen(llm, monkeypatch):
    """Else the test above could not fail."""
    free = tokens(llm, PROMPTS[:1], GREEDY)
    params = replace(GREEDY, banned_sequences=bans(free)[0])
    expected, take, held = one_by_one(llm, PROMPTS[0], params), BannedSequences.take, []

    def late(self, token):
        held.append(token)
        if held[1:]:
            take(self, held.pop(0))

    monkeypatch.setattr(BannedSequences, "take", late)
    assert tokens(llm, PROMPTS[:1], params) != [expected]


def test_no_draw_has_one(llm):
    (free,) = tokens(llm, PROMPTS[:1], replace(GREEDY, max_tokens=100))
    pairs = tuple(set(pairwise(free)))
    settings = [
        SamplingParams(temperature=0.5, seed=seed, max_tokens=60, banned_sequences=pairs)
        for seed in range(8)
    ]
    found = tokens(llm, PROMPTS[:1] * 8, settings)
    assert not set(chain(*map(pairwise, found))) & set(pairs)
    assert len(set(map(tuple, found))) == 8


def test_with_a_form_and_with_min_tokens(llm):
    """Both bind."""
    a, b = (llm.tokenizer.encode(one)[0] for one in "ab")
    form = {"regex": "[ab]{12}"}
    letters = {"allowed_token_ids": (a, b), "max_tokens": 12, "temperature": 1.0}
    both = [
        SamplingParams(
            structured_outputs=form, banned_sequences=((a, a), (b, b, b)), seed=seed, **letters
        )
        for seed in range(6)
    ]
    for output in outputs(llm, ["x"] * 6, both):
        assert len(output.text) == 12
        assert "aa" not in output.text
        assert "bbb" not in output.text
    stops = SamplingParams(
        stop_token_ids=(b,), min_tokens=5, banned_sequences=((b, a),), seed=2, **letters
    )
    (output,) = outputs(llm, ["x"], stops)
    assert output.token_ids[:5] == [a] * 5


@pytest.mark.parametrize("form", [None, {"regex": "a+"}])
def test_where_no_token_is_left_that_request_alone_ends(form, llm):
    (a,) = llm.tokenizer.encode("a")
    stuck = SamplingParams(
        allowed_token_ids=(a,), banned_sequences=((a, a, a),), structured_outputs=form
    )
    others = [replace(GREEDY, banned_sequences=((a, a),)), GREEDY]
    alone = [tokens(llm, ["x = "], one)[0] for one in others]
    bad, *good = outputs(llm, ["x = "] * 3, [stuck, *others])
    assert (bad.finish_reason, bad.token_ids) == ("error", [a, a])
    assert "no token was left" in bad.stop_reason
    assert "structured_outputs" not in bad.stop_reason  # which not all have given
    assert [one.token_ids for one in good] == alone
    assert tokens(llm, ["x = "], GREEDY) == alone[1:]


def test_tokens_that_no_vocabulary_has(llm):
    size = llm.engine.model.vocab_size
    with pytest.raises(RequestError, match=f"banned_sequences: token id {size} is out of range"):
        llm.generate(["x"], SamplingParams(banned_sequences=((1, size),)), progress=False)
