"""Check that the documents point at things that exist.

In README.md, CONTRIBUTING.md and docs/**/*.md: relative links and their #anchors, and files named
in backticks. A name in backticks counts as one of our files when it has a suffix and its first
folder is a folder of this repository, so `shared/step.py` (also `twinfer/shared/step.py`) is
checked and `Qwen/Qwen3-0.6B` is not. `*` may stand for any name.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

FENCE = re.compile(r"^ *(```|~~~).*?^ *\1[^\n]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(<?([^()\s>]+)>?(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6} +(.+?)(?: +#+)? *$", re.MULTILINE)
OUR_FILE = re.compile(
    r"(?:twinfer/)?([\w.*-]+(?:/[\w.*-]+)*/[\w*-]*\.[\w.*]*\w)(?::\d+(?:-\d+)?|::[\w:.]+)?"
)


def blank(match: re.Match[str]) -> str:
    """Remove the text but keep its lines, so that line numbers stay right."""
    return "\n" * match[0].count("\n")


def anchors(document: Path) -> set[str]:
    """The ids that GitHub gives to the headings of a document."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub(blank, document.read_text())):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        count = 0
        while (name := f"{slug}-{count}" if count else slug) in found:
            count += 1
        found.add(name)
    return found


def problems(document: Path) -> Iterator[tuple[int, str]]:
    """Line number and description of everything in `document` that points nowhere."""
    text = FENCE.sub(blank, document.read_text())
    for match in CODE.finditer(text):
        name = OUR_FILE.fullmatch(match[1])
        ours = name and (ROOT / name[1].partition("/")[0]).is_dir()
        if name and ours and not any(ROOT.glob(name[1])):
            yield text.count("\n", 0, match.start()) + 1, f"no such file: {match[1]}"
    text = CODE.sub("", text)
    for match in LINK.finditer(text):
        target, _, anchor = match[1].partition("#")
        if re.match(r"[a-z][a-z+.-]*:", target):
            continue
        line = text.count("\n", 0, match.start()) + 1
        path = (document.parent / target).resolve() if target else document
        if not path.exists():
            yield line, f"broken link: {match[1]}"
        elif not path.is_relative_to(ROOT):
            yield line, f"link out of the repository: {match[1]}"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            yield line, f"no such heading: {match[1]}"


def main() -> int:
    """Print every problem as path:line: text; the exit status says whether there was one."""
    documents = [
        path
        for path in (
            ROOT / "README.md",
            ROOT / "CONTRIBUTING.md",
            *sorted((ROOT / "docs").rglob("*.md")),
        )
        if path.exists()
    ]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in documents
        for line, what in sorted(problems(path))
    ]
    print("\n".join([*found, f"{len(documents)} documents, {len(found)} problems"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
