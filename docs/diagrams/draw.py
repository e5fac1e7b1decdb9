"""Draws the pictures of README.md and of the pages.

    python docs/diagrams/draw.py

Boxes are placed by hand, arrows lead from edge to edge; colours follow the
reader's light or dark theme.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; font-size: 15px; }
  .on-arrow { font-size: 12px; fill: #59636e; }
  rect { fill: #f6f8fa; stroke: #59636e; }
  path { stroke: #59636e; stroke-width: 1.5; fill: none; }
  .head { fill: #59636e; stroke: none; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .on-arrow { fill: #9198a1; }
    rect { fill: #151b23; stroke: #9198a1; } path { stroke: #9198a1; } .head { fill: #9198a1; }
  }
"""


@dataclass(frozen=True)
class Box:
    """A titled rectangle with lines of text; pixels from the upper left."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...]

    def draw(self) -> list[str]:
        texts = [(self.title, ' class="title"'), *((line, "") for line in self.lines)]
        return [
            f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="6"/>',
            *(
                f'<text x="{self.x + 14}" y="{self.y + 26 + 21 * number}"{style}>{escape(text)}</text>'
                for number, (text, style) in enumerate(texts)
            ),
        ]


@dataclass(frozen=True)
class Arrow:
    """A straight arrow from one point to another, with lines of text centred at `at`."""

    start: tuple[int, int]
    end: tuple[int, int]
    at: tuple[int, int]
    lines: tuple[str, ...]

    def draw(self) -> list[str]:
        (x, y), (to_x, to_y) = self.start, self.end
        return [
            f'<path d="M{x} {y} L{to_x} {to_y}" marker-end="url(#head)"/>',
            *(
                f'<text class="on-arrow" text-anchor="middle" x="{self.at[0]}" y="{self.at[1] + 15 * number}">'
                f"{escape(line)}</text>"
                for number, line in enumerate(self.lines)
            ),
        ]


@dataclass(frozen=True)
class Drawing:
    """Shapes on a canvas; `label` says to those who cannot see it what it shows."""

    width: int
    height: int
    label: str
    shapes: tuple[Box | Arrow, ...]

    def svg(self) -> str:
        """The text of the file."""
        drawn = "\n".join(f"  {line}" for shape in self.shapes for line in shape.draw())
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(self.label)}">\n'
            f"<style>{STYLE}</style>\n"
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
            'orient="auto-start-reverse"><path class="head" d="M0 0 L10 5 L0 10 z"/></marker></defs>\n'
            f"{drawn}\n</svg>\n"
        )


DATA_FLOW = Drawing(
    860,
    330,
    "Workers look up rows at the store and report gradients to the master, which commits new rows",
    (
        Box(
            20,
            20,
            270,
            120,
            "Master",
            ("finds the embedding layers", "sums gradients in order", "applies the optimizer"),
        ),
        Box(570, 20, 270, 120, "Embedding store", ("tables: rows and optimizer slots", "memory, files or Redis")),
        Box(
            240,
            230,
            380,
            85,
            "Workers (any number)",
            ("ids of a batch → rows → forward → backward", "with plain Keras layers"),
        ),
        Arrow((290, 60), (566, 60), (430, 48), ("commit: rows of version v + 1",)),
        Arrow((150, 140), (270, 226), (108, 184), ("tasks, dense weights",)),
        Arrow((330, 230), (210, 144), (368, 172), ("gradients: dense tensors", "and IndexedSlices")),
        Arrow((530, 230), (650, 144), (532, 184), ("unique ids",)),
        Arrow((710, 140), (590, 226), (768, 184), ("Batch Embedding Tensor",)),
    ),
)
VERSION = Drawing(
    860,
    250,
    "Workers compute the micro-batches of version v in any order; they are summed in their order, logged, and applied "
    "to give version v + 1",
    (
        Box(20, 20, 190, 63, "micro-batch 0", ("worker B",)),
        Box(20, 93, 190, 63, "micro-batch 1", ("worker A, died: worker C",)),
        Box(20, 166, 190, 63, "micro-batch 2", ("worker A",)),
        Arrow((210, 51), (306, 110), (0, 0), ()),
        Arrow((210, 124), (306, 124), (0, 0), ()),
        Arrow((210, 197), (306, 138), (0, 0), ()),
        Box(310, 82, 160, 84, "sum", ("in the order", "0, 1, 2")),
        Arrow((470, 124), (516, 124), (0, 0), ()),
        Box(520, 82, 140, 84, "log", ("from here on it", "is not lost")),
        Arrow((660, 124), (706, 124), (0, 0), ()),
        Box(710, 82, 130, 84, "update", ("rows of", "version v + 1")),
    ),
)
TIERS = Drawing(
    860,
    300,
    "Lookups and commits meet hot rows in memory; each commit is appended to the log; changed rows are flushed to the "
    "tier behind, and cold rows are read from it ahead of need",
    (
        Box(20, 90, 190, 84, "lookups, commits", ("of workers and", "the master")),
        Arrow((210, 132), (296, 132), (253, 122), ("rows",)),
        Box(
            300,
            60,
            240,
            144,
            "engine, in memory",
            ("hot rows with slots", "index of ids, statistics", "admission, eviction, pins", "up to budget="),
        ),
        Arrow((540, 85), (636, 60), (580, 50), ("append",)),
        Box(640, 20, 200, 84, "log", ("each commit, in order", "files or a Redis Stream")),
        Arrow((540, 150), (636, 196), (612, 148), ("flush, behind",)),
        Arrow((640, 240), (540, 190), (560, 246), ("read, ahead",)),
        Box(640, 180, 200, 84, "tier", ("rows by id: files,", "Redis, or none")),
    ),
)
STORES = Drawing(
    860,
    330,
    "With store servers, workers look up and push rows at the servers and exchange only dense gradients with the "
    "master, which sends each server one call a version",
    (
        Box(20, 120, 200, 84, "Master", ("order, dense variables,", "metrics, checkpoints")),
        Box(620, 20, 220, 84, "Store server 0", ("rows 0, 3, 6, ... of every", "table; its own log")),
        Box(620, 120, 220, 84, "Store server 1", ("rows 1, 4, 7, ...",)),
        Box(620, 220, 220, 84, "Store server 2", ("rows 2, 5, 8, ...",)),
        Arrow((220, 135), (616, 62), (370, 80), ("one call a version:",)),
        Arrow((220, 155), (616, 155), (420, 147), ("these pushes, in this order",)),
        Arrow((220, 175), (616, 245), (0, 0), ()),
        Box(250, 235, 180, 84, "Workers", ("ids split by server", "once a micro-batch")),
        Arrow((250, 270), (124, 208), (130, 250), ("dense", "gradients")),
        Arrow((430, 290), (616, 280), (520, 308), ("rows and their gradients",)),
        Arrow((430, 250), (616, 185), (0, 0), ()),
    ),
)
DRAWINGS = {"data-flow": DATA_FLOW, "version": VERSION, "tiers": TIERS, "store-servers": STORES}


if __name__ == "__main__":
    for name, drawing in DRAWINGS.items():
        Path(__file__).with_name(f"{name}.svg").write_text(drawing.svg(), encoding="utf-8")
