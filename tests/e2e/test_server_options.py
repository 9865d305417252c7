"""What the options of `twinfer serve` change for clients."""

import pytest

from .server_process import served

FLAGS = [
    "--backend", "torch", "--device", "cpu", "--dtype", "float32", "--max-model-len", "128",
    "--chat-template", "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
]  # fmt: skip
TURNS = [{"role": "user", "content": "x = 1"}]


@pytest.fixture(scope="module")
def server():
    with served(*FLAGS) as running:
        yield running


def test_chats_are_rendered_by_the_template_that_is_given(server):
    with server.client() as client:
        chat = client.post("/tokenize", json={"messages": TURNS}).json()["tokens"]
        text = {"prompt": "<user>x = 1", "add_special_tokens": False}
        assert chat == client.post("/tokenize", json=text).json()["tokens"]
        answer = client.post(
            "/v1/chat/completions", json={"messages": TURNS, "max_tokens": 1}
        ).json()
        assert answer["usage"]["prompt_tokens"] == len(chat)
