"""Makes a site of the pages: `make site`, then open build/site/index.html.

docs/README.md lists every page once, by section; the navigation is read from it. The reference is completed with the
options of each command and the docstrings of every public name.

    python docs/site/build.py [FOLDER]
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import typer
from reference import COMMANDS, NAMES

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # what TensorFlow tells while it is imported is no warning of ours

SITE = Path(__file__).resolve().parent
DOCS = SITE.parent
ROOT = DOCS.parent
# Pages from outside of docs/, and their names in the site.
ELSEWHERE = {
    "deploy/README.md": "deploy.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<part>#[^)\s]*)?\)")


def main(output: Path) -> int:
    """Builds the site into a folder; Sphinx' exit code. A warning, such as a link that leads nowhere, is an error."""
    from sphinx.cmd.build import build_main

    source = output.parent / f"{output.name}-source"
    shutil.rmtree(source, ignore_errors=True)
    shutil.rmtree(output, ignore_errors=True)
    gc.disable()  # nothing of the pages' trees is garbage, and collections take a third of the time
    stage(source)
    return build_main(["-q", "-W", "--keep-going", "-b", "dirhtml", "-j", "auto", str(source), str(output)])


def stage(source: Path) -> None:
    """Lays the pages out as Sphinx reads them: links within the site, navigation, generated parts."""
    shutil.copytree(DOCS, source, ignore=shutil.ignore_patterns("site", "__pycache__", "*.py"))
    for page, name in ELSEWHERE.items():
        shutil.copy(ROOT / page, source / name)
    (source / "README.md").rename(source / "index.md")
    shutil.copy(SITE / "conf.py", source)
    origins = {name: ROOT / page for page, name in ELSEWHERE.items()} | {"index.md": DOCS / "README.md"}
    for page in sorted(source.rglob("*.md")):
        text = page.read_text()
        if page.name == "index.md":
            text = _home(text) + "".join(_navigation(text))
        text = text.replace(COMMANDS, "\n".join(commands())).replace(NAMES, "\n".join(names()))
        page.write_text(_with_links(text, origins.get(page.name, DOCS / page.name)))


def _home(index: str) -> str:
    """The list of pages, below what README.md says first: what Elastable is, with its picture."""
    what_it_is = (ROOT / "README.md").read_text().partition("\n## ")[0]
    return what_it_is.replace("](docs/", "](") + "\n" + index.partition("\n")[2]


def _navigation(index: str) -> Iterator[str]:
    """A table of contents for each section of docs/README.md."""
    for section in index.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        pages = re.findall(r"^\| \[[^\]]*\]\(([^)#]+)", section, re.MULTILINE)
        yield "\n".join(("\n```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```\n"))


def _with_links(text: str, origin: Path) -> str:
    """Links to other pages lead to them in the site; files of the repository that are no pages are named."""

    def link(found: re.Match[str]) -> str:
        target, part = found["target"], found["part"] or ""
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        text = "" if found["text"].endswith((".md", ".ipynb")) else found["text"]  # empty: the title of the page
        file = (origin.parent / target).resolve()
        inside = str(file.relative_to(ROOT))
        if inside == "README.md":
            return f"[{text or 'Elastable'}](index.md)"
        if inside in ELSEWHERE:
            return f"[{text}]({ELSEWHERE[inside]}{part})"
        if file.is_relative_to(DOCS):
            name = str(file.relative_to(DOCS))
            return f"[{text}]({'index.md' if name == 'README.md' else name}{part})"
        return found["text"]

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    for number, piece in enumerate(parts):
        if not piece.startswith("```"):
            parts[number] = _LINK.sub(link, piece)
        elif piece.startswith("```{toctree}"):
            for page, name in ELSEWHERE.items():
                parts[number] = parts[number].replace(f"../{page}", name)
    return "".join(parts)


def commands() -> Iterator[str]:
    """Every command with its arguments and options, as `--help` says them."""
    from elastable.command import app

    root = typer.main.get_command(app)
    yield from _command(root, "elastable", 3)


def _command(command: click.Command, name: str, level: int) -> Iterator[str]:
    commands_below: dict[str, click.Command] | None = getattr(command, "commands", None)  # of a group
    if commands_below is None:
        yield f"{'#' * level} `{name}`\n"
        words = [_word(param) for param in command.params if param.param_type_name == "argument"]
        yield "```text\n" + " ".join([name, *words, "[OPTIONS]"]) + "\n```\n"
        yield _prose(command.help or "") + "\n"
        yield from _parameters(command)
        return
    if name != "elastable":
        yield f"{'#' * level} `{name}`\n"
        yield _prose(command.help or "") + "\n"
        level += 1
    for part, below in sorted(commands_below.items()):
        yield from _command(below, f"{name} {part}", level)


def _parameters(command: click.Command) -> Iterator[str]:
    context = click.Context(command)
    rows = []
    for parameter in command.params:
        if (isinstance(parameter, click.Option) and parameter.hidden) or parameter.name == "help":
            continue
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        if parameter.param_type_name == "argument":
            names = f"`{_word(parameter)}`"
        default = parameter.get_default(context)
        shown = "required" if parameter.required else "" if default in (None, (), "", False) else f"`{default}`"
        text = _prose(getattr(parameter, "help", None) or "").replace("\n", " ").replace("|", "\\|")
        rows.append(f"| {names} | {shown} | {text} |")
    if rows:
        yield "\n".join(("| option | default | |", "| --- | --- | --- |", *rows)) + "\n"


def _word(argument: click.Parameter) -> str:
    return str(argument.metavar or argument.name).upper().strip("{}")


def _prose(text: str) -> str:
    """Help without the marks of rich."""
    return re.sub(r"\[/?(?:bold|dim|italic|cyan|green|red|yellow)\]", "", text.replace("\\[", "[")).replace("\b", "")


def names() -> Iterator[str]:
    """The docstring of every public name, by autodoc."""
    import elastable as et

    for name in sorted(et.__all__, key=str.lower):
        is_class = isinstance(getattr(et, name), type)
        yield f"### et.{name}\n"
        options = ("   :members:",) if is_class else ()
        kind = "autoclass" if is_class else "autofunction"
        yield "\n".join(("```{eval-rst}", f".. {kind}:: elastable.{name}", *options, "```\n"))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site").resolve()))
