"""Drawn Keras programs come out as with plain Keras, or are refused; `make test-slow` runs two thousand of them."""

import pytest

from tests.keras_programs.drawn import DrawnProgram, Side
from tests.keras_programs.run import kind_of_refusal, ran, verdict
from tests.keras_table.case import Different

SEEDS = range(12)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_program_comes_out_the_same_or_is_refused(seed: int) -> None:
    _, what, said = ran(seed)
    assert what in ("same", "refused", "of no use"), said


def test_a_program_that_differs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One gradient in the store's side is a thousandth larger."""
    program = next(each for each in map(DrawnProgram, range(100)) if each.waits == 1 and each.optimizer == "sgd")
    plain = program.model

    def model(side: Side) -> object:
        made = plain(side)
        if side.stored:
            made.optimizer.learning_rate = made.optimizer.learning_rate * 1.01
        return made

    monkeypatch.setattr(program, "model", model)
    with pytest.raises(Different, match="differs by"):
        verdict(program)


def test_refusals_are_counted_by_kind() -> None:
    assert kind_of_refusal("layer 'a': 3 of 0.5") == kind_of_refusal("layer 'b': 12 of 1e-3") == "layer '...': N of N"
