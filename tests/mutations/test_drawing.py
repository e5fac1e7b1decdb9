"""The drawn list is of conditions that are there."""

import json

import pytest

from tests.mutations.__main__ import LIST
from tests.mutations.drawing import ROOMS, ROOT, Mutation, draw

DRAWN = [Mutation(**each) for each in json.loads(LIST.read_text())]


def test_each_changes_one_condition_of_its_room() -> None:
    for mutation in DRAWN:
        source = (ROOT / mutation.file).read_text()
        changed = mutation.applied(source)
        assert changed != source
        compile(changed, mutation.file, "exec")
    for room in ROOMS:
        assert sum(mutation.file.startswith(f"{room}/") for mutation in DRAWN) >= 15


def test_what_is_not_there_is_said() -> None:
    gone = Mutation(DRAWN[0].file, DRAWN[0].function, "nothing > 1", "nothing >= 1")
    with pytest.raises(ValueError, match="is there 0 times; draw the list again"):
        gone.applied((ROOT / gone.file).read_text())
    assert draw(1, 2) == draw(1, 2) != draw(2, 2)
