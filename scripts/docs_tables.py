"""The tables and values of the ladder's pages, each computed from ``docs_facts``.

``table("launch v3")`` calls ``launch`` with "v3"; ``value('us("v3")')`` evaluates an expression
over the names in ``NAMES``.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from typing import Any

import docs_facts
from docs_facts import (
    FLOAT,
    H200,
    PRIMARY,
    RTX4080,
    TIMES,
    WARP,
    Gpu,
    MissingRecordError,
    Rung,
    auto_record,
    benchmark_record,
    benchmark_row,
    forward_record,
    profile_record,
    profile_row,
    published,
    rung,
    speed_record,
    steps_record,
)

from fastattn.benchmark import _auto, _forward_report
from fastattn.explain._formulas import V6_HALF, V6_SPLIT


def markdown(head: list[str], rows: list[list[str]], align: str) -> str:
    """A Markdown table; ``align`` has one of "<" and ">" a column."""
    rule = "|" + "|".join("---:" if side == ">" else "---" for side in align) + "|"
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]])


def number(value: float, digits: int = 3) -> str:
    """To so many digits, in full: 1,536, 0.257, 58,900."""
    if value == 0:
        return "0"
    exponent = len(f"{abs(value):.0f}") if abs(value) >= 1 else 0
    if float(value).is_integer() and exponent <= 7:
        return f"{value:,.0f}"
    if exponent >= digits:
        return f"{value:,.0f}"
    return f"{value:.{digits - exponent}f}" if exponent else f"{value:.{digits}g}"


def scaled(value: float, unit: str) -> str:
    """With a decimal prefix: 51.5 GFLOP, 805 MB."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:g} {unit}"


def big(value: float) -> str:
    """A large count in words: 14.2 billion."""
    for factor, word in ((1e9, "billion"), (1e6, "million")):
        if value >= factor:
            return f"{value / factor:.3g} {word}"
    return number(value)


# --- what a launch is made of ---------------------------------------------------------------------


def _launch_column(item: Rung, gpu: Gpu, registers: int) -> list[str]:
    limits = {
        "shared memory": gpu.blocks_by_shared(item.shared_bytes),
        "registers": gpu.blocks_by_registers(item.threads, registers),
        "warps": gpu.blocks_by_threads(item.threads),
        "blocks": gpu.blocks,
    }
    least = min(limits.values())
    warps = least * item.warps
    blocks, places = item.blocks(PRIMARY), gpu.sms * least
    waves = f"{blocks / places:.2f} waves" if blocks >= places else "a part of one wave"
    busy = min(gpu.sms, blocks)
    resident = f"{warps} of {gpu.warps}: {100 * warps / gpu.warps:.1f}%"
    if blocks < gpu.sms:
        resident += f" possible; {item.warps} on {busy} SMs, none on {gpu.sms - busy}"
    return [
        str(limits["shared memory"]),
        f"{limits['registers']} ({registers} a thread)",
        str(limits["warps"]),
        f"{least}, by {' and '.join(what for what, limit in limits.items() if limit == least)}",
        resident,
        f"{blocks:,} blocks for {places:,} places: {waves}",
    ]


def launch(name: str) -> str:
    """What an SM of either GPU holds of a rung's grid at the primary shape."""
    item = rung(name)
    measured = profile_row(name)["registers"]
    known = published()["profile"].get(name)
    registers = {H200: measured} | ({RTX4080: known["registers"]} if known else {})
    labels = [
        "blocks an SM, by shared memory",
        "by registers",
        "by warps",
        "so: blocks an SM",
        "warps an SM",
        "the grid",
    ]
    columns = [_launch_column(item, gpu, registers[gpu]) for gpu in registers]
    rows = [[label, *cells] for label, *cells in zip(labels, *columns, strict=True)]
    head = ["", *(f"{gpu.name}, {gpu.sms} SMs" for gpu in registers)]
    return markdown(head, rows, "<" * len(head))


def shared(name: str) -> str:
    """The arrays of a block's shared memory."""
    item = rung(name)
    rows = [[f"`{a.name}`", TIMES.join(map(str, a.shape)), f"{a.bytes:,}"] for a in item.arrays]
    rows.append(["total", f"{item.shared_bytes // FLOAT:,} floats", f"{item.shared_bytes:,}"])
    return markdown(["array", "floats", "bytes"], rows, "<>>")


# --- counts by formula ----------------------------------------------------------------------------

_COUNTS = {
    "global_read_bytes": "global bytes read",
    "global_write_bytes": "global bytes written",
    "global_read_sectors": "32-byte sectors read",
    "global_write_sectors": "32-byte sectors written",
    "shared_read_requests": "shared reads, requests of a warp",
    "shared_read_transactions": "shared reads, turns of the banks",
    "shared_read_conflicts": "of these, conflicts",
    "shared_write_transactions": "shared writes, turns of the banks",
    "shared_write_conflicts": "of these, conflicts",
    "exponentials": "exponentials",
    "barriers": "barriers of a block",
    "warp_barriers": "barriers of a warp",
    "shuffles": "shuffles of a warp",
    "votes": "votes of a warp",
    "mmas": "tensor-core products of a warp",
    "atomics": "atomics",
}


def _formula_value(name: str, count: str) -> tuple[str, int | None]:
    """``name`` is a rung's, or one and a dtype: "v6:float16"."""
    formulas = importlib.import_module("fastattn.explain._formulas")
    kernel, _, dtype = name.partition(":")
    shape = formulas.Shape(
        PRIMARY.batch,
        PRIMARY.heads,
        PRIMARY.length,
        PRIMARY.length,
        PRIMARY.head_dim,
        dtype or "float32",
    )
    item = formulas.acting(kernel, shape)
    text = item.formulas[count].text if count in item.formulas else "0"
    return text, item.value(count, shape)


def counts(*names: str) -> str:
    """What rungs do to memory at the primary shape, and the last one's formulas."""
    rows = []
    for count, label in _COUNTS.items():
        values = [_formula_value(name, count) for name in names]
        if all(value == 0 for _, value in values):
            continue
        cells = ["-" if value is None else f"{value:,}" for _, value in values]
        rows.append([label, *cells, f"`{values[-1][0]}`"])
    titles = [name.partition(":") for name in names]
    heads = [
        f"{kernel.upper()}, {dtype}" if dtype else kernel.upper() for kernel, _, dtype in titles
    ]
    head = ["count", *heads, f"formula of {heads[-1]}"]
    return markdown(head, rows, "<" + ">" * len(names) + "<")


def mma_tiles() -> str:
    """V6's instances: what a block has, by form and head dim."""
    rows = []
    for form, shapes in (("float16, bfloat16", V6_HALF), ("float32", V6_SPLIT)):
        for head_dim, shape in shapes.items():
            tiles = shape.tiles(head_dim)
            is_half = shapes is V6_HALF
            shared = shape.half_bytes(head_dim) if is_half else shape.split_bytes(head_dim)
            rows.append(
                [
                    form,
                    str(head_dim),
                    f"{tiles['Br']}{TIMES}{tiles['Bc']}",
                    str(32 * tiles["W"]),
                    str(16 * shape.row_tiles),
                    "registers" if shape.q_in_registers else "shared memory",
                    f"{shared:,}",
                    str(H200.blocks_by_shared(shared)),
                ]
            )
    head = ["dtypes", "D and Dv to", f"query rows{TIMES}keys", "threads", "rows a warp", "Q is in"]
    head += ["shared memory, bytes", "blocks an SM that it leaves room for, H200"]
    return markdown(head, rows, "<>>>><>>")


def registers() -> str:
    """What ptxas made of each kernel, by the record of the GPU."""
    ptxas = benchmark_record()["meta"]["checks"].get("ptxas")
    if ptxas is None:
        raise MissingRecordError("the record has no registers: scripts/gpu_check writes them")
    rows = []
    for line in ptxas:
        match = re.fullmatch(r"(\S+)\.cu (\w+) (.+): (\d+) registers, (\d+) bytes spilled.*", line)
        assert match is not None, line
        file, arch, kernel, count, spilled = match.groups()
        kernel = kernel.removeprefix("<unnamed>::")
        kernel = re.sub(r"^v6::\w+::(\w+).*", r"\1", kernel)  # the file tells which instance
        rows.append([f"`{file}`", f"`{kernel}`", arch.removeprefix("sm_"), count, spilled])
    head = ["source", "kernel", "compiled for", "registers a thread", "bytes spilled"]
    return markdown(head, rows, "<<>>>")


def count(name: str, field: str) -> int:
    """One count of one rung, or of "v6:float16", at the primary shape, by its formula."""
    value = _formula_value(name, field)[1]
    if value is None:
        raise ValueError(f"{name}: no formula of {field} holds at the primary shape")
    return value


def turns(name: str) -> int:
    """Turns of the shared-memory banks, reads and writes, that the source asks for."""
    return count(name, "shared_read_transactions") + count(name, "shared_write_transactions")


def busy_sms(name: str) -> int:
    """SMs of the H200 that get a block."""
    return min(H200.sms, rung(name).blocks(PRIMARY))


def turns_ms(turns: float, sms: int = H200.sms) -> float:
    """Milliseconds that so many turns take on so many SMs, one a clock, at the measured clock."""
    return turns / sms / clock() * 1e3


def multiply_ms() -> float:
    """Milliseconds of the multiply-adds on all lanes of an H200, at the measured clock."""
    return PRIMARY.flop / 2 / (H200.sms * H200.lanes * clock()) * 1e3


def old_clock() -> float:
    """The RTX 4080's clock in Hz, from V4's published rate and its published share of the peak."""
    row = published()["profile"]["v4"]
    return float(row["tflops"] * 1e12 / (row["percent_of_peak"] / 100) / (2 * 128 * RTX4080.sms))


def sm_clocks() -> float:
    """SMs times clock, of the H200 over the RTX 4080: what more of the same would gain."""
    return H200.sms * clock() / (RTX4080.sms * old_clock())


# --- measured -------------------------------------------------------------------------------------


def us(impl: str, length: int = PRIMARY.length) -> float:
    """Microseconds of a kernel or of torch on the pages' GPU."""
    return float(benchmark_row(impl, length)["us"])


def tflops(impl: str) -> float:
    """TFLOP/s at the primary shape."""
    return PRIMARY.flop / us(impl) * 1e-6


def error(name: str) -> str:
    """The benchmark's error at the primary shape."""
    return f"{benchmark_row(name)['error']:.1e}"


def old_us(impl: str) -> float:
    """Microseconds published for an RTX 4080."""
    return float(published()["us"][impl])


def clock() -> float:
    """The SM clock of the benchmark's run, in Hz."""
    return float(benchmark_record()["meta"]["sm_clock_mhz"]) * 1e6


def times() -> str:
    """Every rung on both GPUs, as time and relative to the others."""
    names = ["torch_naive", "torch_sdpa", *docs_facts.registry()]
    known = published()["us"]
    rows = []
    for before, name in zip([None, *names], names, strict=False):
        is_rung = name in docs_facts.registry()
        old = known.get(name)
        step = old_step = ratio = "-"
        if is_rung and before in docs_facts.registry():
            step = f"{us(before) / us(name):.2f}x"
            if old and before in known:
                old_step = f"{known[before] / old:.2f}x"
        if old:
            ratio = f"{old / us(name):.2f}x"
        old_text = f"{old:,.0f}" if old else "-"
        rows.append([name, f"{us(name):,.0f}", step, old_text, old_step, ratio])
    head = ["", "H200, µs", "over the rung before", "RTX 4080, µs", "over the rung before"]
    return markdown([*head, "H200 over RTX 4080"], rows, "<>>>>>")


def _wait(place: int) -> Callable[[Any], str]:
    """What an instruction waits for, and how many cycles: longest first."""

    def show(row: Any) -> str:
        waits = [(what, cycles) for what, cycles in row["stalls"].items() if what != "selected"]
        what, cycles = waits[place]
        return f"{what} {cycles:.1f}"

    return show


def _tensor_cores(row: Any) -> str:
    """A TypeError, as for any counter that is None, where they do nothing."""
    return f"{row.get('tensor_pipe_busy') or None:.1f}%"


# What a row says; of the profile's record; of the published figures, where they have it.
_COUNTERS: tuple[tuple[str, Callable[[Any], str], Callable[[Any], str] | None], ...] = (
    ("duration, ms", lambda r: number(r["us"] / 1000), lambda r: number(r["duration_ms"])),
    # Of what was executed, as ncu's roofline has it, not of 4*B*H*M*N*D.
    (
        "TFLOP/s, all float32 instructions",
        lambda r: number(r["executed_tflops"]),
        lambda r: number(r["tflops"]),
    ),
    (
        "of the float32 peak",
        lambda r: f"{100 * r['executed_peak_share']:.1f}%",
        lambda r: f"{r['percent_of_peak']}%",
    ),
    ("FLOP per DRAM byte", lambda r: number(r["intensity"]), lambda r: number(r["intensity"])),
    ("DRAM, GB/s", lambda r: number(r["dram_gbs"]), lambda r: number(r["dram_gb_s"])),
    (
        "warps an SM, of its slots",
        lambda r: f"{r['occupancy']:.1f}%",
        lambda r: f"{r['occupancy']:.1f}%",
    ),
    (
        "in theory",
        lambda r: f"{r['occupancy_theoretical']:.1f}%",
        lambda r: f"{r['occupancy_limit']:.1f}%",
    ),
    ("blocks an SM", lambda r: str(r["blocks_per_sm"]), lambda r: str(r["blocks_per_sm"])),
    ("limited by", lambda r: ", ".join(r["limited_by"]), lambda r: r["limited_by"]),
    ("registers a thread", lambda r: str(r["registers"]), lambda r: str(r["registers"])),
    (
        "shared memory a block + the driver's, KB",
        lambda r: f"{r['shared_dynamic_bytes'] / 1000:.2f} + {r['shared_driver_bytes'] / 1000:.2f}",
        lambda r: f"{r['dynamic_shared_kb']:.2f} + {r['shared_kb'] - r['dynamic_shared_kb']:.2f}",
    ),
    ("shared loads, of a warp", lambda r: big(r["shared_loads"]), None),
    ("turns that they take", lambda r: big(r["load_wavefronts"]), None),
    ("of these, bank conflicts", lambda r: big(r["load_bank_conflicts"]), None),
    ("shared memory busy", lambda r: f"{r['shared_pipe_busy']:.1f}%", None),
    ("tensor cores busy", _tensor_cores, None),
    ("a scheduler issues", lambda r: f"{r['issue_active']:.1f}% of cycles", None),
    ("cycles an instruction waits: most", _wait(0), None),
    ("then", _wait(1), None),
    ("then", _wait(2), None),
)


def counters(*names: str) -> str:
    """Rungs before and after by the profiler's counters, and what was published of them.

    A name may have a dtype: "v6:float16".
    """
    titles = [name.partition(":") for name in names]
    measured = [profile_row(kernel, dtype or "float32") for kernel, _, dtype in titles]
    gpu = _short(profile_record()["meta"]["gpu"])
    known = {name: row for name, row in published()["profile"].items() if name in names}

    def cell(show: Callable[[Any], str] | None, row: dict[str, Any] | None) -> str:
        if show is None or row is None:
            return "-"
        try:
            return show(row).strip()
        except TypeError:  # a counter that ncu did not give
            return "-"

    rows = [
        [
            label,
            *(cell(show, row) for row in measured),
            *(cell(show_old, row) for row in known.values()),
        ]
        for label, show, show_old in _COUNTERS
    ]
    rows = [row for row in rows if set(row[1:]) != {"-"}]
    said = [f"{kernel.upper()} {dtype}".strip() for kernel, _, dtype in titles]
    head = ["", *(f"{name}, {gpu}" for name in said)]
    head += [f"{name.upper()}, RTX 4080" for name in known]
    return markdown(head, rows, "<" + ">" * (len(head) - 1))


# Of one kind of access to shared memory: counts by formula, and the profile's counters beside them.
_COUNTED = {
    "loads": {
        "requests": ("shared_read_requests", "shared_loads"),
        "turns": ("shared_read_transactions", "load_wavefronts"),
        "conflicts": ("shared_read_conflicts", "load_bank_conflicts"),
    },
    "stores": {
        "requests": ("shared_write_requests", "shared_stores"),
        "turns": ("shared_write_transactions", "store_wavefronts"),
        "conflicts": ("shared_write_conflicts", "store_bank_conflicts"),
    },
}


def counted(kind: str, *names: str) -> str:
    """What the formulas, and so the emulation, count at the primary shape; what ncu measured."""
    rows = []
    for name in names:
        cells = []
        for field, counter in _COUNTED[kind].values():
            measured = profile_row(name)[counter]
            cells += [f"{count(name, field):,}", "-" if measured is None else f"{measured:,}"]
        rows.append([name.upper(), *cells])
    head = [f"shared {kind}", *(x for what in _COUNTED[kind] for x in (what, "measured"))]
    return markdown(head, rows, "<" + ">" * (len(head) - 1))


def emulation_speed() -> str:
    """Seconds of the emulated rungs, plain and checked, beside the CPU kernel's."""
    rows = speed_record()["rows"]
    lengths = sorted({row["len_q"] for row in rows})
    builds = ("plain", "checked")
    took = {(row["impl"], row["build"], row["len_q"]): row["us"] / 1e6 for row in rows}
    table = []
    for name in dict.fromkeys(row["impl"] for row in rows):
        keys = [(name, build, length) for build in builds for length in lengths]
        table.append([name, *(number(took[key], 2) if key in took else "-" for key in keys)])
    head = ["", *(f"{build}, N={length}" for build in builds for length in lengths)]
    return markdown(head, table, "<" + ">" * (len(head) - 1))


def forward(*name: str) -> str:
    """A table of the suite "forward"."""
    made = _forward_report.TABLES[" ".join(name)](forward_record())
    return markdown(made.head, made.rows, made.align)


def forward_row(suite: str, impl: str, **fields: Any) -> dict[str, Any]:
    """The one row of the suite "forward" that has these fields."""
    found = _forward_report.select(forward_record(), suite, impl=impl, **fields)
    if not found:
        raise MissingRecordError(f"no row of {impl} in {suite} with {fields}")
    (row,) = found
    return dict(row)


def grid_speed(fast: str, slow: str) -> str:
    """How many times as fast one is as the other in 16 bits: the least and the most of the grid."""
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for row in _forward_report.select(forward_record(), "forward-grid"):
        cells.setdefault((row["dtype"], row["case"]), {})[row["impl"]] = row["us"]
    ratios = [cell[slow] / cell[fast] for cell in cells.values() if {fast, slow} <= cell.keys()]
    if not ratios:
        raise MissingRecordError(f"no cell of the grid has {fast} and {slow}")
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


def auto_rules() -> str:
    """The rules of "auto", as the library has them."""
    rules = _auto.read_rules(_auto.rules_file(docs_facts.ROOT).read_text())

    def limits(rule: _auto.Rule) -> list[str]:
        values = (rule.head_dim_max, rule.queries_max, rule.keys_max, rule.work_max)
        return [f"{value:,}" if value else "any" for value in values]

    classes = {"kFullRate": "full rate", "kHalfRate": "half rate"}
    rows = [[classes[r.gpu], r.dtype, *limits(r), f"`{r.kernel}`"] for r in rules]
    head = ["GPU", "dtype", "D and Dv to", "M to", "N to", "B·Hq·M·N to", "kernel"]
    return markdown(head, rows, "<<>>>><")


def _auto_cells() -> list[_auto.Cell]:
    return [cell for cell in _auto.cells(auto_record()) if len(cell.us) > 1]


def _auto_taken(cell: _auto.Cell) -> str:
    rules = _auto.read_rules(_auto.rules_file(docs_facts.ROOT).read_text())
    gpu = _auto.gpu_class(auto_record()["meta"]["gpu"])
    return _auto.preferred(rules, gpu, cell.problem, list(cell.us))


def auto_grid(dtype: str, head_dim: str, lengths: str) -> str:
    """The fastest kernel, and the next one's time over its; ``lengths``: "square" or "few"."""
    found: dict[tuple[str, ...], dict[int, str]] = {}
    for cell in _auto_cells():
        p = cell.problem
        square = p.len_q == p.len_kv
        if (p.dtype, p.head_dim, square) != (dtype, int(head_dim), lengths == "square"):
            continue
        first, second = sorted(cell.us.values())[:2]
        text = f"{cell.fastest} {second / first:.2f}"
        if _auto_taken(cell) != cell.fastest:
            text += " (*)"
        key = (str(p.batch * p.heads_q),) if square else (str(p.len_q), str(p.batch * p.heads_q))
        found.setdefault(key, {})[p.len_kv] = text
    if not found:
        raise MissingRecordError(
            f"no rows of {dtype}, D={head_dim} in the record of the suite auto"
        )
    columns = sorted({n for row in found.values() for n in row})
    rows = [[*key, *(row.get(n, "-") for n in columns)] for key, row in found.items()]
    head = ["B·H"] if lengths == "square" else ["M", "B·H"]
    return markdown([*head, *(f"N={n}" for n in columns)], rows, ">" * (len(head) + len(columns)))


def auto_loss() -> dict[str, float]:
    """How much longer than the fastest's what "auto" takes needs, in percent."""
    lost = [cell.loss(_auto_taken(cell)) for cell in _auto_cells()]
    return {
        "mean": 100 * math.expm1(sum(lost) / len(lost)),
        "most": 100 * math.expm1(max(lost)),
        "cells": len(lost),
    }


def auto_caption() -> str:
    """What the record of the suite "auto" was measured on."""
    meta = auto_record()["meta"]
    return f"{meta['gpu']}, driver {meta['driver']}, CUDA {meta['cuda']}, {meta['date'][:10]}"


def _short(gpu: str) -> str:
    return gpu.removeprefix("NVIDIA ").removeprefix("GeForce ")


def step(name: str) -> dict[str, Any]:
    """One of V4's steps, and in "change" what it did to the time of the step before, in percent."""
    rows = steps_record()["rows"]
    for before, row in zip([None, *rows], rows, strict=False):
        if row["impl"] == name:
            change = 0.0 if before is None else 100 * (row["us"] / before["us"] - 1)
            return dict(row) | {"change": f"{change:+.1f}%"}
    raise MissingRecordError(f"no row of V4's step {name!r}: benchmarks/v4_steps/run.py --json")


def a_tile(name: str, key: str) -> float:
    """A counter of the profile, for one warp and one key tile."""
    item = rung(name)
    return float(profile_row(name)[key]) / item.tile_pairs(PRIMARY) / item.warps


NAMES: dict[str, Any] = {
    "FLOAT": FLOAT,
    "WARP": WARP,
    "PRIMARY": PRIMARY,
    "H200": H200,
    "RTX4080": RTX4080,
    "rung": rung,
    "us": us,
    "tflops": tflops,
    "error": error,
    "old_us": old_us,
    "clock": clock,
    "count": count,
    "turns": turns,
    "busy_sms": busy_sms,
    "turns_ms": turns_ms,
    "multiply_ms": multiply_ms,
    "old_clock": old_clock,
    "sm_clocks": sm_clocks,
    "profile": lambda name, key: profile_row(name)[key],
    "old": lambda name, key: published()["profile"][name][key],
    "published": published,
    "step": step,
    "auto_loss": auto_loss,
    "auto_caption": auto_caption,
    "forward": forward_row,
    "grid_speed": grid_speed,
    "forward_caption": lambda: _forward_report.caption(forward_record()),
    "speed_cpu": lambda: speed_record()["meta"]["cpu"],
    "a_tile": a_tile,
    "V6_SPLIT": V6_SPLIT,
    "number": number,
    "scaled": scaled,
    "big": big,
    "round": round,
    "min": min,
    "max": max,
}

TABLES: dict[str, Callable[..., str]] = {
    f.__name__: f
    for f in (
        launch,
        shared,
        counts,
        mma_tiles,
        registers,
        counters,
        counted,
        times,
        emulation_speed,
        forward,
        auto_rules,
        auto_grid,
    )
}


def table(call: str) -> str:
    """The table that a page asks for: a function's name and its arguments."""
    name, *arguments = call.split()
    if name not in TABLES:
        raise ValueError(f"no table {name!r}; known: {', '.join(TABLES)}")
    return TABLES[name](*arguments)


def value(expression: str) -> str:
    """The value that a page asks for, as text: numbers with ``number``, texts as they are."""
    # The expressions stand in the repository's own pages.
    found = eval(expression, {"__builtins__": {}}, NAMES)
    return found if isinstance(found, str) else number(found)
