#!/usr/bin/env python
"""Draw the house: docs/house.svg, every room with what it is for and the rooms it imports, from the imports there are.

    tools/house.py             draw it
    tools/house.py --check     only say whether the picture is current

A row is a layer of `.importlinter`: a room imports rooms below its own. A line that follows from others is left out; a
dashed one leads to a room of the same row. The words are the first sentence of each package's docstring.
"""

from __future__ import annotations

import ast
import configparser
import re
import sys
from collections import defaultdict
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Final

import grimp

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCE: Final = ROOT / "src" / "headrace"
TARGET: Final = ROOT / "docs" / "house.svg"
WIDTH, BOX_WIDTH, BOX_HEIGHT, ROW_HEIGHT = 1200, 270, 62, 96
STYLE: Final = """
  text { font-family: sans-serif; fill: #222 } .name { font-size: 15px; font-weight: bold } .what { font-size: 10.5px }
  rect { fill: #f4f1ea; stroke: #8a7f6a } path { fill: none; stroke: #8a7f6a; stroke-opacity: .55 }
  .beside { stroke-dasharray: 4 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #ddd } rect { fill: #2b2926; stroke: #a39678 } path { stroke: #a39678 }
  }
"""
Edges = dict[str, set[str]]


def layers() -> list[list[str]]:
    """Rooms by row, the uppermost first."""
    rules = configparser.ConfigParser()
    rules.read(ROOT / ".importlinter")
    lines = rules["importlinter:contract:rooms"]["layers"].strip().splitlines()
    return [re.findall(r"\w+", line) for line in lines]


def imports() -> Edges:
    """Which room imports which, of any of its modules."""
    graph = grimp.build_graph("headrace")
    found: Edges = defaultdict(set)
    for module in sorted(graph.modules - {"headrace"}):
        room = module.split(".")[1]
        for other in graph.find_modules_directly_imported_by(module) - {"headrace"}:
            if other.split(".")[1] != room:
                found[room].add(other.split(".")[1])
    return found


def reachable(edges: Edges, start: str) -> set[str]:
    seen: set[str] = set()
    left = [start]
    while left:
        for room in edges.get(left.pop(), set()) - seen:
            seen.add(room)
            left.append(room)
    return seen


def shortest(edges: Edges) -> Edges:
    """Without those that follow from others."""
    found: Edges = defaultdict(set)
    for room, others in edges.items():
        for other in others:
            through = [each for each in others if each != other and room not in reachable(edges, each)]
            if not any(other in reachable(edges, each) for each in through):
                found[room].add(other)
    return found


def purpose(room: str) -> str:
    path = SOURCE / room / "__init__.py"
    text = ast.get_docstring(ast.parse((path if path.exists() else SOURCE / f"{room}.py").read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def picture() -> str:
    rows = layers()
    places: dict[str, tuple[float, float, int]] = {}
    parts: list[str] = []
    for at, row in enumerate(rows):
        left = (WIDTH - len(row) * (BOX_WIDTH + 40) + 40) / 2
        for column, room in enumerate(row):
            places[room] = (left + column * (BOX_WIDTH + 40), 20 + at * ROW_HEIGHT, at)
    for room, others in sorted(shortest(imports()).items()):
        parts += [line(places[room], places[other]) for other in sorted(others)]
    for room, (x, y, _) in places.items():
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5"/>')
        parts.append(f'<text class="name" x="{x + 10:g}" y="{y + 19:g}">{room}</text>')
        for number, words in enumerate(wrap(purpose(room), 46, max_lines=3, placeholder=" ...")):
            parts.append(f'<text class="what" x="{x + 10:g}" y="{y + 33 + 12 * number:g}">{escape(words)}</text>')
    height = 20 + len(rows) * ROW_HEIGHT
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def line(start: tuple[float, float, int], end: tuple[float, float, int]) -> str:
    (x, y, row), (to_x, to_y, to_row) = start, end
    if row == to_row:
        edge = min(x, to_x) + BOX_WIDTH
        return f'<path class="beside" d="M{edge:g} {y + BOX_HEIGHT / 2:g} H{max(x, to_x):g}"/>'
    x, to_x, y = x + BOX_WIDTH / 2, to_x + BOX_WIDTH / 2, y + BOX_HEIGHT
    middle = (y + to_y) / 2
    if to_row == row + 1:
        return f'<path d="M{x:g} {y:g} C{x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {to_y:g}"/>'
    # Past the boxes of the rows between, at the nearer side of the picture, those that go far further out.
    out = (to_row - row) * 14 - 170
    aside = out if x + to_x < WIDTH or (x + to_x == WIDTH and row % 2) else WIDTH - out
    return f'<path d="M{x:g} {y:g} C{aside:g} {y + 40:g} {aside:g} {to_y - 40:g} {to_x:g} {to_y:g}"/>'


def main() -> int:
    drawn = picture()
    if "--check" in sys.argv[1:]:
        if not TARGET.exists() or TARGET.read_text() != drawn:
            print("docs/house.svg is not what the imports are; run `make house`", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
