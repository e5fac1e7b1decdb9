"""Triple classification: a threshold of each relation, chosen on validation triples, tells true triples from false."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Bools, Float32
from elastable.embedding_store.errors import BadInput


@dataclass(frozen=True, slots=True)
class ClassificationMetrics:
    """How well predictions agree with labels; precision, recall and F1 are of the true triples.

    Attributes:
        accuracy, precision, recall, f1: In 0 .. 1; 0 where nothing can be divided.
    """

    accuracy: float
    precision: float
    recall: float
    f1: float
    triples: int

    @classmethod
    def of(cls, predicted: Bools, labels: Bools) -> "ClassificationMetrics":
        """Compares predictions with labels, bool `[N]` each. Raises BadInput if there are none."""
        if not len(labels):
            raise BadInput("there are no triples to classify")
        both = float((predicted & labels).sum())
        precision = both / max(1.0, float(predicted.sum()))
        recall = both / max(1.0, float(labels.sum()))
        f1 = 2 * precision * recall / (precision + recall) if both else 0.0
        return cls(float((predicted == labels).mean()), precision, recall, f1, len(labels))


@dataclass(frozen=True)
class Thresholds:
    """The score from which on a triple counts as true.

    Attributes:
        of_relation: float64 `[R]`; relations without validation triples have the common threshold.
        common: Chosen over all relations together.
    """

    of_relation: npt.NDArray[np.float64]
    common: float

    @classmethod
    def choose(cls, relation: npt.NDArray[np.integer], scores: Float32, labels: Bools, relations: int) -> "Thresholds":
        """Chooses the thresholds with the best accuracy on validation triples.

        Args:
            relation: int `[N]`.
            scores: float32 `[N]`.
            labels: bool `[N]`: True for true triples.
            relations: Number of relations, R.

        Raises:
            BadInput: there are no triples.
        """
        if not len(scores):
            raise BadInput("thresholds need validation triples, true and false ones; there are none")
        common = best_threshold(scores, labels)
        found = np.full(relations, common, np.float64)
        for each in np.unique(relation):
            mine = relation == each
            found[each] = best_threshold(scores[mine], labels[mine])
        return cls(found, common)

    def predict(self, relation: npt.NDArray[np.integer], scores: Float32) -> Bools:
        """bool `[N]`: whether triples of these relations (int `[N]`) count as true."""
        found: Bools = scores >= self.of_relation[relation]
        return found


def best_threshold(scores: Float32, labels: Bools) -> float:
    """The threshold with the best accuracy, halfway between two scores (-inf or inf: everything is true, or false).

    Of several, the highest.

    Args:
        scores: float32 `[N]`, N above 0.
        labels: bool `[N]`.
    """
    order = np.argsort(-scores, kind="stable")
    descending, true = scores[order].astype(np.float64), labels[order]
    # Right predictions if the first k count as true.
    right = np.concatenate([[0], np.cumsum(true)]) + np.concatenate([np.cumsum((~true)[::-1])[::-1], [0]])
    cut = np.concatenate([[True], descending[1:] != descending[:-1], [True]])  # not between equal scores
    best = int(np.argmax(np.where(cut, right, -1)))
    if best == 0:
        return float(np.inf)
    return float(-np.inf) if best == len(scores) else float((descending[best - 1] + descending[best]) / 2)
