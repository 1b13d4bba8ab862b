"""Small ragged calls of every CUDA kernel that this GPU runs, for compute-sanitizer.

    compute-sanitizer --tool memcheck python scripts/sanitizer_cases.py

No framework is imported, so that the tool sees this library's work alone. Results are compared with
float64 too: a kernel that runs wrong under the tool is worth knowing.
"""

from __future__ import annotations

import sys

import numpy as np

import fastattn
from fastattn.benchmark._arrays import PlainCudaArrays, Problem
from fastattn.benchmark._meta import gpus
from fastattn.testing import error

# Lengths around tile edges; a head dim of the ladder's and, for kernels that take it, an odd one.
LENGTHS = ((1, 1), (17, 17), (65, 65), (100, 37), (33, 130))
HEAD_DIMS = (64, 33, 128)


def problems(kernel: fastattn.KernelInfo) -> list[Problem]:
    """Ragged problems within what the kernel declares."""
    found = []
    for dtype in kernel.dtypes:
        for head_dim in HEAD_DIMS:
            if not kernel.head_dim_min <= head_dim <= kernel.head_dim_max:
                continue
            for len_q, len_kv in LENGTHS:
                if len_q != len_kv and not kernel.lengths_differ:
                    continue
                heads_kv = 1 if kernel.grouped_heads else 2
                found.append(
                    Problem(dtype, 2, 2, heads_kv, len_q, len_kv, head_dim, head_dim, False)
                )
                if kernel.causal and len_q <= len_kv:
                    found.append(
                        Problem(dtype, 2, 2, heads_kv, len_q, len_kv, head_dim, head_dim, True)
                    )
    return found


def main() -> int:
    """Runs them all; 1 where one is wrong or none ran."""
    rng = np.random.default_rng(0)
    arrays = PlainCudaArrays()
    capability = gpus()[0]["compute_capability"] if gpus() else 0
    wrong = ran = 0
    for kernel in fastattn.kernels():
        if kernel.backend != "cuda" or kernel.min_compute_capability > capability:
            continue
        for problem in problems(kernel):
            host = problem.host_inputs(rng)
            q, k, v = (arrays.put(x, problem.dtype) for x in host)
            out = arrays.poisoned(problem.out_shape, problem.dtype)
            fastattn.forward(q, k, v, kernel=kernel.name, causal=problem.causal, out=out)
            expected = arrays.expected(problem, *host)
            found = error(out, expected.out)
            ran += 1
            # One key makes both evaluations exact or nearly so: allow a few roundings of float32.
            if not found <= max(2 * expected.plain_error, 1e-6):
                wrong += 1
                print(f"WRONG {kernel.name} {problem}: error {found:.1e}")
    print(f"{ran} calls, {wrong} wrong")
    return 1 if wrong or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
