"""Code blocks of a Markdown page, and what the page's source says about running each.

A page marks a block by an HTML comment on the line above it, which readers do not see:

| mark | meaning |
| --- | --- |
| `<!-- test: output -->` | what the block before it prints: compared, numbers to within 5 % |
| `<!-- test: sample -->` | what a run printed once; timings and addresses differ, so nothing is compared |
| `<!-- test: diagram -->` | a drawing, a formula or a list of files |
| `<!-- test: file NAME -->` | the block is written to the file NAME, for the commands that follow |
| `<!-- test: serves -->` | the first command goes on in the background until the page ends |
| `<!-- test: together -->` | every line is a separate command, and all run at once |
| `<!-- test: needs docker -->` | not run: a Docker engine is needed (`make compose-test` runs it) |
| `<!-- test: needs a cluster -->` | not run: a Kubernetes cluster is needed |
| `<!-- test: needs minutes -->` | not run: takes too long; what it calls must exist |
| `<!-- test: needs network -->` | not run: fetches from a package index |

A block inside a comment that begins with `<!-- test: setup` runs like any other and is not shown.
"""

import re
from dataclasses import dataclass
from pathlib import Path

MARKS = frozenset({"output", "sample", "diagram", "file", "serves", "together"})
MARKS |= {"needs a cluster", "needs docker", "needs minutes", "needs network"}
LANGUAGES = frozenset({"python", "sh", "console", "toml", "proto"})
_NOT_CODE = frozenset({"output", "sample", "diagram"})
_MARK = re.compile(r"^<!-- test: (?P<mark>.*?)\s*(?:-->)?$")
_INSTALLS = re.compile(r"^\s*pip install\b", re.MULTILINE)
_FENCE = re.compile(r"^```(\w*)\s*$")


@dataclass(frozen=True)
class Block:
    """One fenced block: `line` is that of its opening fence, counted from 1."""

    page: Path
    line: int
    language: str
    text: str
    mark: str = ""

    @property
    def kind(self) -> str:
        """The mark without its detail: "file" of "file add.py"."""
        return "file" if self.mark.startswith("file ") else self.mark

    @property
    def file(self) -> str:
        return self.mark.removeprefix("file ").strip()

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Every fenced block of a page, those in comments included, in their order."""
    lines = page.read_text().splitlines()
    blocks, above, at = [], "", 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence:
            end = next((n for n in range(at + 1, len(lines)) if lines[n].strip() == "```"), None)
            if end is None:
                raise ValueError(f"{page.name}:{at + 1}: the block has no end")
            text = "".join(f"{line}\n" for line in lines[at + 1 : end])
            blocks.append(Block(page, at + 1, fence[1], text, _mark(above)))
            at = end
        above = lines[at]
        at += 1
    return blocks


def _mark(above: str) -> str:
    found = _MARK.match(above)
    mark = found["mark"] if found else ""
    return "" if mark == "setup" else mark.removeprefix("setup ")


def complaints(blocks: list[Block]) -> list[str]:
    """What is wrong with the marks of a page: unknown reasons, blocks that say neither language nor reason."""
    found = []
    for before, block in zip([None, *blocks], blocks, strict=False):
        if block.mark and block.kind not in MARKS:
            found.append(f"{block}: unknown mark {block.mark!r}: use one of {', '.join(sorted(MARKS))}")
        elif block.kind in _NOT_CODE:
            if block.language not in ("", "text"):
                found.append(f"{block}: a {block.language} block is marked as {block.mark}, which is not run")
            if block.kind == "output" and (before is None or before.language not in ("python", "sh")):
                found.append(f"{block}: marked as output, and the block before it prints nothing")
        elif block.language not in LANGUAGES:
            found.append(f"{block}: language {block.language!r}: use one of {', '.join(sorted(LANGUAGES))}, or a mark")
        elif (
            block.kind in ("serves", "together", "needs a cluster", "needs docker", "needs minutes")
            and block.language != "sh"
        ):
            found.append(f"{block}: {block.mark!r} is a mark for sh blocks, not {block.language}")
        elif block.language == "sh" and not block.mark and _INSTALLS.search(block.text):
            found.append(f"{block}: installs packages into the tests' environment: mark it 'needs network'")
    return found
