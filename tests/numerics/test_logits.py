"""`twinfer numerics logits`: ends against a backend, transformers, and a server of the OpenAI
API.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from twinfer.numerics.faults.planting import plant
from twinfer.numerics.judging.metrics import log_softmax
from twinfer.numerics.questions.logits import compare_ends, parse_side
from twinfer.numerics.sides.subject import open_subject, parse_target
from twinfer.serving.cli import main
from twinfer.shared.errors import ConfigError

TORCH = parse_target("torch:cpu:compile_level=0")
PROMPTS = [np.arange(3, 40, dtype=np.int32), np.asarray([7, 8, 9, 10, 11], np.int32)]


@pytest.fixture(scope="module")
def subject(small_model):
    return open_subject(small_model, load_format="dummy", dtype="float32")


@pytest.fixture(scope="module")
def oracle(subject):
    """Logits [position vocab] of each prompt, by transformers."""
    from twinfer.numerics.questions.logits import transformers_logits

    return transformers_logits(subject, PROMPTS)[0]


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


class Server(HTTPServer):
    """Answers as `/v1/completions` does, from logits by prompt. `change` is made to
    log-probabilities.
    """

    def __init__(self, logits, change=lambda x: x, ids=True, strict=False):
        self.logits, self.change, self.ids, self.strict, self.asked = (
            logits,
            change,
            ids,
            strict,
            [],
        )
        super().__init__(("127.0.0.1", 0), Handler)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def _answer(self, code, value):
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self._answer(200, {"data": [{"id": "tiny"}]})

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if server.strict and "return_tokens_as_token_ids" in body:
            return self._answer(400, {"error": {"message": "unknown field"}})
        ids = body["prompt"]
        server.asked.append(ids)
        prompt = next(i for i, given in enumerate(PROMPTS) if given[: len(ids)].tolist() == ids)
        best = server.change(log_softmax(server.logits[prompt][len(ids) - 1]))
        names = {
            f"token_id:{i}" if server.ids else f"text {i}": float(best[i])
            for i in np.argsort(-best)[:5]
        }
        return self._answer(200, {"choices": [{"logprobs": {"top_logprobs": [names]}}]})


@pytest.mark.parametrize("strict", [False, True])
def test_a_server_that_computes_the_same(subject, oracle, strict):
    with Server(oracle, strict=strict) as server:
        diff = compare_ends(subject, [TORCH, server.url], PROMPTS, positions=6)
        diff.assert_ok()
        # 6 places of one prompt, all 4 of the other
        assert sum(entry.rows for entry in diff.logits) == 10
        assert len(server.asked) == 10
        assert all(entry.top5 == 1.0 and entry.kl_ab < 1e-9 for entry in diff.logits)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # a temperature that nobody asked for
        (lambda x: log_softmax(1.001 * x), "log-probabilities are off"),
        (lambda x: np.roll(x, 1), "tokens differ by more"),
    ],
)
def test_a_server_that_computes_something_else(subject, oracle, change, words):
    with Server(oracle, change) as server:
        diff = compare_ends(subject, [TORCH, server.url], PROMPTS, positions=4)
    assert diff.exit_code == 1
    assert any(words in c for entry in diff.logits for c in entry.complaints)


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
