"""Write docs/options.md from the tables of options, or (--check) say whether it is what they
say.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from twinfer.shared.compilation_config import CompilationConfig
from twinfer.shared.drafts import SpeculativeConfig
from twinfer.shared.engine_config import EngineConfig
from twinfer.shared.options import OWNERS, Option, options_of
from twinfer.shared.sampling_params import SamplingParams

PATH = Path(__file__).resolve().parent.parent / "docs" / "options.md"
HEAD = """\
# Options

Written by `python scripts/write_options.py` from `shared/engine_config.py`, `shared/compilation_config.py`,
`shared/drafts.py` and `shared/sampling_params.py`. Change them there.

In Python an option of the engine is an argument of `LLM`, by its name or by an alias: what another engine calls the
same thing. On the command line it is a flag. A value that is not allowed, a name that does not exist, and an option of
a backend that does not run are refused; the error names the option, the value and what is allowed.
"""
COMPILATION = """\
## Compilation

Fields of `compilation_config`, for the torch backend: JSON behind `--compilation-config`, a mapping in Python.
"""
GUESSES = """\
## Guessed tokens

Fields of `speculative_config` ([what it does](serving.md#guessed-tokens)): JSON behind `--speculative-config`, a mapping in Python.
"""
SAMPLING = """\
## Sampling

Fields of `SamplingParams`, one for each request. Defaults of the model's `generation_config.json` come first.
"""
COLUMNS = ("option", "flags", "allowed", "default", "what it does")


def document() -> str:
    """The whole page."""
    return "\n".join([HEAD, *engine(), *compilation(), *guesses(), *sampling()])


def engine() -> Iterator[str]:
    """A section for each owner of options of an engine."""
    options = options_of(EngineConfig).values()
    for owner, title in OWNERS.items():
        of_owner = [option for option in options if option.owner == owner]
        if of_owner:
            yield f"## {title[0].upper()}{title[1:]}\n"
            yield table(of_owner)


def compilation() -> Iterator[str]:
    """The section of what has no flags, as it is said in JSON."""
    yield COMPILATION
    yield table(options_of(CompilationConfig).values(), leave_out="flags")


def guesses() -> Iterator[str]:
    """The section of guessed tokens, as it is said in JSON."""
    yield GUESSES
    yield table(options_of(SpeculativeConfig).values(), leave_out="flags")


def sampling() -> Iterator[str]:
    """The section of what a request asks for."""
    yield SAMPLING
    yield table(options_of(SamplingParams).values())


def table(options: Iterable[Option], leave_out: str | None = None) -> str:
    """A row for each option."""
    rows = [dict(zip(COLUMNS, cells(option), strict=True)) for option in options]
    columns = [column for column in COLUMNS if column != leave_out]
    lines = [
        columns,
        ["---"] * len(columns),
        *([row[column] for column in columns] for row in rows),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cells(option: Option) -> tuple[str, ...]:
    """What the documents say of an option, by column."""
    names = ", ".join(f"`{name}`" for name in (option.name, *option.aliases))
    flags = ", ".join(f"`{flag}`" for flag in option.flags) or option.no_flag or ""
    default = "required" if option.required else option.usually
    texts = (names, flags, option.range or "any integer", default, option.help)
    return tuple(cell.replace("|", "\\|") for cell in texts)


def main() -> int:
    """0 if the page is, or now is, what the tables say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the page differs"
    )
    wanted = document()
    if parser.parse_args().check:
        same = PATH.exists() and PATH.read_text(encoding="utf-8") == wanted
        print(
            "docs/options.md is what the tables say"
            if same
            else "docs/options.md differs: run write_options.py"
        )
        return 0 if same else 1
    PATH.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
