"""The picture of a search: the best result so far, and the results over each setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["draw_search"]


def draw_search(trials: Sequence[tuple[int, float, Mapping[str, object]]], file: Path) -> None:
    """Draws trials as a PNG.

    Args:
        trials: Number, result and settings of each.
        file: Where the picture goes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for _, _, settings in trials for name in settings))
    figure, panels = pyplot.subplots(1, 1 + len(names), figsize=(4 * (1 + len(names)), 3.6), squeeze=False)
    ordered = sorted(trials, key=lambda trial: trial[0])
    best = [max(result for _, result, _ in ordered[: place + 1]) for place in range(len(ordered))]
    panels[0][0].plot([number for number, *_ in ordered], [result for _, result, _ in ordered], "o", markersize=4)
    panels[0][0].step([number for number, *_ in ordered], best, where="post")
    panels[0][0].set_xlabel("trial")
    panels[0][0].set_ylabel("validation MRR")
    for panel, name in zip(panels[0][1:], names, strict=True):
        points = [(settings[name], result) for _, result, settings in ordered if name in settings]
        numbers = [value for value, _ in points if isinstance(value, int | float) and not isinstance(value, bool)]
        shown = [value if len(numbers) == len(points) else str(value) for value, _ in points]
        panel.plot(shown, [result for _, result in points], "o", markersize=4)
        if numbers and len(numbers) == len(points) and min(numbers) > 0 and max(numbers) >= 20 * min(numbers):
            panel.set_xscale("log")
        panel.set_xlabel(name)
    for panel in panels[0]:
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
