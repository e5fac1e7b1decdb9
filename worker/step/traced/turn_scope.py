"""The states of a model in one turn of a step that takes several: only what the turn changes is changed."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from elastable.embedding_store.errors import ModelError

__all__ = ["TurnScope"]


class TurnScope(keras.StatelessScope):  # type: ignore[misc]
    """Keras variables keep their values while the step is traced, and have their new ones for those who read them here.

    Every turn traces the whole step. Assignments of another turn's part are left out: they stand already, or are not
    due. Generators of random numbers go on in every turn as in the whole step, so that each draws what is its own.

    Args:
        model: The job's model, for messages.
        states: Weights that no optimizer changes.
        assigned: For every assignment of one of them, in order, the turn that it belongs to.
        turn: This one.
    """

    def __init__(
        self, model: keras.Model, states: Sequence[keras.Variable], assigned: Sequence[int], turn: int
    ) -> None:
        super().__init__(initialize_variables=False)
        self._model, self._assigned, self._turn = model, assigned, turn
        self._states = {id(state) for state in states}
        self._made = 0

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Of a variable and its new value; see the class."""
        if id(update[0]) in self._states:
            number, self._made = self._made, self._made + 1
            if number < len(self._assigned) and self._assigned[number] != self._turn:
                return
        super().add_update(update)

    def values(self, variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """The variables' values now, as tensors; to be called within the scope."""
        return [tf.convert_to_tensor(variable.value) for variable in variables]

    def end(self) -> None:
        """The step is over. Raises `ModelError` where it did not assign as it was planned."""
        if self._made != len(self._assigned):
            raise ModelError(
                f"model {self._model.name!r}: its train_step assigned states {self._made} times, and was planned with "
                f"{len(self._assigned)}; it must do the same every time that it is traced"
            )
