"""Draws data-flow.svg, the picture of the way of the data in README.md.

    python docs/diagrams/data_flow.py

Boxes are placed by hand, arrows lead from edge to edge; colours follow the
reader's light or dark theme.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 860, 330
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


MASTER = Box(
    20, 20, 270, 120, "Master", ("finds the embedding layers", "sums gradients in order", "applies the optimizer")
)
STORE = Box(570, 20, 270, 120, "Embedding store", ("tables: rows and optimizer slots", "memory, files or Redis"))
WORKERS = Box(
    240, 230, 380, 85, "Workers (any number)", ("ids of a batch → rows → forward → backward", "with plain Keras layers")
)
SHAPES: tuple[Box | Arrow, ...] = (
    MASTER,
    STORE,
    WORKERS,
    Arrow((290, 60), (566, 60), (430, 48), ("commit: rows of version v + 1",)),
    Arrow((150, 140), (270, 226), (108, 184), ("tasks, dense weights",)),
    Arrow((330, 230), (210, 144), (368, 172), ("gradients: dense tensors", "and IndexedSlices")),
    Arrow((530, 230), (650, 144), (532, 184), ("unique ids",)),
    Arrow((710, 140), (590, 226), (768, 184), ("Batch Embedding Tensor",)),
)


def svg() -> str:
    """The text of the file."""
    drawn = "\n".join(f"  {line}" for shape in SHAPES for line in shape.draw())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="Workers look up rows at the store and report gradients to the master, which commits new rows">\n'
        f"<style>{STYLE}</style>\n"
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
        'orient="auto-start-reverse"><path class="head" d="M0 0 L10 5 L0 10 z"/></marker></defs>\n'
        f"{drawn}\n</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_name("data-flow.svg").write_text(svg(), encoding="utf-8")
