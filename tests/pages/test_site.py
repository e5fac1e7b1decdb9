"""The site is built from the pages without a warning: no link leads nowhere, and every page is in the navigation."""

import os
import re
from pathlib import Path

import pytest

import elastable as et
from elastable.command import app
from tests.preloaded.client import run_preloaded

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    built = run_preloaded([str(ROOT / "docs" / "site" / "build.py"), str(folder)], ROOT, environment, 600.0)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_there_and_in_the_navigation(site: Path) -> None:
    index = (site / "index.html").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        if page.stem != "README":
            assert (site / page.stem / "index.html").is_file(), page.name
            assert f'href="{page.stem}/"' in index, f"{page.name} is in no section of docs/README.md"


def test_the_reference_has_every_command_and_every_public_name(site: Path) -> None:
    page = (site / "reference" / "index.html").read_text()
    commands = re.sub("<[^>]*>", "", page)
    for command in app.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "").replace("_", "-")
        assert f"elastable {name}" in commands
    for name in et.__all__:
        assert f"<h3>et.{name}" in page


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        for line in page.read_text().splitlines():
            for tag in ("<script", '<link rel="stylesheet"', "<img"):
                assert not (tag in line and ('src="http' in line or 'href="http' in line)), (
                    f"{page.name}: {line.strip()}"
                )
