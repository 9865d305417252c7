"""The ends of two runs: a backend's logits against another's, against transformers', or against a
server's.

All sides are given the same tokens, whatever they would have chosen, so that a token that flips
does not make all that follows incomparable. A backend runs the same steps as both references
(chunks, ragged batches, decodes); transformers runs each prompt as a whole. A server is asked for
the token after each of some prefixes, with the log-probabilities of its best ones: over any
OpenAI-compatible `/v1/completions`.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...ops.testing import limits
from ...shared.errors import BackendUnavailable, ConfigError
from ...shared.models.table import TOP, keys
from ...shared.tokenizer import Tokenizer
from ..errors import InfrastructureError
from ..judging.diff import Diff, Finding
from ..judging.gates import FOREIGN, Mode, foreign
from ..judging.logits_metrics import KL_LIMIT, compare_logits, compare_named
from ..judging.metrics import measure
from ..sides.runners import Fault, Runner, create_runner
from ..sides.steps import make_owned_steps, owned_rows, place, where
from ..sides.subject import HostWeights, Subject, Target, parse_target
from .model import Comparison

Progress = Callable[[str], None]
TRANSFORMERS = "transformers"
SERVERS = "http://", "https://"
TIMEOUT = 120.0
"""Seconds for one answer of a server."""
BEST = 5
"""Log-probabilities that a server is asked for: what the OpenAI API allows."""


def parse_side(text: str) -> Target | str:
    """A target, the word transformers, or a server's address. Raises ConfigError."""
    if text == TRANSFORMERS or text.startswith(SERVERS):
        return text.rstrip("/")
    try:
        return parse_target(text)
    except ConfigError as error:
        raise ConfigError(f"{error}; or {TRANSFORMERS}, or http://HOST:PORT of a server") from None


def compare_ends(
    subject: Subject,
    sides: Sequence[Target | str],
    prompts: Sequence[np.ndarray],
    *,
    positions: int = 8,
    faults: Mapping[str, Fault] | None = None,
    progress: Progress = lambda text: None,
) -> Diff:
    """Compare the logits of `sides` over prompts; a server is asked at `positions` places of each.

    Raises ConfigError, BackendUnavailable, NotComparable, InfrastructureError.
    """
    mode: Mode = "S" if subject.dtype == "float32" else "P"
    runners: dict[str, Runner] = {}
    whole: dict[str, Sequence[np.ndarray]] = {}
    named: dict[str, Sequence[Mapping[int, Tops]]] = {}
    about: dict[str, Any] = {}
    names = []
    try:
        for index, side in enumerate(sides):
            name = f"{chr(ord('a') + index)} {side}"
            names.append(name)
            progress(f"loading {side}")
            if isinstance(side, Target):
                runners[name] = create_runner(subject, side, (faults or {}).get(name[0]))
            elif side == TRANSFORMERS:
                whole[name], about[name] = transformers_logits(subject, prompts)
            else:
                named[name], about[name] = server_logprobs(
                    side, subject, prompts, positions, progress
                )
        steps, owners = zip(*make_owned_steps(subject, prompts), strict=True)
        ends = _Ends(subject, runners, mode, names, owners, whole, named)
        diff = ends.run(steps, progress)
    finally:
        for runner in runners.values():
            runner.close()
    diff.sides = tuple(names)
    diff.environment["sides"] |= about
    if named and not ends.named:
        diff.missing.append("positions: the server named no token that could be compared")
    return diff


class _Ends(Comparison):
    """A comparison of ends only, in which some sides are no runners: `whole` has logits by prompt
    [position vocab], `named` log-probabilities of some tokens, by prompt and position. `owners` are
    the prompts of each step's requests.
    """

    def __init__(
        self, subject: Subject, runners: Mapping[str, Runner], mode: Mode, names: Sequence[str],
        owners: Sequence[Sequence[int]], whole: Mapping[str, Sequence[np.ndarray]],
        named: Mapping[str, Sequence[Mapping[int, Tops]]],
    ) -> None:  # fmt: skip
        super().__init__(subject, runners, mode, layers=(), taps=())
        self._names, self._owners, self._whole, self._tops = names, owners, whole, named
        self._texts = Tokenizer.load(subject.folder)
        self.named = 0

    def _logits(self, exact: np.ndarray, faithful: np.ndarray) -> None:
        """Compare the first side with each other one."""
        exact, faithful = exact[: self.real], faithful[: self.real]
        rows = {side.name: side.logits[: self.real] for side in self.sides}
        places = list(owned_rows(self.step, self._owners[self.number]))
        for name, logits in self._whole.items():
            rows[name] = np.stack([logits[prompt][position] for prompt, position in places])
            self._foreign(name, rows[name], exact, faithful)
        first = self._names[0]
        for name in self._names[1:]:
            if name in self._tops:
                self._named(rows[first], self._tops[name], exact, faithful, places)
            else:
                limit = FOREIGN**2 if name in self._whole else KL_LIMIT
                found = compare_logits(
                    rows[first], rows[name], exact, faithful, self.step, self.mode, limit
                )
                self.diff.logits.append(found)

    def _foreign(self, name: str, got: np.ndarray, exact: np.ndarray, faithful: np.ndarray) -> None:
        m = measure(got, exact, faithful)
        gate = foreign(self.mode, m, self.reduction, self.model.num_layers)
        place_ = place(self.step, m.worst, 2, self.subject.page_size)
        self.diff.findings.append(
            Finding(
                name, self.mode, "logits", self.number, -1, "final logits", "", m,
                tuple(gate.complaints(m)), None,
                place_, gate.shares(m),
            )
        )  # fmt: skip

    def _named(
        self, a: np.ndarray, tops: Sequence[Mapping[int, Tops]], exact: np.ndarray,
        faithful: np.ndarray,
        places: Sequence[tuple[int, int]],
    ) -> None:  # fmt: skip
        rows = [i for i, (prompt, position) in enumerate(places) if position in tops[prompt]]
        found = [self._ids(tops[places[i][0]][places[i][1]], exact[i]) for i in rows]
        known = [(i, top) for i, top in zip(rows, found, strict=True) if top]
        if not known:
            return
        kept, tops_ = [i for i, _ in known], [top for _, top in known]
        self.named += len(kept)
        places_ = [where(self.step, i) for i in kept]
        unit = limits(self.dtype).half_ulp if self.mode == "P" else 0.0
        entry = compare_named(
            a[kept],
            tops_,
            exact[kept],
            faithful[kept],
            places_,
            unit,
            self.mode,
            self.step.step_id - 1,
        )
        self.diff.logits.append(entry)

    def _ids(self, top: Tops, exact: np.ndarray) -> dict[int, float]:
        """Token ids of what a server named; texts are looked up among the 500 best tokens."""
        found = {int(token): value for token, value in top.items() if isinstance(token, int)}
        texts = {token: value for token, value in top.items() if isinstance(token, str)}
        if texts and self._texts is not None:
            count = min(500, len(exact))
            for token in np.argsort(-exact)[:count].tolist():
                text = self._texts.decode([token])
                if text in texts:
                    found.setdefault(token, texts.pop(text))
        return found


# --- transformers
# --------------------------------------------------------------------------------------------------


def transformers_logits(
    subject: Subject, prompts: Sequence[np.ndarray], wide: bool = False
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Logits [position vocab] of each prompt by Hugging Face transformers on the CPU, and what it
    ran on. `wide` computes in float32 with the weights of the run dtype.

    Raises BackendUnavailable if the package is not there, ConfigError for prompts that both rotate
    differently.
    """
    _check_factors(subject, prompts)
    try:
        import torch
        import transformers
    except ImportError as error:
        raise BackendUnavailable(
            f"{TRANSFORMERS}: {error}: pip install 'twinfer[transformers]'"
        ) from error
    dtype = getattr(torch, subject.dtype)
    # Where parts other than text are left out here, transformers has the model under another task.
    auto = (
        transformers.AutoModelForImageTextToText
        if subject.model.left_out
        else transformers.AutoModelForCausalLM
    )
    if subject.load_format == "dummy":
        config = transformers.AutoConfig.from_pretrained(subject.folder, local_files_only=True)
        model = auto.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        model.load_state_dict(_state(subject), strict=False)
    else:
        model = auto.from_pretrained(subject.folder, dtype=dtype, local_files_only=True)
    model.eval()
    if wide:
        model.float()
    with torch.inference_mode():
        found = [
            model(torch.from_numpy(np.asarray(ids, np.int64))[None], use_cache=False)
            .logits[0]
            .float()
            .numpy()
            for ids in prompts
        ]
    attention = getattr(model.config, "_attn_implementation", "")
    return found, {
        "target": TRANSFORMERS,
        "device": f"cpu, attention {attention}",
        "plan": transformers.__version__,
    }


def _check_factors(subject: Subject, prompts: Sequence[np.ndarray]) -> None:
    """Raise ConfigError where transformers takes short longrope factors for a prompt, and an
    engine long ones.
    """
    switch, shortest = subject.model.rope.switches_at, min(map(len, prompts))
    if switch is not None and subject.max_model_len > switch >= shortest:
        raise ConfigError(
            f"max_model_len: got {subject.max_model_len}, and a prompt of {shortest} tokens; "
            "allowed is at most "
            f"{switch}, up to which transformers takes other longrope factors, or longer prompts "
            "only"
        )


def _state(subject: Subject) -> dict[str, Any]:
    """The seeded random weights under their names in a checkpoint, as torch tensors."""
    from ...ops.namespaces.torch_ import from_numpy

    weights, found = HostWeights(subject), dict[str, np.ndarray]()
    for parameter, layer in weights.table.placed():
        array = (weights.top() if layer == TOP else weights.layer(layer))[parameter.name]
        array = array / array.dtype.type(parameter.factor) - array.dtype.type(parameter.offset)
        start = 0
        for part, key in zip(parameter.parts, keys(parameter.parts, layer), strict=True):
            tensor = found.setdefault(key, np.empty(parameter.part_shape(part), array.dtype))
            rows = part.rows_in_tensor(np.arange(part.rows))
            tensor[rows] = array[start : start + part.rows]
            start += part.rows
    return {key: from_numpy(tensor) for key, tensor in found.items()}


# --- servers
# --------------------------------------------------------------------------------------------------

Tops = Mapping[int | str, float]
"""Log-probabilities in nats of some tokens, by id, or by text where a server names no ids."""


def server_logprobs(
    url: str,
    subject: Subject,
    prompts: Sequence[np.ndarray],
    positions: int,
    progress: Progress = lambda text: None,
) -> tuple[list[dict[int, Tops]], dict[str, Any]]:
    """For each prompt, by position, the best tokens after it; and what the server says about
    itself.

    Raises InfrastructureError if the server does not answer as such, ConfigError if it refuses the
    request.
    """
    models = _ask(f"{url}/v1/models")
    try:
        model = models["data"][0]["id"]
    except (KeyError, IndexError, TypeError):
        raise InfrastructureError(f"{url}/v1/models names no model: {str(models)[:120]}") from None
    found: list[dict[int, Tops]] = []
    for index, ids in enumerate(prompts):
        progress(f"asking for prompt {index + 1} of {len(prompts)}")
        last = min(len(ids), subject.max_model_len) - 1
        places = (
            sorted({round(x) for x in np.linspace(0, last - 1, min(positions, last))})
            if last > 0
            else []
        )
        found.append(
            {position: _best(url, model, ids[: position + 1].tolist()) for position in places}
        )
    return found, {"target": url, "device": f"server of {model}"}


def _best(url: str, model: str, ids: list[int]) -> Tops:
    request = {
        "model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": BEST,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    answer = _ask(f"{url}/v1/completions", request)
    try:
        best = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        return {_token(name): float(value) for name, value in best.items()}
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        raise InfrastructureError(
            f"{url}: the answer has no top_logprobs: {str(answer)[:160]}"
        ) from None


def _token(name: str) -> int | str:
    head, sign, tail = name.partition("token_id:")
    return int(tail) if sign and not head else name


def _ask(url: str, body: Mapping[str, Any] | None = None) -> Any:
    """The JSON answer; an extension that the server does not know is left out and asked again."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        text = " ".join(error.read(500).decode("utf-8", "replace").split())
        if body is not None and "return_tokens_as_token_ids" in body and error.code in (400, 422):
            return _ask(url, {k: v for k, v in body.items() if k != "return_tokens_as_token_ids"})
        raise InfrastructureError(f"{url}: HTTP {error.code}: {text[:200]}") from None
    except (OSError, ValueError) as error:
        raise InfrastructureError(f"{url}: {error}") from None
