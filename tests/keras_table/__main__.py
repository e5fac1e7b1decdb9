"""Writes docs/keras.md: `python -m tests.keras_table`, or `make keras-table`."""

import sys
from pathlib import Path

from tests.keras_table.page import SECTIONS, page, verdicts


def main() -> None:
    """Runs every case; writes nothing where one differs."""
    found, wrong = verdicts(SECTIONS)
    if wrong:
        sys.exit("\n".join(["These are neither as in Keras nor refused:", *wrong]))
    (Path(__file__).parents[2] / "docs" / "keras.md").write_text(page(found))


if __name__ == "__main__":
    main()
