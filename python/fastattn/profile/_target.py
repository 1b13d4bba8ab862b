"""The program that ncu watches: one rung, called a few times on random input.

    python -m fastattn.profile._target v4 --calls 4 --shape 4 12 2048 64 --dtype float32

It imports no framework, so that every kernel of the process is the rung's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

import fastattn
from fastattn import _core
from fastattn.testing import CudaArray


def main(argv: Sequence[str] | None = None) -> None:
    """Calls the kernel, and waits for the GPU."""
    parser = argparse.ArgumentParser(prog="python -m fastattn.profile._target")
    parser.add_argument("kernel")
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--shape", type=int, nargs=4, required=True, metavar="N", help="B H M D")
    parser.add_argument("--dtype", required=True)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(0)
    q, k, v = (
        CudaArray.from_numpy(rng.standard_normal(args.shape, np.float32), dtype=args.dtype)
        for _ in range(3)
    )
    for _ in range(args.calls):
        fastattn.forward(q, k, v, kernel=args.kernel)
    _core.synchronize()


if __name__ == "__main__":
    main()
