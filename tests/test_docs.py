"""The pages say what is there: rooms, names and links. `tests/pages` runs their code."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")])
PACKAGES = ("embedding_store", "master", "worker", "replicas", "elastable")


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_the_readme_lists_every_extra_but_those_of_contributors() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = set(
        re.findall(r'^\| `pip install "elastable\[(\w+)\]"` \|', (ROOT / "README.md").read_text(), re.MULTILINE)
    )
    assert listed == set(extras) - {"site", "test", "browser", "dev"}


def test_the_pictures_are_what_their_source_draws() -> None:
    source = ROOT / "docs" / "diagrams" / "draw.py"
    drawings = runpy.run_path(str(source))["DRAWINGS"]
    assert {picture.stem for picture in source.parent.glob("*.svg")} == set(drawings)
    for name, drawing in drawings.items():
        drawn = source.with_name(f"{name}.svg").read_text()
        assert drawn == drawing.svg(), f"{name}: run python {source.relative_to(ROOT)}"
