"""Takes the pictures of the live page for docs/operating.md, in a real browser beside a real job.

    pip install playwright -c constraints.txt       # and Chromium: `apt install chromium`
    python docs/diagrams/live_page.py

The job is `elastable train examples/flights/model.py` with two workers and two store servers; one worker is killed
before the pictures are taken, as that is what a reader will want to recognise.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
LIMIT_MS = 300_000
TRAINED = 0.4  # of the job, when the worker is killed
_DONE = "document.getElementById('bar').value"
_JOB = (
    "train", "examples/flights/model.py", "--workers", "2", "--stores", "2", "--epochs", "4",
    "--micro-batch-size", "256", "--checkpoint-every", "500", "--run-dir", "runs", "--no-export",
)  # fmt: skip


def main() -> int:
    """Writes live-page.png (1,280 pixels wide, light) and live-page-phone.png (390 wide, dark)."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("live_page: no chromium on PATH: apt install chromium", file=sys.stderr)
        return 2
    address = f"127.0.0.1:{_free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        words = [sys.executable, "-m", "elastable", *_JOB, "--http", address]
        with subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL) as job:
            try:
                _photograph(chromium, f"http://{address}/", job)
            finally:
                job.send_signal(signal.SIGTERM)
                job.wait(120)
    return 0


def _photograph(chromium: str, url: str, job: subprocess.Popen[bytes]) -> None:
    from playwright.sync_api import Browser, Error, Page, sync_playwright

    def opened(browser: Browser, width: int, height: int, theme: str) -> Page:
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
        page.set_default_timeout(LIMIT_MS)
        while True:
            try:
                page.goto(url)
                break
            except Error:  # the job is starting
                if job.poll() is not None:
                    raise RuntimeError(f"the job ended with {job.returncode} before its page was there") from None
                page.wait_for_timeout(500)
        return page

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = opened(browser, 1280, 900, "light")
        while page.evaluate(_DONE) < TRAINED:  # the page's policy forbids `wait_for_function`, which evaluates there
            page.wait_for_timeout(200)
        (worker, *_) = _children(job.pid, "worker")
        os.kill(worker, signal.SIGKILL)
        page.locator("#workers td.gone").wait_for()
        phone = opened(browser, 390, 844, "dark")
        phone.locator("#workers td.gone").wait_for()
        page.screenshot(path=IMAGES / "live-page.png", full_page=True)
        phone.screenshot(path=IMAGES / "live-page-phone.png", full_page=True)
        browser.close()


def _children(pid: int, command: str) -> list[int]:
    """The processes that `pid` has started and that run that command."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if command in Path(f"/proc/{child}/cmdline").read_text().split("\0")]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
