"""The epochs of a training: steps, evaluation, callbacks, and when weights must be whole."""

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
    listeners: ReplicaCallbacks,
    epochs: range,
    evaluate: Callable[[int], Mapping[str, float]],
) -> None:
    """Trains; every replica calls it.

    Callbacks and evaluation see the model's whole weights; what callbacks change in them counts.

    Args:
        training: The model's training state.
        compute: For batches shaped like the feed's.
        feed: The records.
        listeners: The callbacks.
        epochs: The epochs to run.
        evaluate: Epoch -> validation logs to add.
    """
    logs: dict[str, float] = {}
    listeners.begin()
    for epoch in epochs:
        listeners.begin_epoch(epoch)
        training.weights.take_back()
        stop = _epoch(training, compute, feed, epoch, listeners)
        logs = training.metrics.results()
        training.weights.make_whole()
        logs |= evaluate(epoch)
        stop |= listeners.end_epoch(epoch, logs)
        training.weights.take_back()
        listeners.agree(training.optimizer.learning_rate())
        if stop:
            break
    training.finish()
    listeners.end(logs)
    training.weights.take_back()


def _epoch(training: Training, compute: GradientStep, feed: Feed, epoch: int, listeners: ReplicaCallbacks) -> bool:
    """True if a callback stopped it."""
    training.metrics.reset()
    measured = training.memory
    for step, part in enumerate(feed.parts(epoch)):
        if listeners.sees_batches:
            listeners.begin_batch(step)
        training.train(compute, part, measure=training.memory is measured)
        if listeners.sees_batches:
            training.weights.make_whole()
            stop = listeners.end_batch(step, training.metrics.results())
            training.weights.take_back()
            if stop:
                return True
    return False
