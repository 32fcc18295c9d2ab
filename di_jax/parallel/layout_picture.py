"""A drawing of the layout: each device of a mesh as a cell with its coordinates and what part of each kind it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from di_jax.parallel.mesh import DeviceMesh
from di_jax.parallel.placement import (
    ENGRAM,
    EXPERTS,
    KINDS,
    REPLICATED,
    STATE,
    PlacedArray,
    coordinates,
    parts_of_devices,
)

CELL_WIDTH, LINE, MARGIN, GAP = 206, 15, 16, 6
WIDTH = 1000  # at least: title and legend are of that length
# The words of a line in a cell, and what its numbers count along the axis that is cut.
_LINES = {
    EXPERTS: ("experts", "slots of a layer"),
    ENGRAM: ("engram", "rows of a table"),
    STATE: ("requests", "state slots"),
    REPLICATED: ("others", "the same everywhere"),
}


def layout_svg(title: str, arrays: Sequence[PlacedArray], plan: DeviceMesh, domain: int) -> str:
    """The picture as SVG text. domain: devices that a fast link joins; each says which such node it is in.

    Devices are in mesh order, row by row. Cells with the same color in a line hold the same part.
    """
    kinds = [kind for kind in KINDS if any(array.kind == kind for array in arrays)]
    columns = min(plan.world, 8)
    rows = math.ceil(plan.world / columns)
    height = (2 + len(kinds)) * LINE + GAP
    top = MARGIN + 2 * LINE
    legend = top + rows * (height + GAP) + LINE
    size = (max(2 * MARGIN + columns * (CELL_WIDTH + GAP), WIDTH), legend + (len(kinds) + 1) * LINE + MARGIN)
    spans = {kind: parts_of_devices(_largest(kind, arrays), plan) for kind in kinds}
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
        f'viewBox="0 0 {size[0]} {size[1]}" font-family="monospace" font-size="11">',
        f'<rect width="{size[0]}" height="{size[1]}" fill="white"/>',
        _text(MARGIN, MARGIN + LINE // 2, title, "font-size='14' font-weight='bold'"),
    ]
    for rank in range(plan.world):
        x = MARGIN + rank % columns * (CELL_WIDTH + GAP)
        y = top + rank // columns * (height + GAP)
        out.append(f'<g id="device-{rank}">')
        out.append(f'<rect x="{x}" y="{y}" width="{CELL_WIDTH}" height="{height}" fill="none" stroke="#555"/>')
        out.append(_text(x + 4, y + LINE - 3, f"device {rank}" + _group(rank, plan, domain), "font-weight='bold'"))
        out.append(_text(x + 4, y + 2 * LINE - 3, _coordinates(rank, plan), "fill='#555'"))
        for line, kind in enumerate(kinds):
            at = y + (2 + line) * LINE + 2
            first, last = spans[kind][rank]
            parts = sorted(set(spans[kind]))
            color = _color(parts.index((first, last)), len(parts))
            out.append(f'<rect x="{x + 2}" y="{at}" width="{CELL_WIDTH - 4}" height="{LINE - 1}" fill="{color}"/>')
            words = "all" if len(parts) == 1 else f"{first:,}-{last - 1:,}"
            out.append(_text(x + 4, at + LINE - 4, f"{_LINES[kind][0]} {words}"))
        out.append("</g>")
    out.append(_text(MARGIN, legend, "bytes of a device", "font-weight='bold'"))
    for line, kind in enumerate(kinds):
        out.append(_text(MARGIN, legend + (line + 1) * LINE, _legend(kind, arrays)))
    return "\n".join([*out, "</svg>", ""])


def _largest(kind: str, arrays: Sequence[PlacedArray]) -> PlacedArray:
    """The array that stands for a kind; window rings, which count slots, for the state."""
    those = [array for array in arrays if array.kind == kind]
    return next((a for a in those if a.name == "state.window"), max(those, key=lambda a: a.bytes_per_device))


def _legend(kind: str, arrays: Sequence[PlacedArray]) -> str:
    those = [array for array in arrays if array.kind == kind]
    nbytes = sum(array.bytes_per_device for array in those)
    spec = _largest(kind, arrays).spec
    name, counted = _LINES[kind]
    return (
        f"{name}: {kind} ({counted}), {nbytes / 1e9:,.2f} GB in {len(those)} arrays, "
        f"such as {_largest(kind, arrays).name} {spec}"
    )


def _group(rank: int, plan: DeviceMesh, domain: int) -> str:
    return f", node {rank // domain}" if domain < plan.world else ""


def _coordinates(rank: int, plan: DeviceMesh) -> str:
    """The device's place along each axis of more than one rank."""
    places = coordinates(rank, plan)
    return " ".join(f"{axis}={places[axis]}" for axis in places if plan.axis_sizes[axis] > 1) or "the only device"


def _color(index: int, count: int) -> str:
    """A light color of its own for each of `count` parts; grey when all hold the same."""
    return "#e4e4e4" if count == 1 else f"hsl({360 * index // count},70%,80%)"


def _text(x: int, y: int, words: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'
