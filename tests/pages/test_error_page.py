"""docs/errors.md lists every error and exit code as the code has them."""

import re
from pathlib import Path

from elastable.embedding_store import errors
from elastable.embedding_store.wire.channels.status_codes import status_code
from elastable.process.exit_codes import ExitCode, exit_code_of

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()


def test_every_error_with_its_kind_and_codes() -> None:
    rows = re.findall(r"^\| ((?:&nbsp;)*)`(\w+)` \| .* \| (\w+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert sorted(name for _, name, _, _ in rows) == sorted(errors.__all__)
    above: list[type] = []
    for indent, name, grpc_code, exit_code in rows:
        kind = getattr(errors, name)
        above = [*above[: len(indent) // len("&nbsp;" * 2)], kind]
        assert issubclass(kind, above[-2:][0]), f"{name} is no kind of {above[-2].__name__}"
        assert (grpc_code, int(exit_code)) == (status_code(kind).name, exit_code_of(kind("")).value), name


def test_every_exit_code_with_its_meaning() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| [^|]* \|$", PAGE, re.MULTILINE)
    assert rows == [(str(code.value), code.meaning) for code in ExitCode]
