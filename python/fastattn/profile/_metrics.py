"""From ncu's metrics of one launch to a row of the record.

The names are those of ncu 2020 to 2025 on compute capability 7.5 and newer. A metric that a
version or a GPU lacks makes the numbers that need it None, which the table shows as "-".
"""

from __future__ import annotations

import re
from typing import Any

from fastattn.benchmark import _machine
from fastattn.profile._rungs import Shape

_DURATION = "gpu__time_duration.sum"
_SM_CLOCK = "sm__cycles_elapsed.avg.per_second"
_DRAM_CLOCK = "dram__cycles_elapsed.avg.per_second"
_DRAM_BYTES = "dram__bytes.sum"
_DRAM_READ = "dram__bytes_read.sum"
_DRAM_WRITTEN = "dram__bytes_write.sum"
_DRAM_PEAK = "dram__bytes.sum.peak_sustained"  # bytes a DRAM cycle
# Executed by threads whose predicate was on: what the hardware's arithmetic units really did.
_FADD, _FMUL, _FFMA = (
    f"smsp__sass_thread_inst_executed_op_{op}_pred_on.sum" for op in ("fadd", "fmul", "ffma")
)
_FFMA_PEAK = "sm__sass_thread_inst_executed_op_ffma_pred_on.sum.peak_sustained"  # a cycle, all SMs
_ACHIEVED = "sm__warps_active.avg.pct_of_peak_sustained_active"
_THEORETICAL = "sm__maximum_warps_per_active_cycle_pct"
_ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
_TENSOR_PIPE = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
_SHARED_PIPE = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed"
_SM_COUNT = "device__attribute_multiprocessor_count"
_LIMITS = {
    "registers": "launch__occupancy_limit_registers",
    "shared memory": "launch__occupancy_limit_shared_mem",
    "warps": "launch__occupancy_limit_warps",
    "blocks": "launch__occupancy_limit_blocks",
    "barriers": "launch__occupancy_limit_barriers",
}
# Fields of a row that are one metric, as a whole number.
_COUNTS = {
    "blocks": "launch__grid_size",
    "threads": "launch__block_size",
    "registers": "launch__registers_per_thread",
    "shared_dynamic_bytes": "launch__shared_mem_per_block_dynamic",
    "shared_static_bytes": "launch__shared_mem_per_block_static",
    "shared_driver_bytes": "launch__shared_mem_per_block_driver",
    "shared_loads": "smsp__sass_inst_executed_op_shared_ld.sum",
    "shared_stores": "smsp__sass_inst_executed_op_shared_st.sum",
    "load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "load_bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "store_bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
}
# Warps in a state, on average, at each instruction issued: the cycles that an instruction spends
# in it. "selected" is the one cycle in which it issues.
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(?P<reason>\w+)_per_issue_active\.ratio")
_REASONS = (
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle"),
    *("long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction"),
    *("not_selected", "selected", "short_scoreboard", "sleeping", "tex_throttle", "wait"),
)

METRICS = (
    *(_DURATION, _SM_CLOCK, _DRAM_CLOCK, _DRAM_BYTES, _DRAM_READ, _DRAM_WRITTEN, _DRAM_PEAK),
    *(_FADD, _FMUL, _FFMA, _FFMA_PEAK, _ACHIEVED, _THEORETICAL, _ISSUE, _SHARED_PIPE),
    _TENSOR_PIPE,
    *_LIMITS.values(),
    *_COUNTS.values(),
    *(f"smsp__average_warps_issue_stalled_{r}_per_issue_active.ratio" for r in _REASONS),
)

Metrics = dict[str, float]


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _times(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


def _stalls(metrics: Metrics) -> dict[str, float]:
    """Cycles that a warp's instruction spends in each state, the longest first."""
    found = {}
    for name, value in metrics.items():
        match = _STALL.fullmatch(name)
        # ..._not_issued counts part of a state once more.
        if match and not match["reason"].endswith("_not_issued"):
            found[match["reason"].replace("_", " ")] = value
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def make_row(
    name: str, title: str, shape: Shape, function: str, metrics: Metrics, gpu: dict[str, Any]
) -> dict[str, Any]:
    """One row of the record.

    Parameters
    ----------
    name, title
        Of the rung.
    function
        The CUDA kernel's name.
    metrics
        Of the launch, in seconds, bytes, Hz and counts.
    gpu
        ``compute_capability`` (90 is 9.0) and ``multiprocessors``: for the peak, should ncu not
        know it.

    Returns
    -------
    Names and units are listed in docs/profiling.md; a number that ncu did not give is None.
    """
    get = metrics.get
    seconds, clock = get(_DURATION), get(_SM_CLOCK)
    peak = _times(get(_FFMA_PEAK), clock)
    peak_tflops = None if peak is None else 2e-12 * peak  # a fused multiply-add is two operations
    if peak_tflops is None and clock is not None:
        peak_tflops = _machine.fp32_peak_tflops(
            gpu["compute_capability"], gpu["multiprocessors"], round(clock * 1e-6)
        )
    read, written = get(_DRAM_READ), get(_DRAM_WRITTEN)
    dram = get(_DRAM_BYTES)
    if dram is None and read is not None and written is not None:
        dram = read + written
    adds, products, fused = get(_FADD), get(_FMUL), get(_FFMA)
    executed = None
    if adds is not None and products is not None and fused is not None:
        executed = adds + products + 2 * fused
    tera = _ratio(1e-12, seconds)
    tflops = _times(shape.flop, tera)
    executed_tflops = _times(executed, tera)
    dram_peak = _times(get(_DRAM_PEAK), get(_DRAM_CLOCK))

    is_float32 = shape.dtype == "float32"
    limits = {what: int(metrics[key]) for what, key in _LIMITS.items() if key in metrics}
    per_sm = min(limits.values(), default=None)
    row: dict[str, Any] = {
        **{"suite": "profile", "impl": name, "title": title, "function": function},
        **{"direction": "forward", "dtype": shape.dtype, "batch": shape.batch},
        **{"heads_q": shape.heads, "heads_kv": shape.heads},
        **{"len_q": shape.length, "len_kv": shape.length},
        **{"head_dim": shape.head_dim, "head_dim_v": shape.head_dim},
        **{"causal": False, "window": None},
        "us": _rounded(_times(seconds, 1e6), 3),
        "tflops": _rounded(tflops, 4),
        # float32's peak says nothing of other dtypes.
        "peak_share": _rounded(_ratio(tflops, peak_tflops), 5) if is_float32 else None,
        "executed_flop": executed,
        "executed_tflops": _rounded(executed_tflops, 4),
        "executed_peak_share": _rounded(_ratio(executed_tflops, peak_tflops), 5),
        "intensity": _rounded(_ratio(executed, dram), 3),
        "dram_bytes": dram,
        "dram_read_bytes": read,
        "dram_written_bytes": written,
        "dram_gbs": _rounded(_times(_ratio(dram, seconds), 1e-9), 3),
        "fp32_peak_tflops": _rounded(peak_tflops, 3),
        "dram_peak_gbs": _rounded(_times(dram_peak, 1e-9), 1),
        "sm_clock_mhz": _rounded(_times(clock, 1e-6), 1),
        "occupancy": _rounded(get(_ACHIEVED), 2),
        "occupancy_theoretical": _rounded(get(_THEORETICAL), 2),
        "blocks_per_sm": per_sm,
        "blocks_per_sm_limits": limits,
        "limited_by": [what for what, limit in limits.items() if limit == per_sm],
        "multiprocessors": gpu["multiprocessors"],
        "issue_active": _rounded(get(_ISSUE), 2),
        "shared_pipe_busy": _rounded(get(_SHARED_PIPE), 2),
        "tensor_pipe_busy": _rounded(get(_TENSOR_PIPE), 2),
        "stalls": {reason: round(cycles, 3) for reason, cycles in _stalls(metrics).items()},
    }
    for field, metric in _COUNTS.items():
        value = get(metric)
        row[field] = None if value is None else int(value)
    return row


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
