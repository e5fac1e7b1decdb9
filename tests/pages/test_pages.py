"""Every code block of every page runs, in the order of its page."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import keras
import pytest

from tests.pages.blocks import blocks_of, complaints
from tests.pages.running import PageRun, assert_printed, missing_commands
from tests.servers import running_server

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/**/*.md")])
WITH_CODE = [page for page in PAGES if blocks_of(page)]


@pytest.fixture
def redis_server(server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """A server for every host name that a page gives."""
    urls: dict[str, str] = {}
    with ExitStack() as running:

        def url(host: str) -> str:
            if host not in urls:
                server = running_server(server_binary, tmp_path_factory.mktemp("redis"))
                urls[host] = running.enter_context(server).url
            return urls[host]

        yield url


@pytest.fixture
def keras_as_at_start() -> Iterator[None]:
    """A page sees Keras as a new process does, and leaves it so."""
    keras.backend.clear_session()
    yield
    keras.backend.clear_session()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_says_what_it_is(page: Path) -> None:
    assert complaints(blocks_of(page)) == []


@pytest.mark.usefixtures("keras_as_at_start")
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, redis_server: Callable[[str], str]) -> None:
    with PageRun(tmp_path, redis_server) as run:
        run.run(page)


# --- the machinery notices what is wrong ------------------------------------------------------------


def written(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```\nls\n```\n", "page.md:1: language ''"),
        ("```rust\nfn\n```\n", "language 'rust'"),
        ("<!-- test: too hard -->\n```sh\nls\n```\n", "unknown mark 'too hard'"),
        ("<!-- test: sample -->\n```python\n1 / 0\n```\n", "a python block is marked as sample"),
        ("<!-- test: output -->\n```\n3\n```\n", "the block before it prints nothing"),
        ("<!-- test: together -->\n```python\n1\n```\n", "a mark for sh blocks"),
        ("```sh\npip install elastable\n```\n", "page.md:1: installs packages"),
    ],
)
def test_a_block_that_could_hide_from_the_test_is_complained_of(tmp_path: Path, text: str, message: str) -> None:
    (complaint,) = complaints(blocks_of(written(tmp_path, text)))
    assert message in complaint


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```python\na = 1\n```\n\n```python\na / 0\n```\n", ZeroDivisionError),
        ("```sh\nfalse\ntrue\n```\n", AssertionError),
        ("<!-- test: together -->\n```sh\ntrue\nexit 3\n```\n", AssertionError),
        ("```python\nprint(1.0)\n```\n\n<!-- test: output -->\n```\n1.2\n```\n", AssertionError),
        ("```console\n$ echo one\ntwo\n```\n", AssertionError),
        ("<!-- test: setup\n```sh\nfalse\n```\n-->\n", AssertionError),
        ("<!-- test: needs minutes -->\n```sh\nmake coffee\n```\n", AssertionError),
        ("<!-- test: needs minutes -->\n```sh\nelastable train m.py --colour red\n```\n", AssertionError),
        ("<!-- test: needs minutes -->\n```sh\nelastable brew m.py\n```\n", AssertionError),
        ("```toml\n[\n```\n", ValueError),
        ("```proto\nmessage NoSuch { }\n```\n", AssertionError),
    ],
)
def test_a_block_that_fails_fails_its_page(
    tmp_path: Path, redis_server: Callable[[str], str], text: str, error: type[Exception]
) -> None:
    with PageRun(tmp_path, redis_server) as run, pytest.raises(error):
        run.run(written(tmp_path, text))


def test_blocks_leave_to_the_next_what_a_reader_would_have(tmp_path: Path, redis_server: Callable[[str], str]) -> None:
    text = """
```sh
mkdir deep && cd deep
export COLOUR=blue
```
<!-- test: file said.txt -->
```toml
colour = "green"
```
```sh
echo $COLOUR $(cat said.txt)
```
<!-- test: output -->
```
blue colour = "green"
```
```python
from pathlib import Path

text = Path("said.txt").read_text()
```
```python
print(text, 0.871)
```
<!-- test: output -->
```
colour = "green"
0.87
```
"""
    with PageRun(tmp_path, redis_server) as run:
        run.run(written(tmp_path, text))


def test_numbers_may_differ_a_little_and_words_not_at_all() -> None:
    assert_printed("auc 0.93\n", "auc 0.92", "here")
    for printed in ("auc 0.83", "AUC 0.92", "auc 0.92 0.92"):
        with pytest.raises(AssertionError):
            assert_printed(printed, "auc 0.92", "here")


def test_commands_that_exist() -> None:
    assert missing_commands("make test ARGS=x # all\n.ci/run\n.venv/bin/python -m benchmarks wire") == []
    assert missing_commands("make nothing\n.ci/walk\n.venv/bin/python -m nothing") == [
        "make nothing",
        ".ci/walk",
        ".venv/bin/python -m nothing",
    ]
