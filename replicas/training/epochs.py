"""The epochs of a training: steps, evaluation, callbacks, and when weights have to be whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elastable.replicas.training.data.feed import Feed
from elastable.replicas.training.replica_callbacks import ReplicaCallbacks
from elastable.replicas.training.replica_training import Training
from elastable.replicas.training.step import GradientStep

__all__ = ["run_epochs"]


def run_epochs(
    training: Training,
    compute: GradientStep,
    feed: Feed,
    told: ReplicaCallbacks,
    epochs: range,
    evaluate: Callable[[int], Mapping[str, float]],
) -> None:
    """Trains; every replica calls it.

    Callbacks and evaluation find the model's weights whole; what callbacks do
    to them counts.

    Args:
        training: Of the model.
        compute: For batches as the feed's.
        feed: Of records.
        told: The callbacks.
        epochs: To run.
        evaluate: Epoch -> what is to be added to its logs.
    """
    logs: dict[str, float] = {}
    told.begin()
    for epoch in epochs:
        told.begin_epoch(epoch)
        training.weights.take_back()
        stop = _epoch(training, compute, feed, epoch, told)
        logs = training.metrics.results()
        training.weights.make_whole()
        logs |= evaluate(epoch)
        stop |= told.end_epoch(epoch, logs)
        training.weights.take_back()
        told.agree(training.optimizer.learning_rate())
        if stop:
            break
    training.finish()
    told.end(logs)
    training.weights.take_back()


def _epoch(training: Training, compute: GradientStep, feed: Feed, epoch: int, told: ReplicaCallbacks) -> bool:
    """True if a callback stopped it."""
    training.metrics.reset()
    measured = training.memory
    for step, part in enumerate(feed.parts(epoch)):
        if told.sees_batches:
            told.begin_batch(step)
        training.train(compute, part, measure=training.memory is measured)
        if told.sees_batches:
            training.weights.make_whole()
            stop = told.end_batch(step, training.metrics.results())
            training.weights.take_back()
            if stop:
                return True
    return False
