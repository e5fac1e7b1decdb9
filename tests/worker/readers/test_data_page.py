"""docs/data.md: every block of Python runs, in the order of the page."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "data.md"


def test_the_page_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
