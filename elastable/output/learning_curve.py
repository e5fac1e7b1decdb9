"""The picture of a run: loss and metrics over versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["ABOUT", "draw_learning_curve"]

ABOUT = ("kind", "version", "epoch", "seconds")
"""What a line of `metrics.jsonl` has besides metrics."""


def draw_learning_curve(lines: Sequence[Mapping[str, object]], file: Path) -> None:
    """Draws the lines of `metrics.jsonl` as a PNG, one panel a metric.

    Args:
        lines: What `RunDirectory.record` noted.
        file: Where the picture goes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted({_base(name) for line in lines for name in line if name not in ABOUT})
    # Loss first: it is what is looked at first.
    names.sort(key=lambda name: name != "loss")
    figure, panels = pyplot.subplots(1, max(1, len(names)), figsize=(5 * max(1, len(names)), 3.6), squeeze=False)
    for panel, name in zip(panels[0], names, strict=False):
        for kind, style, label in (("train", "-", "training, running"), ("epoch", "o-", "training, epoch")):
            _plot(panel, lines, (kind,), name, style, label)
        _plot(panel, lines, ("epoch", "evaluation"), f"val_{name}", "s-", "held out")
        panel.set_title(name)
        panel.set_xlabel("version")
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _base(name: str) -> str:
    return name.removeprefix("val_")


def _plot(
    panel: Axes, lines: Sequence[Mapping[str, object]], kinds: Sequence[str], name: str, style: str, label: str
) -> None:
    # Sorted: an evaluation during training ends when later versions have been noted.
    points = sorted((line["version"], line[name]) for line in lines if line["kind"] in kinds and name in line)
    if points:
        versions, values = zip(*points, strict=True)
        panel.plot(versions, values, style, label=label, markersize=5, linewidth=1.4)
