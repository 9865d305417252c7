"""`LLM` with the bundled model: text in and out, stop strings, several completions,
log-probabilities, bad input.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from twinfer import LLM, SamplingParams
from twinfer.shared.errors import ConfigError, RequestError
from twinfer.shared.models.locate import model_folder

from .test_batching import run_together, workload

PROMPT = "class Node:\n    def __init__(self"
GREEDY = {"temperature": 0.0, "max_tokens": 40}


OPTIONS = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "scheduling_policy": "priority",
}


@pytest.fixture(scope="module", params=["jax", "torch"])
def llm(request, device):
    options = OPTIONS
    if request.param == "jax":
        # Each more is compiled for seconds.
        options = options | {"decode_sizes": (4,), "mixed_sizes": (64,)}
    with LLM("demo", backend=request.param, device=device, progress=False, **options) as made:
        yield made
        assert made.engine.worker.compilations_after_ready() == 0
        made.engine.scheduler.check_integrity()
        assert made.engine.metrics().running == 0


REFUSED = pytest.mark.parametrize(
    "llm",
    [pytest.param("jax", marks=pytest.mark.slow), "torch"],
    indirect=True,
    scope="module",
)
"""What is refused before a worker hears of it."""


@pytest.fixture(scope="module")
def reference():
    """transformers on the same folder: (tokenizer, model in float32)."""
    import torch
    import transformers

    folder = model_folder("demo")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return transformers.AutoTokenizer.from_pretrained(folder), model.eval()


def test_greedy_text_equals_transformers(llm, reference):
    import torch

    tokenizer, model = reference
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        want = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40
        )
    (got,) = llm.generate(PROMPT, SamplingParams(**GREEDY), progress=False)
    assert got.prompt_token_ids == ids[0].tolist()
    assert got.outputs[0].token_ids == want[0, ids.shape[1] :].tolist()
    assert got.outputs[0].text == tokenizer.decode(want[0, ids.shape[1] :])
    assert "self.name = name" in got.outputs[0].text


def test_log_probabilities_equal_those_of_transformers(llm, reference):
    import torch

    _, model = reference
    params = SamplingParams(**GREEDY | {"max_tokens": 6}, logprobs=3, prompt_logprobs=2)
    # Longer than a step of 64 tokens, so that the prompt comes in chunks.
    (got,) = llm.generate(PROMPT * 10, params, progress=False)
    ids, out = got.prompt_token_ids, got.outputs[0]
    assert len(ids) > 64
    with torch.no_grad():
        want = torch.log_softmax(
            model(torch.tensor([ids + out.token_ids])).logits[0].double(), -1
        ).numpy()
    assert got.prompt_logprobs[0] is None
    for position in range(1, len(ids)):
        row, best = want[position - 1], got.prompt_logprobs[position]
        assert best[ids[position]].logprob == pytest.approx(row[ids[position]], abs=1e-4)
        assert best[ids[position]].rank == 1 + int((row > row[ids[position]]).sum())
        assert {t for t in best if t != ids[position]} <= set(np.argsort(-row)[:2].tolist())
    for i, token in enumerate(out.token_ids):
        row, best = want[len(ids) - 1 + i], out.logprobs[i]
        assert next(iter(best)) == token
        assert best[token].rank == 1
        assert len(best) == 3
        for t, entry in best.items():
            assert entry.logprob == pytest.approx(row[t], abs=1e-4)
    assert out.cumulative_logprob == pytest.approx(
        sum(b[t].logprob for t, b in zip(out.token_ids, out.logprobs, strict=True))
    )


def test_stop_strings_end_the_text_and_the_request(llm):
    full = llm.generate(PROMPT, SamplingParams(**GREEDY), progress=False)[0].outputs[0]
    stop = "self.value"
    assert stop in full.text
    for include in (False, True):
        params = SamplingParams(
            **GREEDY, stop=("nowhere to be found", stop), include_stop_str_in_output=include
        )
        out = llm.generate(PROMPT, params, progress=False)[0].outputs[0]
        assert out.text == full.text[: full.text.index(stop) + (len(stop) if include else 0)]
        assert (out.finish_reason, out.stop_reason) == ("stop", stop)
        assert out.token_ids == full.token_ids[: len(out.token_ids)]
        assert len(out.token_ids) < len(full.token_ids)


def test_stop_token_ids_and_min_tokens(llm):
    full = llm.generate(PROMPT, SamplingParams(**GREEDY), progress=False)[0].outputs[0].token_ids
    stop = full[5]
    out = llm.generate(PROMPT, SamplingParams(**GREEDY, stop_token_ids=(stop,)), progress=False)[
        0
    ].outputs[0]
    assert out.token_ids == full[: full.index(stop) + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    later = SamplingParams(**GREEDY, stop_token_ids=(stop,), min_tokens=12)
    out = llm.generate(PROMPT, later, progress=False)[0].outputs[0]
    assert len(out.token_ids) >= 12
    assert stop not in out.token_ids[:12]


def test_several_completions_differ_from_each_other_and_repeat_with_the_seed(llm):
    params = SamplingParams(temperature=1.0, max_tokens=12, n=4, seed=7)
    first, again = (llm.generate(PROMPT, params, progress=False)[0] for _ in range(2))
    texts = [out.token_ids for out in first.outputs]
    assert len({tuple(t) for t in texts}) > 1
    assert texts == [out.token_ids for out in again.outputs]
    assert [out.index for out in first.outputs] == [0, 1, 2, 3]
    alone = llm.generate(
        PROMPT, SamplingParams(temperature=1.0, max_tokens=12, seed=7), progress=False
    )[0]
    assert alone.outputs[0].token_ids == texts[0]


@pytest.mark.parametrize("llm", ["jax"], indirect=True, scope="module")
def test_both_workers_draw_the_same_tokens(llm, device):
    """With settings of all kinds; test_batching.py has more requests, of another model."""
    requests = workload(llm.engine.model.vocab_size)[:12]
    found = run_together(llm.engine, requests)
    with LLM("demo", backend="torch", device=device, progress=False, **OPTIONS) as other:
        assert run_together(other.engine, requests) == found


def test_without_a_seed_two_requests_differ(llm):
    params = SamplingParams(temperature=1.5, max_tokens=12)
    a, b = llm.generate([PROMPT, PROMPT], params, progress=False)
    assert a.outputs[0].token_ids != b.outputs[0].token_ids


def test_allowed_and_banned_tokens_and_bias(llm):
    allowed = (5, 9, 77)
    params = SamplingParams(
        temperature=1.0, max_tokens=20, seed=1, allowed_token_ids=allowed, ignore_eos=True
    )
    out = llm.generate(PROMPT, params, progress=False)[0].outputs[0].token_ids
    assert set(out) <= set(allowed)
    greedy = llm.generate(PROMPT, SamplingParams(**GREEDY), progress=False)[0].outputs[0].token_ids
    banned = SamplingParams(**GREEDY, banned_token_ids=(greedy[0],))
    assert llm.generate(PROMPT, banned, progress=False)[0].outputs[0].token_ids[0] != greedy[0]
    biased = SamplingParams(temperature=0.0, max_tokens=3, logit_bias={42: 100.0}, ignore_eos=True)
    assert llm.generate(PROMPT, biased, progress=False)[0].outputs[0].token_ids == [42, 42, 42]


def test_a_strong_penalty_stops_repetition(llm):
    prompt = "import time\n" * 4
    plain = llm.generate(prompt, SamplingParams(**GREEDY), progress=False)[0].outputs[0].token_ids
    params = SamplingParams(**GREEDY, frequency_penalty=2.0, presence_penalty=2.0)
    penalised = llm.generate(prompt, params, progress=False)[0].outputs[0].token_ids
    assert len(set(penalised)) > len(set(plain))


def test_prompts_of_all_kinds(llm):
    ids = llm.tokenizer.encode(PROMPT)
    kinds = [
        PROMPT,
        ids,
        {"prompt": PROMPT},
        {"prompt_token_ids": ids, "cache_salt": "a", "priority": 3},
    ]
    texts = [
        o.outputs[0].text for o in llm.generate(kinds, SamplingParams(**GREEDY), progress=False)
    ]
    assert len(set(texts)) == 1
    assert (
        llm.generate(ids, SamplingParams(**GREEDY), progress=False)[0].outputs[0].text == texts[0]
    )


def test_chat_renders_the_template(llm):
    messages = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "what is a list?"},
    ]
    (got,) = llm.chat(messages, SamplingParams(**GREEDY), progress=False)
    assert got.prompt == "# system: be short\n# user: what is a list?\n# assistant:"
    assert got.outputs[0].text


@REFUSED
@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        ([5, 2048], {}, "prompt"),
        ([5, -1], {}, "prompt"),
        ("x" * 4000, {}, "prompt"),
        ({"text": "x"}, {}, "prompt"),
        ("x", {"logit_bias": {2048: 1.0}}, "logit_bias"),
        ("x", {"stop_token_ids": (9999,)}, "stop_token_ids"),
    ],
    ids=str,
)
def test_a_bad_request_ends_alone(llm, prompt, options, field):
    batch = [PROMPT, prompt, PROMPT]
    params = [
        SamplingParams(**GREEDY),
        SamplingParams(**GREEDY | options),
        SamplingParams(**GREEDY),
    ]
    good, bad, also_good = llm.generate(batch, params, progress=False, return_errors=True)
    assert isinstance(bad.error, RequestError)
    assert field in str(bad.error)
    assert "\n" not in str(bad.error)
    assert good.outputs[0].text == also_good.outputs[0].text != ""
    with pytest.raises(RequestError):
        llm.generate(batch, params, progress=False)
    assert llm.engine.metrics().running == llm.engine.metrics().waiting == 0


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8"},
        {"max_model_len": 0},
        {"max_model_len": 10**6},
        {"page_size": 3},
        {"page_size": 16.0},
        {"decode_steps": 4.0},
        {"enable_ops": None},
        {"num_pages": 8, "kv_cache_memory": 1 << 30},
        {"generation_config": "vllm"},
        {"device": "cuda:x"},
        {"max_model_len": 1},
        {"max_num_seqs": 100_000},
        {"num_pages": 10**12},
        {"memory_utilization": True},
        {"scan_layers": "yes", "backend": "jax"},
        {"op_priority": 5},
        {"enable_ops": "all"},
        {"enable_ops": ()},
        {"enable_ops": ("all", "none")},
        {"max_modle_len": 5},
        {"kv_cache_memory": 10},
        {"backend": "mxnet"},
        {"op_priority": {"rms_norm": ("cutlass",)}},
        {"op_priority": {"rms": ("native",)}},
    ],
    ids=str,
)
def test_a_bad_option_is_named(options):
    with pytest.raises(ConfigError) as error:
        LLM("demo", progress=False, **{"backend": "torch"} | options)
    name = next(iter(options))
    assert name in str(error.value)
    if name == "max_modle_len":
        assert "max_model_len" in str(error.value)


@pytest.mark.parametrize("name", ["tokenizer", "demand", "progress"])
def test_what_is_no_option_of_the_engine_is_checked_too(name):
    """A path is no tokenizer: the one that is used lies beside the weights."""
    with pytest.raises(ConfigError, match=rf"^{name}: got 'demo', allowed "):
        LLM("demo", backend="torch", **{"progress": False} | {name: "demo"})


@REFUSED
def test_arguments_of_a_call_are_checked_before_it_runs(llm):
    for name, words in (
        ("on_finish", "allowed is a function of a RequestOutput"),
        ("return_errors", "allowed are true and false"),
        ("progress", "allowed are true and false"),
    ):
        with pytest.raises(RequestError, match=rf"^{name}: got 'no', {words}"):
            llm.generate("a", SamplingParams(**GREEDY), **{"progress": False} | {name: "no"})
    with pytest.raises(RequestError, match=r"^return_errors: got 'no', allowed are true and false"):
        next(llm.stream("a", SamplingParams(**GREEDY), return_errors="no"))


@REFUSED
def test_a_refused_prompt_among_several_is_named_by_its_number(llm):
    with pytest.raises(RequestError, match=r"^prompt 1: prompt: is empty") as caught:
        llm.generate(["a", "", "b"], SamplingParams(**GREEDY), progress=False)
    assert caught.value.field == "prompt"
    with pytest.raises(RequestError, match=r"^prompt 0: prompt: got int, must be a list"):
        llm.generate([1, 2.0], SamplingParams(**GREEDY), progress=False)


def test_config_json_is_written_by_no_one(llm):
    """The engine reads the model folder and writes nothing there."""
    before = {p.name: p.stat().st_mtime_ns for p in Path(model_folder("demo")).iterdir()}
    llm.generate(PROMPT, SamplingParams(**GREEDY), progress=False)
    assert before == {p.name: p.stat().st_mtime_ns for p in Path(model_folder("demo")).iterdir()}
    assert (
        json.loads((Path(model_folder("demo")) / "config.json").read_text())["vocab_size"] == 2048
    )


def test_the_last_text_is_what_the_tokens_say(llm):
    """Text of an end token is left out, special tokens are skipped or shown, incomplete bytes
    come at the end.
    """
    decode = llm.tokenizer.decode
    full = llm.generate(PROMPT, SamplingParams(**GREEDY), progress=False)[0].outputs[0].token_ids
    stopped = llm.generate(
        PROMPT, SamplingParams(**GREEDY, stop_token_ids=(full[5],)), progress=False
    )[0].outputs[0]
    assert stopped.text == decode(stopped.token_ids[:-1]) != decode(stopped.token_ids)
    (eos,) = llm.engine.model.eos_token_ids
    only_eos = {
        "temperature": 0.0,
        "max_tokens": 2,
        "ignore_eos": True,
        "allowed_token_ids": (eos,),
    }
    for skip, text in ((True, ""), (False, "<|endoftext|>" * 2)):
        params = SamplingParams(**only_eos, skip_special_tokens=skip)
        assert llm.generate(PROMPT, params, progress=False)[0].outputs[0].text == text
    lead = llm.tokenizer.encode("🙂")[0]
    params = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=(lead,))
    out = llm.generate(PROMPT, params, progress=False)[0].outputs[0]
    assert out.text == decode([lead]) == "\ufffd"


def test_a_stop_string_counts_after_min_tokens_and_ends_the_request(llm):
    params = SamplingParams(**GREEDY | {"max_tokens": 200}, stop=("\n",), min_tokens=8)
    out = llm.generate(PROMPT, params, progress=False)[0].outputs[0]
    assert 8 <= len(out.token_ids) < 150
    assert llm.engine.metrics().running == 0
    assert not llm.engine.scheduler.requests


def test_salt_and_priority_reach_the_engine(llm):
    seen = []
    prompt = {"prompt_token_ids": list(range(100, 150)), "priority": 7}
    add = llm.engine.add
    llm.engine.add = lambda *args, **options: seen.append(options) or add(*args, **options)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    try:
        outputs = [
            llm.generate({**prompt, "cache_salt": salt}, params, progress=False)[0]
            for salt in ("a", "a", "b", None)
        ]
    finally:
        llm.engine.add = add
    assert [out.num_cached_tokens for out in outputs] == [0, 48, 0, 0]
    assert seen == [{"cache_salt": salt, "priority": 7} for salt in "aab"] + [{"priority": 7}]


def test_an_exception_in_the_middle_leaves_nothing_behind(llm):
    def fail(output):
        raise KeyError("mine")

    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (2, 100)]
    with pytest.raises(KeyError, match="mine"):
        llm.generate([PROMPT, PROMPT], params, progress=False, on_finish=fail)
    assert not llm.engine.scheduler.requests
    assert llm.generate(PROMPT, SamplingParams(**GREEDY), progress=False)[0].outputs[0].text


def test_requests_aborted_from_outside_come_back(llm):
    def abort_all(output):
        for request_id in list(llm.engine.scheduler.requests):
            llm.engine.abort(request_id)

    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 60, 60)]
    outputs = llm.generate([PROMPT] * 3, params, progress=False, on_finish=abort_all)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "abort", "abort"]


def test_generate_cannot_run_inside_itself(llm):
    def nested(output):
        llm.generate(PROMPT, SamplingParams(**GREEDY), progress=False)

    with pytest.raises(RequestError, match="running already"):
        llm.generate(
            PROMPT, SamplingParams(temperature=0.0, max_tokens=2), progress=False, on_finish=nested
        )


@REFUSED
@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([1.0, 2.0], {}),
        ([True, 5], {}),
        (b"abc", {}),
        ([2**70], {}),
        ([[3, [4]]], {}),
        ({"prompt": 5}, {}),
        ({"prompt_token_ids": 5}, {}),
        (None, {}),
        ([2**63], {}),
        ([np.uint64(2**63)], {}),
        (np.array([5, 2**63], np.uint64), {}),
        ({"prompt_token_ids": "abc"}, {}),
        ({"prompt": "x", "priority": "x"}, {}),
        ({"prompt": "x", "priority": 1.5}, {}),
        ({"prompt": "x", "cache_salt": 5}, {}),
        ("x", {"banned_token_ids": tuple(range(1, 2048)), "min_tokens": 2}),
    ],
    ids=str,
)
def test_odd_requests_are_refused_alone(llm, prompt, options):
    params = [SamplingParams(**GREEDY), SamplingParams(**GREEDY | options)]
    good, bad = llm.generate([PROMPT, prompt], params, progress=False, return_errors=True)
    assert isinstance(bad.error, RequestError)
    assert "\n" not in str(bad.error)
    assert good.outputs[0].text
    assert not llm.engine.scheduler.requests


@REFUSED
@pytest.mark.parametrize(
    "prompt", [[2**63], [np.uint64(2**63)], np.array([5, 2**63], np.uint64)], ids=str
)
def test_a_huge_token_is_named_as_it_was_given(llm, prompt):
    with pytest.raises(RequestError, match="token id 9223372036854775808 is out of range"):
        llm.generate([prompt], progress=False)
    assert (
        len(llm.generate(np.array([5, 6], np.uint64), SamplingParams(max_tokens=1), progress=False))
        == 1
    )


@REFUSED
def test_none_is_no_prompt(llm):
    """Of a tokenizer that begins texts with a token of its own, it once was an empty text, and
    was completed.
    """
    for batch in ([None], [PROMPT, None]):
        with pytest.raises(
            RequestError, match="prompt: got None, must be text, token ids, or a mapping"
        ):
            llm.generate(batch, progress=False)


def test_a_stream_brings_what_generate_does(llm):
    prompts = [PROMPT, "import os\n"]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=20, n=2, logprobs=1, stop="return")
    want = llm.generate(prompts, params, progress=False)
    texts, ids, ends, counts = {}, {}, {}, []
    for update in llm.stream(prompts, params):
        place = update.index, update.completion
        assert place not in ends, "an update after the last one"
        texts[place] = texts.get(place, "") + update.text
        ids.setdefault(place, []).extend(update.token_ids)
        assert [next(iter(best)) for best in update.logprobs] == update.token_ids
        assert texts[place] == update.output.outputs[update.completion].text
        if update.finish_reason is not None:
            ends[place] = update.finish_reason, update.stop_reason
        counts.append(len(llm.engine.scheduler.requests))
    for index, output in enumerate(want):
        for completion in output.outputs:
            place = index, completion.index
            assert (texts[place], ids[place]) == (completion.text, completion.token_ids)
            assert ends[place] == (completion.finish_reason, completion.stop_reason)
    assert counts[0] == 4, "text came when all had ended"


def test_closing_a_stream_aborts_its_requests(llm):
    params = SamplingParams(**GREEDY, ignore_eos=True)
    stream = llm.stream([PROMPT, PROMPT], params)
    assert not llm.engine.scheduler.requests, "nothing runs before it is asked for"
    next(stream)
    assert len(llm.engine.scheduler.requests) == 2
    with pytest.raises(RequestError, match="close the stream first"):
        llm.generate(PROMPT, params, progress=False)
    stream.close()
    assert not llm.engine.scheduler.requests
    for _ in llm.stream(PROMPT, params):
        break
    assert not llm.engine.scheduler.requests
    assert llm.generate(PROMPT, SamplingParams(**GREEDY), progress=False)[0].outputs[0].text


def test_a_stream_says_what_was_refused(llm):
    params = SamplingParams(temperature=0.0, max_tokens=2)
    updates = list(llm.stream([PROMPT, "", PROMPT], params, return_errors=True))
    (refused,) = [update for update in updates if update.error is not None]
    assert (refused.index, refused.output.outputs, refused.token_ids) == (1, [], [])
    assert {update.index for update in updates} == {0, 1, 2}
    with pytest.raises(RequestError, match="prompt: is empty"):
        list(llm.stream([PROMPT, ""], params))
    assert not llm.engine.scheduler.requests


MESSAGES = [
    {"role": "user", "content": "what is a list?"},
    {"role": "assistant", "content": "A list is "},
]
TEMPLATE = """{{ tools | length if tools else 'none' }} {{ style is defined and style }}
{%- for m in messages %}|{{ m.content }}{% endfor %}{{ '>' if add_generation_prompt }}"""


def test_chat_takes_what_a_template_reads(llm):
    def prompt(**options):
        (output,) = llm.chat(MESSAGES, SamplingParams(max_tokens=1), progress=False, **options)
        return output.prompt

    whole = "# user: what is a list?\n# assistant: A list is \n"
    assert prompt() == whole + "# assistant:"
    assert prompt(add_generation_prompt=False) == whole
    assert (
        prompt(add_generation_prompt=False, continue_final_message=True)
        == "# user: what is a list?\n# assistant: A list is "
    )
    assert prompt(chat_template=TEMPLATE) == "none False|what is a list?|A list is >"
    tools = [{"type": "function", "function": {"name": "f"}}]
    variables = {"style": "short"}
    told = prompt(
        chat_template=TEMPLATE,
        tools=tools,
        chat_template_kwargs=variables,
        add_generation_prompt=False,
    )
    assert told == "1 short|what is a list?|A list is "
    streamed = list(llm.stream(llm.chat_prompts(MESSAGES), SamplingParams(max_tokens=1)))
    assert streamed[0].output.prompt == prompt()


@REFUSED
@pytest.mark.parametrize(
    ("messages", "options", "field"),
    [
        (None, {}, "messages"),
        ({"role": "user", "content": "x"}, {}, "messages"),
        ("hi", {}, "messages"),
        (["hi"], {}, "messages"),
        ([MESSAGES, "hi"], {}, "messages"),
        ([*MESSAGES, "hi"], {}, "messages[2]"),
        (MESSAGES, {"tools": {"type": "function"}}, "tools"),
        (MESSAGES, {"chat_template": 5}, "chat_template"),
        (MESSAGES, {"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        (MESSAGES, {"add_generation_prompt": "no"}, "add_generation_prompt"),
        (MESSAGES, {"continue_final_message": 1}, "continue_final_message"),
        (MESSAGES, {"continue_final_message": True}, "continue_final_message"),
    ],
    ids=str,
)
def test_odd_conversations_are_refused(llm, messages, options, field):
    with pytest.raises(RequestError) as refused:
        llm.chat(messages, progress=False, **options)
    assert refused.value.field == field


def test_one_bad_conversation_among_good_ones(llm):
    conversations = [MESSAGES, [{"content": "who?"}], MESSAGES]
    params = SamplingParams(max_tokens=1)
    good, bad, also_good = llm.chat(conversations, params, progress=False, return_errors=True)
    assert bad.error.field == "messages[0].role"
    assert good.outputs
    assert also_good.outputs
    with pytest.raises(RequestError, match="role"):
        llm.chat(conversations, params, progress=False)


def test_numbers_and_arrays_of_numpy_are_taken(llm):
    ids = np.array(llm.tokenizer.encode(PROMPT))
    params = SamplingParams(temperature=np.float32(0), max_tokens=np.int64(5), seed=np.int64(3))
    assert hash(params) == hash(SamplingParams(temperature=0.0, max_tokens=5, seed=3))
    outputs = llm.generate(ids, params, progress=False) + llm.generate(
        list(ids), params, progress=False
    )
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    with pytest.raises(RequestError, match="must be integers"):
        llm.generate(np.array(5), params, progress=False)
    for wrong in (None, {"n": 1}, "x"):
        if wrong is not None:
            with pytest.raises(RequestError, match=r"^sampling_params: "):
                llm.generate(PROMPT, wrong, progress=False)
        with pytest.raises(RequestError, match=r"^sampling_params: "):
            llm.generate([PROMPT], [wrong], progress=False)
    with pytest.raises(RequestError, match=r"^sampling_params: got 1 for 2 prompts"):
        llm.generate([PROMPT, PROMPT], [params], progress=False)
