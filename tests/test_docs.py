"""The pages say what is there: rooms, names and links. `tests/pages` runs their code."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")])
PACKAGES = ("embedding_store", "master", "worker", "replicas", "elastable")
NAMING_PAGES = {".py", ".yml", ".yaml", ".proto", ".sh"}


def test_every_room_has_its_line_in_the_architecture_and_every_line_its_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {
        f"{package}/{face.parent.name}"
        for package in PACKAGES
        for face in (ROOT / package).glob("*/__init__.py")
        if face.parent.name != "v1" and not face.parent.is_symlink()
    }
    assert set(re.findall(r"^\| `(\w+/\w+)` \|", page, re.MULTILINE)) == rooms


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_of_a_page_exist(page: Path) -> None:
    """`package.module.Name` in a page is a module that has such a name."""
    for dotted in re.findall(rf"\belastable\.((?:{'|'.join(PACKAGES[:-1])})\.\w[\w.]*\w)", page.read_text()):
        parts = dotted.split(".")
        if parts[1] == "v1" or (ROOT / Path(*parts) / "__init__.py").is_file():
            continue  # a service on the wire, or a package
        face = ROOT / Path(*parts[:-1]) / "__init__.py"
        if face.is_file() and f'"{parts[-1]}"' in face.read_text():
            continue  # a name that a room's face gives
        lengths = [n for n in range(len(parts), 1, -1) if (ROOT / Path(*parts[:n])).with_suffix(".py").is_file()]
        assert lengths, f"{dotted}: no such module"
        source = (ROOT / Path(*parts[: lengths[0]])).with_suffix(".py").read_text()
        for name in parts[lengths[0] :]:
            defined = rf"^\s*(?:class|def) {name}\b|^{name}\b.* = "
            assert re.search(defined, source, re.MULTILINE), f"{dotted}: {name} is not there"


def anchors(page: Path) -> set[str]:
    """The names by which GitHub and the site link to a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_nowhere(page: Path, anchor: str) -> bool:
    return not page.exists() or (bool(anchor) and page.suffix == ".md" and anchor not in anchors(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text())
    found = [(target, anchor) for target, anchor in links if "://" not in target]
    assert not [link for link in found if leads_nowhere(page.parent / link[0] if link[0] else page, link[1])]


def test_pages_that_the_code_names_are_there() -> None:
    folders = (*PACKAGES, "benchmarks", "deploy", "proto", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in NAMING_PAGES]
    for path in (*files, ROOT / "Makefile", ROOT / "docker-compose.yml"):
        for name, anchor in re.findall(r"\bdocs/([\w-]+\.md)(?:#([\w-]+))?", path.read_text()):
            assert not leads_nowhere(ROOT / "docs" / name, anchor), f"{path} names docs/{name}, {anchor or 'a page'}"


def test_the_readme_lists_every_extra_but_those_of_contributors() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = set(
        re.findall(r'^\| `pip install "elastable\[(\w+)\]"` \|', (ROOT / "README.md").read_text(), re.MULTILINE)
    )
    assert listed == set(extras) - {"model", "site", "test", "browser", "dev"}


def test_the_pictures_are_what_their_source_draws() -> None:
    source = ROOT / "docs" / "diagrams" / "draw.py"
    drawings = runpy.run_path(str(source))["DRAWINGS"]
    assert {picture.stem for picture in source.parent.glob("*.svg")} == set(drawings)
    for name, drawing in drawings.items():
        drawn = source.with_name(f"{name}.svg").read_text()
        assert drawn == drawing.svg(), f"{name}: run python {source.relative_to(ROOT)}"
