"""The ends of two runs: a backend's logits against another's, against transformers', against a
server's, or against a dump of another engine, which may have what is behind each layer too.

All sides are given the same tokens, whatever they would have chosen, so that a token that flips
does not make all that follows incomparable. A backend runs the same steps as both references
(chunks, ragged batches, decodes); transformers runs each prompt as a whole. A server is asked for
the token after each of some prefixes, with the log-probabilities of its best ones: over any
OpenAI-compatible `/v1/completions`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ...ops.testing import limits
from ...shared.errors import BackendUnavailable, ConfigError
from ...shared.tokenizer import Tokenizer
from ..bundles.dump import Dump, read_dump
from ..judging.diff import Diff
from ..judging.gates import FOREIGN, Mode, Scope, foreign, mode_of
from ..judging.logits_metrics import KL_LIMIT, compare_logits
from ..judging.metrics import measure
from ..judging.server_metrics import NamedRow, compare_named, judge_server, named_row
from ..progress import Progress, silent
from ..sides.fault import Fault
from ..sides.http_server import Reading, Served, Tops, read_server
from ..sides.reference import total
from ..sides.side import Side, open_sides
from ..sides.steps import NEW_TOKENS, make_owned_steps, where
from ..sides.subject import (
    HostWeights,
    Subject,
    Target,
    checkpoint_of,
    name_sides,
    parse_target,
    widened_layer,
)
from .model import LIMITS, Caches, Comparison, Streams

TRANSFORMERS = "transformers"
SERVERS = "http://", "https://"
DUMP = "dump:"


def parse_side(text: str) -> Target | str:
    """A target, the word transformers, a server's address, or a dump. Raises ConfigError."""
    if text == TRANSFORMERS or (is_dump(text) and text != DUMP):
        return text
    if is_server(text) and urlsplit(text).netloc:
        return text.rstrip("/")
    try:
        return parse_target(text)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; or {TRANSFORMERS}, http://HOST:PORT of a server, {DUMP}FOLDER"
        ) from None


def is_server(side: Target | str) -> bool:
    """Whether a side is asked over HTTP."""
    return isinstance(side, str) and side.startswith(SERVERS)


def is_dump(side: Target | str) -> bool:
    """Whether a side is a folder of tensors that another engine computed."""
    return isinstance(side, str) and side.startswith(DUMP)


def compare_ends(
    subject: Subject,
    sides: Sequence[Target | str],
    prompts: Sequence[np.ndarray],
    *,
    positions: int = 8,
    server_logits: str = "auto",
    faults: Mapping[str, Fault] | None = None,
    progress: Progress = silent,
) -> Diff:
    """Compare the logits of `sides` over prompts. A server is asked for what follows `positions`
    prefixes of each, for all positions at once, and for what it generates after each prompt, which
    the other sides are given too. `server_logits`: the dtype that its logits are said to have. A
    dump brings its own prompts.

    Raises ConfigError, BackendUnavailable, NotComparable, InfrastructureError.
    """
    mode, named = mode_of(subject.dtype), name_sides(sides)
    served = _read_server(subject, sides, prompts, positions, progress)
    dumped = [str(side) for side in sides if is_dump(side)]
    if len(dumped) > 1 or (dumped and served is not None):
        raise ConfigError(f"sides: got {', '.join(map(str, sides))}, allowed is one dump or server")
    dump = read_dump(dumped[0].removeprefix(DUMP), subject) if dumped else None
    prompts = prompts if served is None else served.prompts
    prompts = prompts if dump is None else dump.prompts
    new_tokens = NEW_TOKENS if dump is None else 0  # each row of a dump is judged
    owned = list(make_owned_steps(subject, prompts, new_tokens))
    dumps: dict[str, Dump] = {}
    about: dict[str, Any] = {}
    for name, side in named.items():
        if side == TRANSFORMERS:
            progress(f"asking {TRANSFORMERS}")
            found, about[name] = transformers_logits(subject, prompts)
            dumps[name] = Dump(side, tuple(prompts), tuple({"logits": x} for x in found))
        elif is_server(side) and served is not None:
            about[name] = dict(served.about)
        elif dump is not None and not isinstance(side, Target):
            about[name] = {"target": side, "device": dump.engine, "plan": "?"}
            dumps[name] = dump
    targets = {name: side for name, side in named.items() if isinstance(side, Target)}
    steps = [step for step, _ in owned]
    with open_sides(subject, targets, steps, faults, progress) as workers:
        ends = _Ends(subject, workers, mode, list(named), dumps, served)
        diff = ends.run_owned(owned, progress)
    diff.sides = tuple(named)
    diff.environment["sides"] |= about
    if served is not None:
        _judge_server(diff, ends, served, server_logits)
    return diff


def _read_server(
    subject: Subject, sides: Sequence[Target | str], prompts: Sequence[np.ndarray],
    positions: int, progress: Progress,
) -> Served | None:  # fmt: skip
    """What the server among the sides serves; None if there is none. Raises ConfigError for two,
    whose generated tokens would be two sets of prompts.
    """
    urls = [str(side) for side in sides if is_server(side)]
    if len(urls) > 1:
        raise ConfigError(f"sides: got {', '.join(urls)}, allowed is one server at a time")
    return read_server(urls[0], subject, prompts, positions, progress) if urls else None


def _judge_server(diff: Diff, ends: _Ends, served: Served, server_logits: str) -> None:
    """Judge all positions of the server together."""
    if not ends.named:
        diff.missing.append("positions: the server named no token that could be compared")
        return
    half_ulp = limits(ends.dtype).half_ulp
    diff.extend(judge_server(ends.named, half_ulp, ends.subject.dtype, server_logits))
    diff.notes += served.offers


class _Ends(Comparison):
    """A comparison of ends: of `workers`, and of others among `names`: `dumps` have what they
    computed, behind layers too, `served` what a server named.
    """

    def __init__(
        self, subject: Subject, workers: Mapping[str, Side], mode: Mode, names: Sequence[str],
        dumps: Mapping[str, Dump], served: Served | None,
    ) -> None:  # fmt: skip
        super().__init__(subject, workers, mode, layers=(), taps=())
        self._names, self._dumps = names, dumps
        self._readings: dict[tuple[int, int], list[Reading]] = {}
        for reading in served.readings if served is not None else ():
            self._readings.setdefault((reading.prompt, reading.position), []).append(reading)
        self._texts = Tokenizer.load(subject.folder)
        self.named: list[NamedRow] = []

    def _comparisons(self) -> int:
        dumped = sum(len(dump.names) for dump in self._dumps.values())
        return LIMITS * (len(self._names) + len(self.sides) + dumped)

    def _embed(self) -> Streams:
        streams = super()._embed()
        self._dumped("embed", -1, {exact: total(stream) for exact, stream in streams.items()})
        return streams

    def _layer(self, index: int, streams: Streams, caches: Caches) -> tuple[Streams, Caches]:
        after, written = super()._layer(index, streams, caches)
        behind = {exact: total(stream) for exact, stream in after.items()}
        self._dumped(f"layer.{index}", index, behind)
        return after, written

    def _dumped(self, name: str, layer: int, right: Mapping[bool, np.ndarray]) -> None:
        """Judge the rows of this step that dumps have of a tensor."""
        exact, faithful = (right[is_exact][: self.real] for is_exact in (True, False))
        for side, got in self._rows(name).items():
            self._foreign(side, got, exact, faithful, "inherited", layer, name)

    def _rows(self, name: str) -> dict[str, np.ndarray]:
        """The rows of this step of a tensor, by the sides whose dumps have it."""
        places = self.places()
        found = {side: dump for side, dump in self._dumps.items() if name in dump.names}
        return {side: dump.rows(name, places) for side, dump in found.items()}

    def _logits(self, exact: np.ndarray, faithful: np.ndarray) -> None:
        """Judge what is no worker's, and compare the first side with each other one."""
        known = self._known(exact, faithful)
        exact, faithful = exact[: self.real], faithful[: self.real]
        rows: dict[str, Any] = {judged.name: judged.ran.logits for judged in self.sides}
        for name, got in self._rows("logits").items():
            self._foreign(name, got, exact, faithful)
            rows[name] = got
        first = self._names[0]
        for name in self._names[1:]:
            if name not in rows and name not in self._dumps:
                self._named(rows[first], exact, faithful, set(known.tolist()))
            elif name in rows and len(known):
                limit = FOREIGN**2 if name in self._dumps else KL_LIMIT
                found = compare_logits(
                    rows[first], rows[name], exact, faithful, self.step, self.mode, limit,
                    family=self.family, numbers=self._numbers,
                )  # fmt: skip
                self.diff.logits.append(found)

    def _foreign(
        self, name: str, got: np.ndarray, exact: np.ndarray, faithful: np.ndarray,
        scope: Scope = "logits", layer: int = -1, tap: str = "final logits",
    ) -> None:  # fmt: skip
        m = measure(got, exact, faithful)
        gate = foreign(self.mode, m, self.reduction, self.model.num_layers)
        self._add(name, scope, layer, tap, m, gate, m.worst, 2)

    def _named(
        self, a: np.ndarray, exact: np.ndarray, faithful: np.ndarray, known: Collection[int]
    ) -> None:
        """Compare the first side with what the server named at this step's positions, at the rows
        that the references know.
        """
        rows, named = list[int](), list[NamedRow]()
        for row, place_ in enumerate(self.places()):
            for reading in self._readings.get(place_, ()) if row in known else ():
                top = self._ids(reading.tops, exact[row])
                if not top:
                    continue
                rows.append(row)
                named.append(
                    named_row(reading.way, place_, top, reading.token, exact[row], faithful[row])
                )
        if not rows:
            return
        self.named += named
        half_ulp = limits(self.dtype).half_ulp if self.mode == "P" else 0.0
        places_ = [where(self.step, row) for row in rows]
        self.diff.logits.append(
            compare_named(
                a[rows], exact[rows], named, places_, half_ulp, self.mode, self.step.step_id - 1
            )
        )

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
    ran on. `wide` computes in float32 with the weights of the run dtype. Narrow weights are what
    they stand for there; it quantises no tokens, and its cache is wide.

    Raises BackendUnavailable if the package is not there, ConfigError for prompts that both rotate
    differently.
    """
    _check_factors(subject, prompts)
    model = load_transformers(subject.plain)
    import torch
    import transformers

    if wide:
        model.float()
    if subject.quantization is not None:
        model.load_state_dict(_widened_state(subject), strict=False)
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


def transformers_embedding(subject: Subject, ids: np.ndarray) -> np.ndarray:
    """What the layers of transformers' model are given of tokens [tok dim] float32, in the run
    dtype. Raises BackendUnavailable if the package is not there.
    """
    model = load_transformers(subject)
    import torch

    with torch.inference_mode():
        given = torch.from_numpy(np.asarray(ids, np.int64))[None]
        found = model(given, use_cache=False, output_hidden_states=True).hidden_states[0][0]
    out: np.ndarray = found.float().numpy()
    return out


def load_transformers(subject: Subject) -> Any:
    """The model of Hugging Face transformers on the CPU, in the run dtype, with the subject's
    weights. Raises BackendUnavailable if the package is not there.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise BackendUnavailable(
            f"{TRANSFORMERS}: {error}: pip install 'twinfer[transformers]'"
        ) from error
    dtype = getattr(torch, subject.dtype)
    # Where parts other than text are left out here, transformers has the model under another task.
    auto: Any = (
        transformers.AutoModelForImageTextToText
        if subject.model.left_out
        else transformers.AutoModelForCausalLM
    )
    config = transformers.AutoConfig.from_pretrained(subject.folder, local_files_only=True)
    # Text models that are a part of others are not among those of a task.
    by_name = type(config) not in auto._model_mapping
    if by_name:
        auto = getattr(transformers, subject.model.architecture)
    if subject.load_format == "dummy":
        make = auto._from_config if by_name else auto.from_config
        model = make(config, dtype=dtype)
        model.load_state_dict(_state(subject), strict=False)
    else:
        model = auto.from_pretrained(subject.folder, dtype=dtype, local_files_only=True)
    return model.eval()


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


def _widened_state(subject: Subject) -> dict[str, Any]:
    """What narrow weights stand for, under their names in a checkpoint, as torch tensors."""
    from ...ops.namespaces.torch_ import from_numpy

    plain, narrow = HostWeights(subject.plain), HostWeights(subject)

    def of_layer(index: int) -> dict[str, np.ndarray]:
        wide = {name: pair[0] for name, pair in widened_layer(narrow, index).items()}
        found = plain.layer(index) | wide
        return {name: x.astype(np.float32) for name, x in found.items()}

    return {key: from_numpy(tensor) for key, tensor in checkpoint_of(plain, of_layer).items()}


def _state(subject: Subject) -> dict[str, Any]:
    """The seeded random weights under their names in a checkpoint, as torch tensors."""
    from ...ops.namespaces.torch_ import from_numpy

    weights = HostWeights(subject)
    found = checkpoint_of(weights, weights.layer)
    return {key: from_numpy(tensor) for key, tensor in found.items()}
