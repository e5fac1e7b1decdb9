"""The live page in Chromium, with a real job: numbers move, a worker dies, the job ends.

Pictures go to the folder that ELASTABLE_SCREENSHOTS names, if any.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.elastable.conftest import JOB
from tests.elastable.processes import CLICK_JOB, Hold, elastable

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.process

LIMIT_MS = 120_000


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        chromium = None
    if chromium is None:
        pytest.skip("chromium and playwright are not here")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


def picture(page: "Page", name: str) -> None:
    if folder := os.environ.get("ELASTABLE_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def opened(browser: "Browser", url: str, **settings: object) -> "tuple[Page, list[str]]":
    """A page at that address, and what its console complains of."""
    page = browser.new_context(**settings).new_page()
    page.set_default_timeout(LIMIT_MS)
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    page.locator("#workers tbody tr").first.wait_for()
    return page, complaints


def test_a_job_from_its_middle_to_its_end(browser: "Browser", tmp_path: Path) -> None:
    from playwright.sync_api import expect

    expect.set_options(timeout=LIMIT_MS)
    hold = Hold(tmp_path / "hold", 29)
    words = ("master", CLICK_JOB, *JOB, "--run-dir", tmp_path / "runs", "--checkpoint-every", "8", "--no-export")
    served = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    with ExitStack() as processes:
        job = processes.enter_context(elastable(tmp_path, *words, *served, env=hold.environment, name="master"))
        worker = ("worker", CLICK_JOB, "--master", job.address(), "--deadline", "60")
        first = processes.enter_context(elastable(tmp_path, *worker, name="first"))
        processes.enter_context(elastable(tmp_path, *worker, name="second"))
        hold.wait(job)
        page, complaints = opened(browser, job.url(), viewport={"width": 1280, "height": 900})
        expect(page.locator("#state")).to_have_text("training")
        expect(page.locator("#progress")).to_contain_text("29 of 40")
        expect(page.locator("#curves svg[role=img]").first).to_be_visible()
        expect(page.locator("#workers")).to_contain_text("2 there")
        expect(page.locator("#tables tbody tr")).to_have_count(2)
        expect(page.locator("#resume")).to_contain_text("--resume")
        assert page.evaluate("[...document.querySelectorAll('.scroll')].every(it => it.scrollWidth <= it.clientWidth)")
        first.signal(signal.SIGKILL)
        expect(page.locator("#workers td.gone")).to_have_text("gone")
        expect(page.locator("#problems")).to_contain_text("It left or died")
        picture(page, "live-page")

        dark, more = opened(browser, job.url(), viewport={"width": 390, "height": 844}, color_scheme="dark")
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert dark.evaluate("getComputedStyle(document.body).backgroundColor") != light
        assert dark.evaluate("document.documentElement.scrollWidth <= innerWidth")
        picture(dark, "live-page-phone")

        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "content"
        page.locator("#copy").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#copy")).to_have_text("Copied")

        hold.go()
        expect(page.locator("#lost")).to_be_visible()
        assert job.wait() == 0
        expect(page.locator("#lost")).to_contain_text("What is shown is")
        assert page.evaluate("document.body.classList.contains('lost')")
        expect(page.locator("#progress")).to_contain_text("of 40")
        assert not [line for line in (*complaints, *more) if "ERR_" not in line], complaints


def test_it_asks_for_the_token(browser: "Browser", tmp_path: Path) -> None:
    from playwright.sync_api import Error

    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123")
    token.chmod(0o600)
    words = ("serve", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    with elastable(tmp_path, *words, env={"ELASTABLE_READER_TOKEN_FILE": str(token)}) as server:
        url = server.url()
        stranger = browser.new_context().new_page()
        with pytest.raises(Error, match="ERR_INVALID_AUTH_CREDENTIALS"):
            stranger.goto(url)
        stranger.close()
        known = browser.new_context(http_credentials={"username": "me", "password": token.read_text()}).new_page()
        known.set_default_timeout(LIMIT_MS)
        assert known.goto(url).status == 200
        known.get_by_text("parameter server").wait_for()
