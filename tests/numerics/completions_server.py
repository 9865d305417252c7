"""A small server of `/v1/completions`, with a right model behind it or wrong ones."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np

from twinfer.numerics.judging.metrics import log_softmax


class Server(HTTPServer):
    """Answers from `logits`: token ids to logits [position vocab], float32.

    `change` is made to log-probabilities, `sample` chooses a token from logits [vocab]. What a
    server need not have is switched off by `ids`, `echo`, `batch` and `strict`, which refuses a
    field of vLLM's. `vllm` answers to `prompt_logprobs`. `most` is how many log-probabilities it
    gives.
    """

    def __init__(
        self, logits, change=lambda x: x, sample=np.argmax, ids=True, echo=True, batch=True,
        strict=False, most=20, vllm=False,
    ):  # fmt: skip
        self._logits, self.change, self.sample, self.ids = logits, change, sample, ids
        self.echo, self.batch, self.strict, self.most = echo, batch, strict, most
        self.vllm, self.asked, self._known = vllm, [], {}
        super().__init__(("127.0.0.1", 0), Handler)

    def logits(self, ids):
        """Logits after `ids`: computed once, so that a token and its log-probabilities agree."""
        key = tuple(ids)
        if key not in self._known:
            rows = {key[: i + 1]: row for i, row in enumerate(self._logits(ids))}
            self._known = rows | self._known
        return self._known[key]

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()

    def refusal(self, body):
        """Why a request is refused; empty if it is not."""
        if self.strict and "return_tokens_as_token_ids" in body:
            return "unknown field"
        if body["logprobs"] > self.most:
            return f"logprobs is at most {self.most}"
        if not self.batch and isinstance(body["prompt"][0], list):
            return "one prompt at a time"
        return ""

    def choice(self, index, ids, body):
        """One choice of an answer."""
        self.asked.append(list(ids))
        sequence, chosen = list(ids), []
        for _ in range(body["max_tokens"]):
            row = self.logits(sequence)
            chosen.append(int(self.sample(row)))
            sequence.append(chosen[-1])
        start = len(ids)
        if body.get("echo") and self.echo:
            self.logits(ids)
            start, chosen = 1, sequence[1:]
        tops = [self._top(sequence[:i], body["logprobs"]) for i in range(start, len(sequence))]
        tokens = [self._name(token) for token in chosen]
        if body.get("echo") and self.echo:
            tops, tokens = [None, *tops], [self._name(sequence[0]), *tokens]
        made = {"index": index, "logprobs": {"tokens": tokens, "top_logprobs": tops}}
        if "prompt_logprobs" in body and self.vllm:
            self.logits(ids)
            made["prompt_logprobs"] = [None, *(self._ranked(ids[:i]) for i in range(1, len(ids)))]
        return made

    def _ranked(self, before):
        """As vLLM gives the tokens of a prompt."""
        best = log_softmax(self.logits(before))
        ids = np.argsort(-best)[:5].tolist()
        return {str(i): {"logprob": float(best[i]), "rank": 1 + n} for n, i in enumerate(ids)}

    def _top(self, before, count):
        best = self.change(log_softmax(self.logits(before)))
        return {self._name(i): float(best[i]) for i in np.argsort(-best)[:count].tolist()}

    def _name(self, token):
        return f"token_id:{token}" if self.ids else f"text {token}"


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
        if words := server.refusal(body):
            return self._answer(400, {"error": {"message": words}})
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        choices = [server.choice(i, ids, body) for i, ids in enumerate(prompts)]
        return self._answer(200, {"choices": choices})
