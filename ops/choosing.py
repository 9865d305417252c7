"""How the implementation of an op is chosen: who asks for what, what an implementation refuses, and
what steps back.

Providers are tried in the order of who asked for them: a scoped priority, the user, the default of
the process (which plug-ins set), the platform. Last comes the native implementation, or the
composition of a coarse op's finer ops.

A coarse implementation hides the finer ops that it stands for. So it steps back where a stronger
voice than the one that asks for it has chosen an implementation of one of these, or has disabled
it: else that choice would never run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Literal

from .declare import REGISTRY, NotRowInvariant, Op, OpError
from .implement import IMPLEMENTATIONS, Framework, Implementation, Refusal, always
from .recording import Call
from .source_hash import source_hash

COMPOSITION = "composition"
NATIVE = "native"
DISABLED = "the op is disabled"
DEPENDS = "its rows depend on the batch"

Voice = Literal["scoped", "user", "default", "platform", "native"]
VOICES: tuple[Voice, ...] = ("scoped", "user", "default", "platform")
"""Who may ask for a provider, the strongest first. What nobody asked for is `native`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation of one op, who asked for it, and why those with a higher priority were
    passed over.
    """

    op: str
    implementation: Implementation
    passed_over: tuple[tuple[str, str], ...] = ()
    chosen_by: Voice = "native"

    @property
    def provider(self) -> str:
        """Name of the provider."""
        return self.implementation.provider

    @property
    def uuid(self) -> str:
        """Hex digest of the sources of the implementation, of all that they import, and of the
        versions they call.
        """
        return source_hash(self.implementation.function, self.implementation.framework)


@dataclass(slots=True)
class Chooser:
    """Chooses for one plan. `wishes` are providers by voice and op, `calls` what the model calls
    (empty: not known).

    `insisted` are ops that the user enables by name: they do not step back from a finer op that the
    user disables. `row_invariant`: only what promises it is chosen. `platform`: where it shall run
    (empty: not known).
    """

    framework: Framework
    wishes: Mapping[Voice, Mapping[str, Sequence[str]]]
    enabled: Collection[str]
    insisted: Collection[str] = ()
    calls: Mapping[str, Sequence[Call]] = field(default_factory=dict)
    row_invariant: bool = False
    platform: str = ""
    _choices: dict[str, Choice] = field(default_factory=dict)

    def choose(self, name: str) -> Choice:
        """The choice for an op. Raises OpError."""
        if name not in self._choices:
            self._choices[name] = self._choose(REGISTRY[name])
        return self._choices[name]

    def called(self) -> list[str]:
        """The ops that the model calls, and the finer ones of those that run as compositions."""
        todo = [name for name in self.calls if self._made(name)]
        found: dict[str, None] = {}
        while todo:
            name = todo.pop(0)
            if name in found:
                continue
            found[name] = None
            if self.choose(name).provider == COMPOSITION:
                todo += REGISTRY[name].composition
        return list(found)

    def check(self, voice: Voice) -> None:
        """Raise OpError unless all that a voice asks for is known, whether a model calls it or
        not.
        """
        for name in self.wishes[voice]:
            self._order(REGISTRY[name], self._available(REGISTRY[name])[0], (voice,))

    def _choose(self, op: Op) -> Choice:
        available, last = self._available(op)
        passed_over: list[tuple[str, str]] = []
        for provider, voice in self._order(op, available).items():
            why = (
                self._objection(op, available[provider], voice)
                if provider != last.provider
                else None
            )
            if why is None:
                return Choice(op.name, available[provider], tuple(passed_over), voice)
            passed_over.append((provider, why))
        if self.row_invariant and not (last.row_invariant or last.provider == COMPOSITION):
            reasons = {provider: why for provider, why in passed_over if why != DEPENDS}
            known = (p + (f" ({reasons[p]})" if p in reasons else "") for p in available)
            raise NotRowInvariant(
                f"got True, allowed is False: op {op.name!r}: no implementation for "
                f"{self.framework} promises rows that do not depend on the batch; there are "
                f"{', '.join(known)}"
            )
        return Choice(op.name, last, tuple(passed_over))

    def _available(self, op: Op) -> tuple[dict[str, Implementation], Implementation]:
        """All implementations by provider, and the one that every list ends with. Raises
        OpError.
        """
        registered = IMPLEMENTATIONS.get((op.name, self.framework), {})
        last = last_implementation(op, self.framework, registered)
        return {**registered, last.provider: last}, last

    def _order(
        self, op: Op, available: Collection[str], voices: Sequence[Voice] = VOICES
    ) -> dict[str, Voice]:
        """The providers to try, and who asked for each first. Raises OpError for one that is not
        there.
        """
        order: dict[str, Voice] = {}
        for voice in voices:
            for provider in self.wishes[voice].get(op.name, ()):
                if provider not in available:
                    known = ", ".join(sorted(available))
                    raise OpError(
                        f"op {op.name!r} has no provider {provider!r} for {self.framework}; known "
                        f"are {known}"
                    )
                order.setdefault(provider, voice)
        return order

    def _objection(self, op: Op, implementation: Implementation, voice: Voice) -> str | None:
        """Why an implementation is passed over, or None."""
        if op.name not in self.enabled:
            return DISABLED
        obstacle = implementation.obstacle(self.platform)
        if obstacle is not None:
            return obstacle
        if self.row_invariant and not implementation.row_invariant:
            return DEPENDS
        return self._stronger(op, voice) or self._refusal(implementation, self._made(op.name))

    def _stronger(self, op: Op, voice: Voice) -> str | None:
        """What a stronger voice says about a finer op of a coarse one, or None."""
        stronger = VOICES[: VOICES.index(voice)]
        for finer in finer_ops(op):
            disabled = finer.name not in self.enabled and op.name not in self.insisted
            if disabled and "user" in stronger:
                return f"its finer op {finer.name} is disabled"
            available, last = self._available(finer)
            for provider, by in self._order(finer, available, stronger).items():
                if provider == last.provider or self._serves(available[provider], op):
                    return f"its finer op {finer.name} is {provider} ({by})"
        return None

    def _serves(self, implementation: Implementation, coarse: Op) -> bool:
        """Whether an implementation of a finer op takes any of the calls that a coarse op makes
        of it.
        """
        if implementation.obstacle(self.platform) is not None:
            return False
        if implementation.supports_args is None:
            return True
        calls = [
            call for call in self.calls.get(implementation.op, ()) if coarse.name in call.parents
        ]
        return not calls or any(_answer(implementation, call) is None for call in calls)

    def _made(self, name: str) -> list[Call]:
        """The calls of an op that are made: those inside of a coarse op only if that one runs as
        its composition.
        """
        calls = self.calls.get(name, ())
        return [
            call
            for call in calls
            if all(self.choose(op).provider == COMPOSITION for op in call.parents)
        ]

    def _refusal(self, implementation: Implementation, calls: Sequence[Call]) -> str | None:
        """Why an implementation does not take the calls of any program, or None if it takes all.

        Raises OpError if it takes some: the programs of a kind share one plan, and nothing is
        chosen at run time.
        """
        if implementation.supports_args is None:
            return None
        answers: dict[str, str | None] = {}
        for call in calls:
            if answers.get(call.program) is None:
                answers[call.program] = _answer(implementation, call)
        refused = {program: why for program, why in answers.items() if why is not None}
        if not refused:
            return None
        program, why = next(iter(refused.items()))
        taken = [name for name, reason in answers.items() if reason is None]
        if not taken:
            return why
        op, provider = implementation.op, implementation.provider
        raise OpError(
            f"op {op!r}: {provider!r} takes {taken[0]} but refuses {program}: {why}. All programs "
            "of a kind share one "
            f"implementation: choose another one (op_priority {op}={NATIVE}), disable it "
            f"(enable_ops -{op}), or let "
            "its predicate take all sizes"
        )


def _answer(implementation: Implementation, call: Call) -> str | None:
    """Why an implementation does not take a call, with the shapes, or None if it does."""
    takes = implementation.supports_args
    answer = takes is None or takes(**call.arguments)
    if answer:
        return None
    arrays = {name: value for name, value in call.arguments.items() if hasattr(value, "shape")}
    shapes = ", ".join(f"{name}={tuple(value.shape)}" for name, value in arrays.items())
    return f"{answer} ({shapes})" if isinstance(answer, Refusal) else f"does not take {shapes}"


def finer_ops(op: Op) -> Iterator[Op]:
    """The ops that a coarse op is composed of, and those that these are composed of."""
    todo, seen = list(op.composition), set()
    while todo:
        finer = REGISTRY[todo.pop(0)]
        if finer.name not in seen:
            seen.add(finer.name)
            yield finer
            todo += finer.composition


def last_implementation(
    op: Op, framework: Framework, available: Mapping[str, Implementation]
) -> Implementation:
    """What every priority list of an op ends with: the composition, the native one, or what was
    registered last.

    Raises OpError if there is none, or if it does not take everything.
    """
    if op.level == "coarse":
        if COMPOSITION in available:
            raise OpError(
                f"op {op.name!r}: {COMPOSITION!r} is what its finer ops give, no provider may "
                "have "
                "that name"
            )
        return Implementation(op.name, COMPOSITION, framework, op.reference)
    if NATIVE not in available and (op.native == "reference" or framework == "numpy"):
        from .namespaces import namespace

        function = named(op, partial(op.reference, namespace(framework)))
        alone = not op.order_is_open
        return Implementation(op.name, NATIVE, framework, function, row_invariant=alone)
    if not available:
        raise OpError(
            f"op {op.name!r} needs a native implementation for {framework}, and none is registered"
        )
    last = available.get(NATIVE) or [*available.values()][-1]
    if last.supports_args is not None or last.supported is not always:
        why = (
            "a per-argument predicate"
            if last.supports_args is not None
            else "support that depends on the machine"
        )
        raise OpError(
            f"op {op.name!r}: the last provider for {framework}, {last.provider!r}, has {why}; it "
            "must take everything "
            f"(register a {NATIVE!r} one without predicates)"
        )
    return last


def named(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under the name and the signature of an op."""

    @wraps(op.reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__signature__ = op.signature  # type: ignore[attr-defined]
    return call
