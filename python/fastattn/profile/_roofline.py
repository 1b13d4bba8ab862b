"""The roofline: what each rung does, against what the card could do at the same intensity.

S. Williams, A. Waterman, D. Patterson, "Roofline: An Insightful Visual Performance Model for
Multicore Architectures", CACM 52(4), 2009. As in Nsight Compute, a point is executed fp32
operations per second over executed fp32 operations per byte of DRAM traffic, and the roofs are the
card's own: multiply-adds a cycle times the SM clock, bytes a cycle times the memory clock.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import itertools
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMATS = (".png", ".svg")

_SIZE = (7.2, 4.5)  # inches
# Sets the rungs apart in print and for every eye; colour carries nothing.
_MARKERS = "osD^vP*X"


@dataclass(frozen=True)
class _Point:
    name: str
    intensity: float  # FLOP/byte
    tflops: float


@dataclass(frozen=True)
class _Chart:
    title: str
    subtitle: str
    peak_tflops: float
    bandwidth_tbs: float
    points: tuple[_Point, ...]

    @property
    def ridge(self) -> float:
        """The intensity, in FLOP/byte, from which on arithmetic limits and no longer memory."""
        return self.peak_tflops / self.bandwidth_tbs


def has_matplotlib() -> bool:
    """Whether a picture can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def _chart(record: dict[str, Any]) -> _Chart:
    rows = record["rows"]
    known = [r for r in rows if r["fp32_peak_tflops"] and r["dram_peak_gbs"]]
    points = tuple(
        _Point(r["impl"], r["intensity"], r["executed_tflops"])
        for r in rows
        # What works on tensor cores has other roofs, and its operations are not counted here.
        if r["intensity"] and r["executed_tflops"] and not r.get("tensor_pipe_busy")
    )
    if not known or not points:
        raise ValueError(
            "the record lacks what a roofline is drawn of: the peaks, and intensity and executed "
            "TFLOP/s of a kernel at least"
        )
    # Clocks are not locked: the roof is that of the launch that ran at the highest.
    top = max(known, key=lambda r: r["fp32_peak_tflops"])
    first = rows[0]
    return _Chart(
        title=f"fp32 roofline: {record['meta']['gpu']}, SM clock {top['sm_clock_mhz']:,.0f} MHz",
        subtitle=f"B={first['batch']}, H={first['heads_q']}, M=N={first['len_q']}, "
        f"D={first['head_dim']}, float32, not causal",
        peak_tflops=top["fp32_peak_tflops"],
        bandwidth_tbs=max(r["dram_peak_gbs"] for r in known) * 1e-3,
        points=points,
    )


def fingerprint(record: dict[str, Any]) -> str:
    """16 hexadecimal digits that change with what the picture shows; an SVG carries them.

    Raises
    ------
    ValueError
        The record lacks what a roofline is drawn of.
    """
    text = json.dumps(asdict(_chart(record)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _spread(heights: list[float], gap: float) -> list[float]:
    """Heights of labels at least ``gap`` apart, close to the given ones, in the same order."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = list(heights)
    for below, above in itertools.pairwise(order):
        placed[above] = max(placed[above], placed[below] + gap)
    return placed


def draw(record: dict[str, Any], path: Path | str) -> None:
    """Draws all rungs of a record on its card's roofline, without a display.

    Parameters
    ----------
    record
        Of ``python -m fastattn.profile --json``.
    path
        A file that ends in .png or .svg. The same record and matplotlib give the same bytes.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    OSError
        The file can't be written.
    ValueError
        Another ending, or a record that lacks what a roofline is drawn of.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise ValueError(f"{path}: the picture is a {' or '.join(FORMATS)} file")
    chart = _chart(record)
    # matplotlib is optional, and what is installed must not change what a type checker finds.
    matplotlib: Any = importlib.import_module("matplotlib")
    figure_module: Any = importlib.import_module("matplotlib.figure")
    # Letters stay letters, and nothing in the file depends on the day or on chance.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "fastattn", "font.family": "sans-serif"}
    with matplotlib.rc_context(settings):
        figure = figure_module.Figure(figsize=_SIZE, layout="constrained")
        _draw_axes(figure.subplots(), chart)
        metadata: dict[str, Any] = {"Description": f"roofline {fingerprint(record)}"}
        if path.suffix == ".svg":
            metadata["Date"] = None
        figure.savefig(path, dpi=150, metadata=metadata)


def _draw_axes(axes: Any, chart: _Chart) -> None:
    ridge, peak = chart.ridge, chart.peak_tflops
    intensities = [p.intensity for p in chart.points] + [ridge]
    low = 10 ** math.floor(math.log10(min(intensities) / 2))
    high = 10 ** math.ceil(math.log10(max(intensities) * 3))
    bottom = 10 ** math.floor(math.log10(min(p.tflops for p in chart.points) / 1.5))
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, peak * 3))
    axes.set_xlabel("fp32 operations executed per byte of DRAM traffic, FLOP/byte")
    axes.set_ylabel("fp32 operations executed, TFLOP/s")
    axes.set_title(f"{chart.title}\n{chart.subtitle}", fontsize=10)
    axes.grid(True, which="major", color="0.85", linewidth=0.6)
    axes.set_axisbelow(True)

    axes.plot([low, ridge, high], [low * chart.bandwidth_tbs, peak, peak], color="black", lw=1.6)
    axes.plot([ridge, ridge], [bottom, peak], color="0.45", lw=1, ls="--")
    axes.annotate(
        f"ridge {ridge:.3g} FLOP/byte",
        (ridge, bottom),
        xytext=(4, 6),
        textcoords="offset points",
        fontsize=8,
        color="0.25",
    )
    axes.annotate(
        f"fp32 peak {peak:.3g} TFLOP/s",
        (high, peak),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    # On the slope, at the middle of what is seen of it.
    seen = max(low, bottom / chart.bandwidth_tbs)
    middle = math.sqrt(seen * ridge)
    axes.annotate(
        f"DRAM {chart.bandwidth_tbs:.3g} TB/s",
        (middle, middle * chart.bandwidth_tbs),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )

    heights = [math.log10(p.tflops) for p in chart.points]
    # A line of text is some 4% of the picture's height.
    gap = 0.045 * math.log10(peak * 3 / bottom)
    for i, (point, height) in enumerate(zip(chart.points, _spread(heights, gap), strict=True)):
        axes.plot(
            [point.intensity],
            [point.tflops],
            marker=_MARKERS[i % len(_MARKERS)],
            ms=8,
            color=f"{0.15 + 0.1 * (i % 4):.2f}",
            ls="none",
        )
        # A label is about a decade wide, and must end inside.
        leftward = point.intensity > high / 15
        axes.annotate(
            f"{point.name}  {point.tflops:.3g} TFLOP/s, {point.tflops / peak:.1%}",
            (point.intensity, 10**height),
            xytext=(-9 if leftward else 9, -3),
            textcoords="offset points",
            ha="right" if leftward else "left",
            fontsize=9,
            # On top of a line, a label must stay legible.
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6},
        )
