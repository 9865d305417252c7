"""`twinfer numerics logits`: ends against a backend, transformers, and a server of the OpenAI
API.
"""

import json

import ml_dtypes
import numpy as np
import pytest

from twinfer.numerics.errors import NotComparable
from twinfer.numerics.faults.catalogue import plant
from twinfer.numerics.judging.logits_metrics import compare_logits
from twinfer.numerics.judging.metrics import log_softmax
from twinfer.numerics.judging.server_metrics import judge_server, named_row
from twinfer.numerics.questions.logits import compare_ends, load_transformers, parse_side
from twinfer.numerics.sides.steps import default_prompts
from twinfer.numerics.sides.subject import open_subject, parse_target
from twinfer.serving.cli import main
from twinfer.shared.errors import ConfigError

from .completions_server import Server

TORCH = parse_target("torch:cpu:compile_level=0")
PROMPTS = [np.arange(3, 40, dtype=np.int32), np.asarray([7, 8, 9, 10, 11], np.int32)]


@pytest.fixture(scope="module")
def subject(small_model):
    return open_subject(small_model, load_format="dummy", dtype="float32")


def test_transformers_computes_the_same(subject):
    diff = compare_ends(subject, [TORCH, "transformers"], PROMPTS)
    diff.assert_ok()
    assert diff.sides == ("a torch:cpu:compile_level=0", "b transformers")
    assert {f.side for f in diff.findings} == set(diff.sides)
    assert sum(entry.rows for entry in diff.logits) == sum(len(ids) - 1 for ids in PROMPTS)


PHI3 = {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 96}
PHI3 |= {
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.5, 2.0],
        "long_factor": [1.0, 4.0, 9.0],
    }
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.22,
    "logits_scaling": 16,
}


def subject_of(folder, architecture, fields, **options):
    config = {
        "architectures": [architecture],
        "vocab_size": 200,
        "hidden_size": 32,
        "intermediate_size": 48,
    }
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "max_position_embeddings": 128,
    }
    config |= {
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if "text_config" in fields:
        config = {name: config[name] for name in ("architectures", "tie_word_embeddings")}
    (folder / "config.json").write_text(json.dumps(config | fields))
    return open_subject(str(folder), load_format="dummy", dtype="float32", **options)


def mistral3():
    """A config of several parts, whose text model transformers finds by a class of its own."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = {
        "vocab_size": 200,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    text |= {"model_type": "mistral", "sliding_window": None}
    config = {
        "text_config": text,
        "vision_config": sizes | {"model_type": "pixtral"},
        "image_token_index": 199,
    }
    return config | {"model_type": "mistral3"}


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("Phi3ForCausalLM", PHI3),
        ("GraniteForCausalLM", GRANITE),
        ("Mistral3ForConditionalGeneration", mistral3()),
    ],
)
def test_transformers_gets_the_same_weights_under_their_names(tmp_path, architecture, fields):
    """Rows of one tensor are put together again, and what was multiplied when loaded is divided."""
    where = subject_of(tmp_path, architecture, fields, max_model_len=96)
    compare_ends(where, [TORCH, "transformers"], PROMPTS).assert_ok()


def test_prompts_that_transformers_rotates_otherwise_are_refused(tmp_path):
    where = subject_of(tmp_path, "Phi3ForCausalLM", PHI3, max_model_len=97)
    with pytest.raises(
        ConfigError, match="max_model_len: got 97, and a prompt of 5 tokens; allowed is at most 96"
    ):
        compare_ends(where, [TORCH, "transformers"], PROMPTS)


def test_a_fault_of_ours_shows_against_transformers(subject):
    fault = plant("attention-scale-1e-2", subject.model)
    diff = compare_ends(subject, [TORCH, "transformers"], PROMPTS, faults={"a": fault})
    assert diff.exit_code == 1
    assert {f.side[0] for f in diff.failures} == {"a"}


def through_transformers(subject, scale=1.0, rounded=False, rope=1.0, known=None):
    """Logits [position vocab] of token ids, by transformers with a head in float32; or, wrong:
    scaled, rounded to bfloat16, or of other rotary frequencies.

    `known` keeps, for who asks the same again, what is neither scaled nor rounded.
    """
    made = {} if known is None else known
    if rope not in made:
        made[rope] = (unscaled(subject, rope), {})
    compute, rows = made[rope]

    def logits(ids):
        prefixes = [tuple(ids[: i + 1]) for i in range(len(ids))]
        if not all(prefix in rows for prefix in prefixes):
            for prefix, row in zip(prefixes, compute(ids), strict=True):
                rows.setdefault(prefix, row)
        found = np.stack([rows[prefix] for prefix in prefixes]) * np.float32(scale)
        return narrow(found) if rounded else found

    return logits


def unscaled(subject, rope):
    import torch

    model = load_transformers(subject)
    model.model.rotary_emb.inv_freq *= rope
    head = model.get_output_embeddings().weight.float()

    def logits(ids):
        with torch.inference_mode():
            hidden = model.model(torch.tensor([list(ids)]), use_cache=False).last_hidden_state
            return (hidden[0].float() @ head.T).numpy()

    return logits


def narrow(x):
    """Rounded to bfloat16."""
    return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.fixture(scope="module")
def oracle(subject):
    return through_transformers(subject)


def complaints(diff):
    """What is wrong at the ends, by words; without findings of our own side."""
    return diff.problems + [words for entry in diff.logits for words in entry.complaints]


@pytest.mark.parametrize("strict", [False, True])
def test_a_server_that_computes_the_same(subject, oracle, strict):
    with Server(oracle, ids=True, strict=strict, most=5 if strict else 20) as server:
        diff = compare_ends(subject, [TORCH, server.url], PROMPTS, positions=6)
    diff.assert_ok()
    # 6 places of one prompt and all 4 of the other, both prompts at once, and 16 tokens after each,
    # alone, again, and both in a batch.
    rows = 10 + sum(len(ids) - 1 for ids in PROMPTS) + 3 * 2 * 16
    assert sum(entry.rows for entry in diff.logits) == rows
    assert all(entry.top5 == 1.0 and entry.kl_ab < 1e-9 for entry in diff.logits)


def test_prompt_log_probabilities_of_vllm_are_read(subject, oracle):
    with Server(oracle, echo=False, vllm=True) as server:
        diff = compare_ends(subject, [TORCH, server.url], PROMPTS, positions=2)
    diff.assert_ok()
    assert not any("no log-probabilities of prompts" in note for note in diff.notes)
    positions = sum(len(ids) - 1 for ids in PROMPTS)
    assert any(note.startswith(f"b, prompt: {positions} positions") for note in diff.notes)


def test_what_a_server_does_not_offer_is_said(subject, oracle):
    with Server(oracle, echo=False, batch=False) as server:
        diff = compare_ends(subject, [TORCH, server.url], PROMPTS, positions=2)
    diff.assert_ok()
    assert any("no log-probabilities of prompts" in note for note in diff.notes)
    assert any("no batch" in note for note in diff.notes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # a temperature that nobody asked for
        (lambda x: log_softmax(1.0001 * x), "|slope - 1|"),
        (lambda x: np.roll(x, 1), "tokens differ by more"),
    ],
)
def test_a_server_that_computes_something_else(subject, oracle, change, words):
    with Server(oracle, change) as server:
        diff = compare_ends(subject, [TORCH, server.url], PROMPTS, positions=4)
    assert diff.exit_code == 1
    assert any(words in c for c in complaints(diff))


@pytest.fixture(scope="module")
def demo():
    """The bundled model, in its own bfloat16, and prompts up to where a rotation has turned far."""
    subject = open_subject("demo")
    return subject, default_prompts(subject, lengths=(40, 3, 17, 220)), {}


def ask(demo, options=None, **wrong):
    subject, prompts, known = demo
    logits = through_transformers(subject, **wrong, known=known)
    with Server(logits, **(options or {})) as server:
        return compare_ends(subject, [TORCH, server.url], prompts)


@pytest.mark.parametrize(
    ("options", "wrong", "words"),
    [
        ({}, {"scale": 1 / 1.02}, "|slope - 1|"),
        pytest.param(
            {}, {"scale": 1 / 1.02, "rounded": True}, "|slope - 1|", marks=pytest.mark.slow
        ),
        ({}, {"rope": 1.01}, "growth of sigma"),
        pytest.param(
            {}, {"rope": 1.01, "rounded": True}, "growth of sigma", marks=pytest.mark.slow
        ),
        ({"change": narrow}, {}, "softmax is not in float32"),
        ({"sample": lambda row: narrow(row).argmax()}, {}, "not the best of their own"),
    ],
)
def test_wrong_servers_are_told_from_right_ones_in_bfloat16(demo, options, wrong, words):
    diff = ask(demo, options, **wrong)
    assert diff.exit_code == 1
    assert any(words in problem for problem in diff.problems)


@pytest.mark.parametrize("rounded", [False, True])
def test_a_right_server_in_bfloat16_is_left_alone(demo, rounded):
    """Rounded logits are common: said, and a failure only of a server that states float32."""
    diff = ask(demo, rounded=rounded)
    assert not complaints(diff)
    assert any("rounds its logits to bfloat16" in note for note in diff.notes) == rounded


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_right_servers_on_other_prompts_are_left_alone(demo, seed):
    subject, *_ = demo
    prompts, known = default_prompts(subject, seed, (40, 3, 17, 220)), {}
    for rounded in (False, True):
        assert not complaints(ask((subject, prompts, known), rounded=rounded))


def test_a_server_that_states_float32_must_not_round_its_logits():
    rng = np.random.default_rng(0)
    exact = rng.normal(size=(20, 50)).astype(np.float32) * 4

    def rows(logits):
        got = log_softmax(logits)
        best = [dict(enumerate(row.tolist())) for row in got]
        return [
            named_row("next", (0, i), best[i], None, exact[i], narrow(exact[i]))
            for i in range(len(best))
        ]

    for logits, wrong in ((exact, False), (narrow(exact), True)):
        verdict = judge_server(rows(logits), 2.0**-8, "bfloat16", "float32")
        assert any("rounds its logits" in words for words in verdict.problems) == wrong


@pytest.mark.parametrize(("factor", "wrong"), [(1.0, False), (1.001, True)])
def test_log_probabilities_in_float32_do_not_sum_to_one(factor, wrong):
    """Of a sure model, whose best twenty leave next to nothing; a wrong scale is seen there too."""
    rng = np.random.default_rng(1)
    exact = rng.normal(size=(64, 60)).astype(np.float32) * 4
    exact[:, 0] += 12
    faithful = exact + rng.normal(size=exact.shape).astype(np.float32) * np.float32(1e-7)
    scaled = (exact * np.float32(factor)).astype(np.float32)
    got = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True, dtype=np.float32))
    rows = []
    for i, row in enumerate(got):
        best = np.argsort(row)[::-1][:20]
        named = {int(token): float(row[token]) for token in best}
        rows.append(named_row("next", (0, i), named, None, exact[i], faithful[i]))
    verdict = judge_server(rows, 1e-6, "float32", "float32")
    assert bool(verdict.problems) == wrong, verdict.problems


def test_two_servers_at_once_are_refused(subject):
    with pytest.raises(ConfigError, match="one server at a time"):
        compare_ends(subject, [TORCH, "http://127.0.0.1:9", "http://127.0.0.1:8"], PROMPTS)


def test_a_server_whose_tokens_mean_nothing_to_us_is_not_compared(subject, oracle):
    with Server(oracle, ids=False) as server:
        diff = compare_ends(subject, [TORCH, server.url], PROMPTS, positions=2)
    assert diff.exit_code == 3


def test_a_server_that_is_not_there(small_model):
    flags = [
        "--model",
        small_model,
        "--load-format",
        "dummy",
        "--a",
        "torch:cpu",
        "--b",
        "http://127.0.0.1:9",
    ]
    assert main(["numerics", "logits", *flags]) == 5


@pytest.mark.parametrize("text", ["ftp://x", "tensorflow:cpu", ""])
def test_sides_are_checked(text):
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        parse_side(text)


def test_a_side_that_is_no_backend_must_be_b(small_model, capsys):
    assert main(["numerics", "logits", "--model", small_model, "--a", "transformers"]) == 2
    assert "name transformers with --b" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["both", "faithful"])
def test_rows_that_the_references_do_not_know_are_left_out_and_named(which):
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((6, 32))
    faithful = exact + 1e-3 * rng.standard_normal(exact.shape)
    a, b = (exact + 1e-3 * rng.standard_normal(exact.shape) for _ in "ab")
    known = [0, 1, 3, 4, 5]
    wanted = compare_logits(*(x[known] for x in (a, b, exact, faithful)), None, "P")
    faithful[2, 7] = np.nan
    if which == "both":
        exact[2] = np.nan
    found = compare_logits(a, b, exact, faithful, None, "P")
    assert found == wanted
    assert found.rows == 5
    with pytest.raises(NotComparable, match="logits: no row of the references is finite"):
        compare_logits(a[2:3], b[2:3], exact[2:3], faithful[2:3], None, "P")


def test_a_reference_that_is_not_finite_is_named(subject, monkeypatch):
    """A model may be so; what is compared then is the other rows."""
    from twinfer.numerics.sides.reference import Reference

    head = Reference.head

    def lost(self, top, rows):
        logits = head(self, top, rows)
        logits[3] = np.nan
        return logits

    monkeypatch.setattr(Reference, "head", lost)
    bfloat16 = subject.with_dtype("bfloat16")
    diff = compare_ends(bfloat16, [TORCH, "transformers"], PROMPTS)
    assert diff.missing[0] == (
        "final logits of step 0: the references' are not finite in 1 of 36 rows, the first is "
        "request 0, position 3"
    )
    assert sum(entry.rows for entry in diff.logits) < sum(len(ids) - 1 for ids in PROMPTS)
