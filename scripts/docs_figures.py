"""Draws the ladder's figures: one "who owns what" a rung, and the plot of the whole ladder.

The tiles are drawn from the sizes in the rungs' sources, the plot from the benchmark's record. The
same input gives the same bytes, and text stays text. Colours follow the reader's light or dark
scheme, on a background of their own, so that a viewer that ignores the scheme shows them as well.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from docs_facts import (
    KERNELS,
    PRIMARY,
    TIMES,
    WARP,
    Rung,
    benchmark_record,
    benchmark_row,
    published,
    registry,
    rung,
)

from fastattn.explain._formulas import V6_HALF, V6_SPLIT

_RIGHT = 556.0  # width of the panels beside that of global memory
LANE = 5  # the lane whose share is shown
UNIT = 2.0  # pixels a float
ROWS_PER_PIXEL = 8  # of the tensors in global memory

_LIGHT = {
    "page": "#ffffff",
    "ink": "#1f2328",
    "dim": "#57606a",
    "line": "#afb8c1",
    "tile": "#e9edf1",
    "warp": "#5b9bd5",
    "other": "#d3e3f3",
    "lane": "#d9660a",
    "pad": "#8c959f",
}
_DARK = {
    "page": "#161b22",
    "ink": "#e6edf3",
    "dim": "#9aa4af",
    "line": "#57606a",
    "tile": "#2d333b",
    "warp": "#3f7fbf",
    "other": "#263b52",
    "lane": "#ffa657",
    "pad": "#768390",
}

_FILLS = ("page", "tile", "warp", "other", "lane", "pad")


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


class Svg:
    """A drawing, element by element."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._body: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, style: str, radius: float = 0
    ) -> None:
        """A rectangle of a class."""
        rounded = f' rx="{_number(radius)}"' if radius else ""
        place = " ".join(
            f'{key}="{_number(value)}"'
            for key, value in (("x", x), ("y", y), ("width", width), ("height", height))
        )
        self._body.append(f'<rect class="{style}" {place}{rounded}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        """A straight line of a class."""
        self._body.append(
            f'<line class="{style}" x1="{_number(x1)}" y1="{_number(y1)}" '
            f'x2="{_number(x2)}" y2="{_number(y2)}"/>'
        )

    def circle(self, x: float, y: float, radius: float, style: str) -> None:
        """A circle of a class."""
        self._body.append(
            f'<circle class="{style}" cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}"/>'
        )

    def arrow(self, x: float, y1: float, y2: float) -> None:
        """A vertical arrow from y1 to y2."""
        self.line(x, y1, x, y2, "stroke")
        back = 4 if y2 > y1 else -4
        self.line(x, y2, x - 3, y2 - back, "stroke")
        self.line(x, y2, x + 3, y2 - back, "stroke")

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "") -> None:
        """A line of text; ``anchor`` is "middle" or "end" where it is not the start."""
        attributes = f' class="{style}"' if style else ""
        attributes += f' text-anchor="{anchor}"' if anchor else ""
        place = f'x="{_number(x)}" y="{_number(y)}"'
        self._body.append(f"<text {place}{attributes}>{escape(text, quote=False)}</text>")

    def __str__(self) -> str:
        width, height = (_number(value) for value in self._size)
        light, dark = (
            "".join(f"--{name}:{color};" for name, color in colors.items())
            for colors in (_LIGHT, _DARK)
        )
        fills = "".join(f".{name}{{fill:var(--{name})}}\n" for name in _FILLS)
        style = (
            f"svg{{{light}}}\n"
            f"@media (prefers-color-scheme:dark){{svg{{{dark}}}}}\n"
            "text{font:12px system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:var(--ink)}\n"
            ".mono{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:11px}\n"
            ".head{font-weight:600;font-size:13px}\n"
            ".dim{fill:var(--dim);font-size:11px}\n"
            ".halo{paint-order:stroke;stroke:var(--page);stroke-width:4px}\n"
            ".panel{fill:none;stroke:var(--line)}\n"
            ".frame{fill:none;stroke:var(--dim)}\n"
            ".absent{fill:none;stroke:var(--line);stroke-dasharray:4 4}\n"
            ".stroke{stroke:var(--ink);stroke-width:1.2}\n"
            ".grid{stroke:var(--line);stroke-width:.8}\n"
            ".fine{stroke:var(--tile);stroke-width:.6}\n"
            ".dash{stroke:var(--ink);stroke-width:1.4;stroke-dasharray:7 4}\n"
            ".dot{stroke:var(--ink);stroke-width:1.4;stroke-dasharray:2 3}\n"
            ".path{stroke:var(--warp);stroke-width:2}\n"
            ".faint{stroke:var(--lane);stroke-width:1.2;stroke-dasharray:4 3}\n"
            ".hollow{fill:var(--page);stroke:var(--lane);stroke-width:2}\n" + fills
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">\n'
            f"<title>{escape(self._title, quote=False)}</title>\n<style>\n{style}</style>\n"
            f'<rect class="page" width="{width}" height="{height}" rx="8"/>\n'
            + "\n".join(self._body)
            + "\n</svg>\n"
        )


# --- who owns what, for the tiled rungs -----------------------------------------------------------


@dataclass(frozen=True)
class Owners:
    """How a tiled rung's work is shared out, in words and for the drawing.

    Attributes
    ----------
    block, warp, lane : str
        One line each.
    strided : bool
        Warp w takes rows w, w + warps, …; else a run of rows.
    """

    block: str
    warp: str
    lane: str
    strided: bool = False


def _owners(item: Rung) -> Owners:
    blocks = f"{item.blocks(PRIMARY):,} blocks"
    if not item.tiles_queries:
        return Owners(
            f"block: one (batch, head), all of its tiles; {blocks}",
            f"warp: in each phase every {item.warps}th row of the tile, so phases need barriers",
            "lane: one key of a score row; in P V every 32nd column",
            strided=True,
        )
    rows = item.block_q // item.warps
    columns = "output columns lane and lane + 32" if registers(item) else "every 32nd column"
    return Owners(
        f"block: {item.block_q} query rows of one head; {blocks}",
        f"warp: {rows} of these rows, from the scores to the output",
        f"lane: one key of the tile in Q Kᵀ and in the softmax; in P V {columns}",
    )


def registers(item: Rung) -> list[tuple[str, tuple[int, ...]]]:
    """A lane's arrays, which the compiler keeps in registers: name and shape."""
    text = item.source.read_text()
    found = re.findall(r"^ +float (\w+)((?:\[k\w+\])+)(?: = \{\})?;", text, re.MULTILINE)
    kernel = text[text.index("__global__") :]
    return [
        (name, tuple(item.constants[size] for size in re.findall(r"\[(k\w+)\]", sizes)))
        for name, sizes in found
        if f"float {name}{sizes}" in kernel
    ]


def _bands(
    svg: Svg, item: Rung, x: float, y: float, width: float, rows: int, strided: bool
) -> None:
    """A tile's rows in the colours of their warps: warp 0 strong, the others by turns."""
    svg.rect(x, y, width, rows * UNIT, "tile")
    size = 1 if strided else rows // item.warps
    for start in range(0, rows, size):
        warp = start // size % item.warps
        if warp == 0:
            svg.rect(x, y + start * UNIT, width, size * UNIT, "warp")
        elif warp % 2:
            svg.rect(x, y + start * UNIT, width, size * UNIT, "other")


def _label(svg: Svg, x: float, y: float, name: str, note: str | Sequence[int]) -> None:
    svg.text(x, y - 18, name, "mono")
    svg.text(x, y - 5, note if isinstance(note, str) else TIMES.join(map(str, note)), "dim")


def _output_columns(svg: Svg, x: float, y: float, rows: int, columns: int) -> None:
    for column in range(LANE, columns, WARP):
        svg.rect(x + column * UNIT, y, UNIT, rows * UNIT, "lane")


def _global_panel(svg: Svg, item: Rung, x: float, y: float, height: float) -> None:
    """The tensors of one head as strips, what a block owns of them, and how it walks them."""
    svg.rect(x, y, 160, height, "panel", 6)
    svg.text(x + 12, y + 20, "global memory", "head")
    svg.text(x + 12, y + 36, f"one head: {PRIMARY.length:,} rows", "dim")
    top, length = y + 66, PRIMARY.length / ROWS_PER_PIXEL
    for index, name in enumerate("QKVO"):
        left = x + 12 + index * 37
        svg.text(left + 12, top - 8, name, "mono", "middle")
        svg.rect(left, top, 24, length, "tile")
        is_query = name in "QO"
        tile = (item.block_q if is_query else item.block_kv) / ROWS_PER_PIXEL
        if is_query and item.tiles_queries:
            svg.rect(left, top + 5 * tile, 24, tile, "warp")
        else:
            # Walked from the first row to the last.
            svg.rect(left, top + 2 * tile, 24, tile, "lane" if not is_query else "warp")
            svg.arrow(left + 12, top + 4 * tile, top + length - 8)
        svg.rect(left, top, 24, length, "frame")
    notes = (
        [
            f"K, V: a block walks {PRIMARY.length // item.block_kv}",
            f"tiles of {item.block_kv} keys, once",
            f"Q, O: one tile of {item.block_q} rows,",
            "read and written once",
        ]
        if item.tiles_queries
        else [
            f"K, V: {PRIMARY.length // item.block_kv} tiles, once",
            "for each of them Q and O:",
            f"all {PRIMARY.length // item.block_q} tiles; O, m and l",
            "come and go each time",
        ]
    )
    for index, note in enumerate(notes):
        svg.text(x + 12, top + length + 20 + index * 15, note, "dim")


def _shared_panel(svg: Svg, item: Rung, owners: Owners, x: float, y: float, height: float) -> None:
    svg.rect(x, y, _RIGHT, height, "panel", 6)
    svg.text(x + 12, y + 20, "shared memory of a block", "head")
    svg.text(x + _RIGHT - 12, y + 20, f"{item.shared_bytes:,} bytes, to scale", "dim", "end")
    arrays = {array.name: array.shape for array in item.arrays}
    head_dim, rows, keys = PRIMARY.head_dim, item.block_q, item.block_kv
    top = y + 66
    left = x + 12

    def queries(name: str, columns: int) -> None:
        _label(svg, left, top, name, arrays[name])
        _bands(svg, item, left, top, columns * UNIT, rows, owners.strided)

    queries("sQ", head_dim)
    svg.rect(left, top, head_dim * UNIT, rows * UNIT, "frame")

    left += head_dim * UNIT + 20
    in_turns = "sKV" in arrays  # K and V share a tile
    stride = arrays["sKV" if in_turns else "sK"][1]
    _label(svg, left, top, "sKV, holding K" if in_turns else "sK", (keys, stride))
    svg.rect(left, top, stride * UNIT, keys * UNIT, "tile")
    svg.rect(left, top + LANE * UNIT, head_dim * UNIT, UNIT, "lane")
    svg.rect(left + head_dim * UNIT, top, (stride - head_dim) * UNIT, keys * UNIT, "pad")
    svg.rect(left, top, stride * UNIT, keys * UNIT, "frame")
    below = top + keys * UNIT + 42
    _label(svg, left, below, "sKV, then V" if in_turns else "sV", (keys, head_dim))
    svg.rect(left, below, head_dim * UNIT, keys * UNIT, "tile")
    _output_columns(svg, left, below, keys, head_dim)
    svg.rect(left, below, head_dim * UNIT, keys * UNIT, "frame")

    left += head_dim * UNIT + 22
    queries("sS" if "sS" in arrays else "sP", keys)
    svg.rect(left + LANE * UNIT, top, UNIT, rows * UNIT, "lane")
    svg.rect(left, top, keys * UNIT, rows * UNIT, "frame")

    left += keys * UNIT + 24
    if "sO" in arrays:
        queries("sO", head_dim)
        _output_columns(svg, left, top, rows, head_dim)
        svg.rect(left, top, head_dim * UNIT, rows * UNIT, "frame")
    else:
        _label(svg, left, top, "O, m, l", "not here: in registers")
        svg.rect(left, top, head_dim * UNIT, rows * UNIT, "absent")
    vectors = [array for array in item.arrays if len(array.shape) == 1]
    for index, vector in enumerate(vectors):
        line = top + rows * UNIT + 24 + index * 16
        svg.rect(left, line - 8, vector.shape[0], 8, "tile")
        svg.rect(left, line - 8, vector.shape[0], 8, "frame")
        svg.text(left + vector.shape[0] + 6, line, f"{vector.name}[{vector.shape[0]}]", "mono")


def _register_panel(svg: Svg, item: Rung, x: float, y: float, height: float) -> None:
    svg.rect(x, y, _RIGHT, height, "panel", 6)
    svg.text(x + 12, y + 20, f"registers of lane {LANE}", "head")
    arrays = registers(item)
    if not arrays:
        svg.text(x + 12, y + 44, "one sum at a time; what outlives a row goes to shared memory")
        return
    total = sum(math.prod(shape) for _, shape in arrays)
    text = f"{total} floats, a line for each of the warp's {arrays[0][1][0]} rows"
    svg.text(x + _RIGHT - 12, y + 20, text, "dim", "end")
    left = x + 12
    cell = 10
    for name, shape in arrays:
        rows, columns = shape[0], shape[1] if len(shape) > 1 else 1
        svg.text(left, y + 42, f"{name}{''.join(f'[{n}]' for n in shape)}", "mono")
        for row in range(rows):
            for column in range(columns):
                place = (left + column * cell, y + 50 + row * cell)
                svg.rect(*place, cell, cell, "lane" if columns > 1 or name == "rS" else "warp")
                svg.rect(*place, cell, cell, "panel")
        left += 102
    text = "blue: the same in all lanes of the warp; orange: the lane's own"
    svg.text(x + 12, y + height - 10, text, "dim")


def _legend(svg: Svg, owners: Owners, x: float, y: float) -> None:
    for index, text in enumerate((owners.block, owners.warp, owners.lane)):
        svg.text(x, y + index * 18, text)
    _swatches(
        svg,
        x,
        y + 48,
        ("warp", "warp 0's rows"),
        ("other", "other warps, by turns"),
        ("lane", f"lane {LANE}'s share"),
        ("tile", "read by all"),
    )


def _swatches(svg: Svg, x: float, y: float, *items: tuple[str, str]) -> None:
    for index, (style, text) in enumerate(items):
        left = x + index * 160
        svg.rect(left, y, 12, 12, style)
        svg.rect(left, y, 12, 12, "panel")
        svg.text(left + 18, y + 10, text, "dim")


def draw_tiled(item: Rung) -> str:
    """The figure of a rung that works on tiles in shared memory."""
    owners = _owners(item)
    height = 420.0
    register_height = 156.0 if registers(item) else 62.0
    shared_height = height - register_height - 12
    svg = Svg(760, height + 112, f"{item.name.upper()}: who owns what")
    _global_panel(svg, item, 16, 16, height)
    _shared_panel(svg, item, owners, 188, 16, shared_height)
    _register_panel(svg, item, 188, 28 + shared_height, register_height)
    _legend(svg, owners, 28, height + 44)
    return str(svg)


# --- V5 -------------------------------------------------------------------------------------------


def _ring_owners(item: Rung) -> Owners:
    x, y, tile = (item.constants[name] for name in ("kX", "kY", "kTile"))
    return Owners(
        f"block: {item.block_q} query rows of one head; {item.blocks(PRIMARY):,} blocks",
        f"warp: {item.block_q // item.warps} of these rows, against all keys of a tile",
        f"lane (x, y) of {x}{TIMES}{y}: every {y}th row, every {x}th key and {tile} output columns",
    )


def _ring_shared_panel(svg: Svg, item: Rung, x: float, y: float, height: float) -> None:
    svg.rect(x, y, _RIGHT, height, "panel", 6)
    svg.text(x + 12, y + 20, "shared memory of a block", "head")
    svg.text(x + _RIGHT - 12, y + 20, f"{item.shared_bytes:,} bytes, to scale", "dim", "end")
    names = item.constants
    unit, top, tile = 1.5, y + 66, names["kTile"]
    lane_x, lane_y = LANE % names["kX"], LANE // names["kX"]
    rows = [lane_y + names["kY"] * i for i in range(tile)]
    keys = [lane_x + names["kX"] * j for j in range(tile)]
    depth, columns = names["kDepthV"], names["kHeadDimV"]

    def banded(left: float, name: str, width: int) -> None:
        _label(svg, left, top, name, (item.block_q, width))
        svg.rect(left, top, width * unit, item.block_q * unit, "tile")
        for warp in range(item.warps):
            if warp == 0 or warp % 2:
                start = top + warp * (item.block_q // item.warps) * unit
                band = (item.block_q // item.warps) * unit
                svg.rect(left, start, width * unit, band, "other" if warp else "warp")

    left = x + 12
    banded(left, "sQ", depth)
    for row in rows:
        svg.rect(left, top + row * unit, depth * unit, unit, "lane")
    svg.rect(left, top, depth * unit, item.block_q * unit, "frame")

    left += depth * unit + 14
    for piece, note in enumerate(("K: in use", "V: on its way", "K of the next tile")):
        side, high = (depth, item.block_kv) if "K" in note else (columns, depth)
        _label(svg, left, top, f"sRing[{piece}]", note)
        svg.rect(left, top, side * unit, high * unit, "tile")
        if piece == 0:
            for key in keys:
                svg.rect(left, top + key * unit, side * unit, unit, "lane")
        elif piece == 1:
            for column in (4 * lane_x, 4 * (lane_x + names["kX"])):
                svg.rect(left + column * unit, top, 4 * unit, high * unit, "lane")
        style = "frame" if piece == 0 else "absent"
        svg.rect(left, top, side * unit, high * unit, style)
        left += side * unit + 8
    below = top + item.block_kv * unit + 24
    start = x + 12 + depth * unit + 14
    for index, text in enumerate(
        (
            f"{names['kStages']} pieces of {item.block_kv}{TIMES}{depth} take turns: one is read,",
            "the others are copied meanwhile, without a register.",
            "A lane reads 16 bytes at a time; chunks of Q, K and P",
            "are swizzled, so no row is padded.",
        )
    ):
        svg.text(start, below + 16 * index, text, "dim")

    left += 6
    banded(left, "sP", item.block_kv)
    for row in rows:
        for key in keys:
            svg.rect(left + key * unit, top + row * unit, unit, unit, "lane")
    svg.rect(left, top, item.block_kv * unit, item.block_q * unit, "frame")


def _ring_register_panel(svg: Svg, item: Rung, x: float, y: float, height: float) -> None:
    svg.rect(x, y, _RIGHT, height, "panel", 6)
    arrays = dict(registers(item))
    svg.text(x + 12, y + 20, f"registers of lane {LANE}", "head")
    text = f"a line for each of its {item.constants['kTile']} rows; rS and rPV take turns"
    svg.text(x + _RIGHT - 12, y + 20, text, "dim", "end")
    left, cell = x + 12, 10
    for name in ("rS", "rPV", "rO", "row_max", "row_sum", "rescale"):
        rows, columns = (*arrays[name], 1)[:2]
        svg.text(left, y + 42, f"{name}{''.join(f'[{n}]' for n in arrays[name])}", "mono")
        style = "warp" if name in ("row_max", "rescale") else "lane"
        for row, column in itertools.product(range(rows), range(columns)):
            place = (left + column * cell, y + 50 + row * cell)
            svg.rect(*place, cell, cell, style)
            svg.rect(*place, cell, cell, "panel")
        left += 96 if columns > 1 else 84
    text = f"blue: the same in the {item.constants['kX']} lanes of a row; orange: the lane's own"
    svg.text(x + 12, y + height - 10, text, "dim")


def draw_ring(item: Rung) -> str:
    """The figure of a rung with tiles in registers, fed by a ring of pieces of K and V."""
    height, register_height = 440.0, 156.0
    shared_height = height - register_height - 12
    svg = Svg(760, height + 112, f"{item.name.upper()}: who owns what")
    _global_panel(svg, item, 16, 16, height)
    _ring_shared_panel(svg, item, 188, 16, shared_height)
    _ring_register_panel(svg, item, 188, 28 + shared_height, register_height)
    _legend(svg, _ring_owners(item), 28, height + 44)
    return str(svg)


# --- V6 -------------------------------------------------------------------------------------------

_FRAGMENT_CELL = 24.0  # pixels: two neighbouring numbers, which one register holds


def _fragment(
    svg: Svg,
    x: float,
    y: float,
    columns: int,
    cell: float,
    *,
    upright: bool = False,
    numbered: bool = True,
) -> None:
    """A fragment of 16 rows in pairs of numbers: the lane of each, and registers in two shades.

    ``upright``: pairs lie below each other, and a lane has a column; else they lie in a row.
    """
    rows, pairs = (8, columns) if upright else (16, columns // 2)
    high = 2 * cell if upright else cell
    for row, pair in itertools.product(range(rows), range(pairs)):
        lane = 4 * pair + row % 4 if upright else 4 * (row % 8) + pair % 4
        register = row // 4 if upright else row // 8 + pair // 4
        left, top = x + pair * _FRAGMENT_CELL, y + row * high
        style = "lane" if lane == LANE else "other" if register % 2 else "tile"
        svg.rect(left, top, _FRAGMENT_CELL, high, style)
        svg.rect(left, top, _FRAGMENT_CELL, high, "panel")
        if numbered:
            middle = top + high / 2 + 4
            svg.text(left + _FRAGMENT_CELL / 2, middle, str(lane), "mono", "middle")
    svg.rect(x, y, pairs * _FRAGMENT_CELL, 16 * cell, "frame")


def _one_product(svg: Svg, x: float, y: float) -> None:
    svg.rect(x, y, 728, 352, "panel", 6)
    svg.text(x + 12, y + 20, "one mma of a warp: D = A B + D", "head")
    text = f"a cell: two numbers, which one lane holds, by its number; orange: lane {LANE}"
    svg.text(x + 716, y + 20, text, "dim", "end")
    cell, top = 15.0, y + 76
    for left, name, size, registers, columns, upright in (
        (x + 26, "A", "16 rows, 16 deep", ("a[0], below a[1]", "a[2], below a[3]"), 16, False),
        (x + 294, "B", "16 deep, 8 columns", ("b[0], below b[1]",), 8, True),
        (x + 562, "D", "16 rows, 8 columns", ("d[0], d[1]", "below d[2], d[3]"), 8, False),
    ):
        svg.text(left, top - 34, name, "head")
        svg.text(left + 18, top - 34, size, "dim")
        for index, text in enumerate(registers):
            step = index * 96 if name == "A" else 0
            line = top - 20 + 13 * index if name == "D" else top - 6
            svg.text(left + step, line, text, "dim")
        _fragment(svg, left, top, columns, cell, upright=upright)
    svg.text(x + 256, top + 8 * cell + 4, "times", "", "middle")
    svg.text(x + 524, top + 8 * cell + 4, "gives", "", "middle")
    text = "A is Q and then P, by rows. B is Kᵀ and then V: a lane holds two numbers of a column."
    svg.text(x + 12, y + 340, text, "dim")


def _scores_to_weights(svg: Svg, x: float, y: float) -> None:
    svg.rect(x, y, 728, 250, "panel", 6)
    svg.text(x + 12, y + 20, "results of Q Kᵀ are an operand of P V as they lie", "head")
    cell, top, half = 9.0, y + 62, 4 * _FRAGMENT_CELL
    left = x + 26
    svg.text(left, top - 20, "S of 8 keys", "mono")
    svg.text(left + half + 12, top - 20, "of the next 8", "mono")
    for index in range(2):
        place = left + index * (half + 12)
        svg.text(place, top - 6, ("s[0] s[1] / s[2] s[3]"), "dim")
        _fragment(svg, place, top, 8, cell, numbered=False)
    svg.text(x + 296, top + 66, "2^(s - reference),", "dim", "middle")
    svg.text(x + 296, top + 80, "rounded to 16 bits", "dim", "middle")
    left = x + 366
    svg.text(left, top - 20, "P, an A of 16 keys", "mono")
    svg.text(left, top - 6, "a[0] / a[1]", "dim")
    svg.text(left + half, top - 6, "a[2] / a[3]", "dim")
    _fragment(svg, left, top, 16, cell, numbered=False)
    left += 2 * half + 18
    for index, text in enumerate(
        ("each lane packs", "its own four pairs:", "no shuffle, no", "shared memory")
    ):
        svg.text(left, top + 54 + 16 * index, text, "dim")
    text = "s[0], s[1] become a[0]; s[2], s[3] a[1]; those of the next 8 keys a[2] and a[3]."
    svg.text(x + 12, y + 238, text, "dim")


def draw_fragments(item: Rung) -> str:
    """The figure of V6: which lane holds what of a product, and how S becomes P."""
    svg = Svg(760, 708, f"{item.name.upper()}: who owns what")
    _one_product(svg, 16, 16)
    _scores_to_weights(svg, 16, 380)
    for index, (form, shapes) in enumerate((("16 bits", V6_HALF), ("float32", V6_SPLIT))):
        head_dim = PRIMARY.head_dim
        shape, tiles = shapes[head_dim], shapes[head_dim].tiles(head_dim)
        text = (
            f"{form}, D to {head_dim}: a block has {tiles['Br']} query rows of one head, a warp "
            f"{16 * shape.row_tiles} of them; {tiles['Bc']} keys at a time"
        )
        svg.text(28, 656 + 18 * index, text)
    text = "a lane: of each 8 rows one, and of each 8 keys or columns two neighbours"
    svg.text(28, 692, text)
    return str(svg)


_DRAWINGS = {"v6": draw_fragments}  # of folders, by name


# --- V0 -------------------------------------------------------------------------------------------


def draw_unfused(item: Rung) -> str:
    """The figure of V0: three kernels and the matrix between them."""
    svg = Svg(760, 356, f"{item.name.upper()}: who owns what")
    side, strip, at = 128.0, 26.0, 40.0
    rows_per_block = item.constants["kRowsPerBlock"]
    panels = (
        ("1: scores", "S = scale · Q Kᵀ", "a thread: one score"),
        (
            "2: softmax",
            "P = softmax(S), in place",
            f"a warp: one row; {rows_per_block} rows a block",
        ),
        ("3: output", "O = P V", "a thread: one element of O"),
    )

    def matrix(x: float, y: float, width: float, height: float, name: str) -> None:
        svg.rect(x, y, width, height, "tile")
        if name:
            svg.text(x + width / 2, y - 6, name, "mono", "middle")

    for index, (title, formula, owner) in enumerate(panels):
        x, y = 16.0 + index * 246, 16.0
        svg.rect(x, y, 236, 272, "panel", 6)
        svg.text(x + 12, y + 20, title, "head")
        svg.text(x + 12, y + 38, formula, "dim")
        svg.text(x + 12, y + 260, owner)
        left, top = x + 50, y + 94
        matrix(left, top, side, side, "")
        if index == 0:
            matrix(left - 36, top, strip, side, "Q")
            svg.rect(left - 36, top + at, strip, 3, "lane")
            svg.rect(left - 36, top, strip, side, "frame")
            matrix(left, top - 34, side, strip, "")
            svg.text(left + side + 6, top - 16, "Kᵀ", "mono")
            svg.rect(left + 60, top - 34, 3, strip, "lane")
            svg.rect(left, top - 34, side, strip, "frame")
            svg.rect(left + 32, top + at, 64, 3, "other")
            svg.rect(left + 60, top + at, 3, 3, "lane")
        else:
            svg.rect(left, top + at, side, 3, "warp" if index == 1 else "lane")
        svg.rect(left, top, side, side, "frame")
        name = ("S", "S, then P", "P")[index]
        size = f"{name}  [{PRIMARY.length}{TIMES}{PRIMARY.length}]"
        svg.text(left + side / 2, top + side + 16, size, "mono", "middle")
        if index == 2:
            right = left + side + 12
            matrix(right, top, strip, side, "V")
            svg.rect(right + 10, top, 3, side, "lane")
            svg.rect(right, top, strip, side, "frame")
            matrix(left - 36, top, strip, side, "O")
            svg.rect(left - 26, top + at, 3, 3, "lane")
            svg.rect(left - 36, top, strip, side, "frame")
    text = (
        "All of it lies in global memory, for each head; nothing stays on the chip between kernels."
    )
    svg.text(28, 312, text)
    _swatches(
        svg,
        28,
        326,
        ("lane", "one thread's share"),
        ("other", "its warp's 32 scores"),
        ("warp", "a warp's row"),
    )
    return str(svg)


def draw_owners(name: str) -> str:
    """The figure of one rung."""
    item = rung(name)
    if item.source.parent != KERNELS:
        if name not in _DRAWINGS:
            raise ValueError(f"{name}: a folder; docs_figures needs a drawing")
        return _DRAWINGS[name](item)
    if not item.arrays:
        return draw_unfused(item)
    names = {array.name for array in item.arrays}
    if "sRing" in names:
        return draw_ring(item)
    if "sQ" not in names:
        raise ValueError(f"{name}: its shared memory is new here; docs_figures needs a drawing")
    return draw_tiled(item)


# --- the ladder -----------------------------------------------------------------------------------


def draw_ladder() -> str:
    """Time of every rung on a log axis, with torch's two calls as lines."""
    names = list(registry())
    gpu = str(benchmark_record()["meta"]["gpu"]).removeprefix("NVIDIA ")
    known = published()
    measured = {name: benchmark_row(name)["us"] for name in (*names, "torch_naive", "torch_sdpa")}
    old = {name: known["us"][name] for name in names if name in known["us"]}
    every = [*measured.values(), *old.values()]
    low, high = math.floor(math.log10(min(every))), math.ceil(math.log10(max(every)))
    left, right, top, bottom = 76.0, 576.0, 62.0, 362.0
    svg = Svg(760, 430, "The ladder: time of every rung")

    def level(us: float) -> float:
        return bottom - (math.log10(us) - low) / (high - low) * (bottom - top)

    svg.text(20, 28, "Time of one forward call, log scale; lower is faster", "head")
    shape = f"B={PRIMARY.batch}, H={PRIMARY.heads}, M=N={PRIMARY.length}, D={PRIMARY.head_dim}"
    svg.text(20, 46, f"{shape}, float32, not causal", "dim")
    for exponent in range(low, high + 1):
        for factor in range(1, 10 if exponent < high else 2):
            us = factor * 10.0**exponent
            svg.line(left, level(us), right, level(us), "grid" if factor == 1 else "fine")
        text = f"{10.0 ** (exponent - 3):g} ms"
        svg.text(left - 8, level(10.0**exponent) + 4, text, "dim", "end")
    spread = (right - left) / len(names)
    places = {name: left + spread * (index + 0.5) for index, name in enumerate(names)}

    lines = (("torch_sdpa", "torch SDPA", "dash"), ("torch_naive", "torch naive", "dot"))
    fastest = min(measured[impl] for impl, _, _ in lines)
    for impl, title, style in lines:
        us = measured[impl]
        svg.line(left, level(us), right, level(us), style)
        # The two may lie close together: the label of the faster one goes below its line.
        shift = 10 if us == fastest else -2
        svg.text(right + 8, level(us) + shift, f"{title} {us / 1000:.3g} ms", "dim")
    for values, style in ((old, "faint"), (measured, "path")):
        points = [(places[name], level(values[name])) for name in names if name in values]
        for before, after in itertools.pairwise(points):
            svg.line(*before, *after, style)
    for name, us in old.items():
        svg.circle(places[name], level(us), 5, "hollow")
    for name in names:
        x, y = places[name], level(measured[name])
        svg.circle(x, y, 6, "warp")
        text = f"{measured[name] / 1000:.3g} ms"
        below = level(old[name]) - y if name in old else -1.0
        if name == names[-1]:
            svg.text(x + 10, y - 8, text, "halo")
        else:  # on the side that the other GPU's point leaves free
            svg.text(x, y - 14 if 0 < below < 40 else y + 22, text, "halo", "middle")
        svg.text(x, bottom + 22, name.upper(), "head", "middle")

    svg.circle(right + 18, 100, 6, "warp")
    svg.text(right + 32, 104, gpu)
    svg.text(right + 32, 120, "measured here", "dim")
    svg.circle(right + 18, 146, 5, "hollow")
    svg.text(right + 32, 150, known["gpu"])
    svg.text(right + 32, 166, "published; other code", "dim")
    rates = ", ".join(
        f"{title} {PRIMARY.flop / measured[impl] * 1e-6:.1f}"
        for impl, title in ((names[-1], names[-1].upper()), ("torch_sdpa", "SDPA"))
    )
    text = f"A call is {PRIMARY.flop / 1e9:.1f} GFLOP. TFLOP/s on the {gpu}: {rates}."
    svg.text(20, 412, text, "dim")
    return str(svg)


def figures() -> dict[str, Callable[[], str]]:
    """Every figure: its file's name and what draws it."""
    found: dict[str, Callable[[], str]] = {}
    for name in registry():
        found[name] = lambda name=name: draw_owners(name)  # type: ignore[misc]
    found["ladder"] = draw_ladder
    return found
