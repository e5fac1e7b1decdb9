"""The model's states in one turn of a step with several: only this turn's assignments take effect."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from elastable.embedding_store.errors import ModelError

__all__ = ["TurnScope"]


class TurnScope(keras.StatelessScope):  # type: ignore[misc]
    """While the step is traced, Keras variables keep their values; reads within the scope see the new ones.

    Every turn traces the whole step. Assignments that belong to another turn are skipped: they have been made already,
    or come later. Random generators advance in every turn as in the whole step, so that each draws the same numbers.

    Args:
        model: The job's model, for messages.
        states: Weights that no optimizer updates.
        assigned: For every assignment to one of them, in order, its turn.
        turn: The current turn.
    """

    def __init__(
        self, model: keras.Model, states: Sequence[keras.Variable], assigned: Sequence[int], turn: int
    ) -> None:
        super().__init__(initialize_variables=False)
        self._model, self._assigned, self._turn = model, assigned, turn
        self._states = {id(state) for state in states}
        self._made = 0

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Records a (variable, new value) pair; see the class."""
        if id(update[0]) in self._states:
            number, self._made = self._made, self._made + 1
            if number < len(self._assigned) and self._assigned[number] != self._turn:
                return
        super().add_update(update)

    def values(self, variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """The variables' current values as tensors; call it within the scope."""
        return [tf.convert_to_tensor(variable.value) for variable in variables]

    def end(self) -> None:
        """Ends the step. Raises `ModelError` if it made other assignments than planned."""
        if self._made != len(self._assigned):
            raise ModelError(
                f"model {self._model.name!r}: its train_step assigned states {self._made} times, and was planned with "
                f"{len(self._assigned)}; it must do the same every time that it is traced"
            )
