"""What every test shares: GPU tests skip where there is none, Hypothesis profiles."""

from __future__ import annotations

import os
import zlib

# Before NumPy comes: the references are many small products, which more threads only slow down.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# JAX would take three quarters of the GPU's memory, and the other frameworks need some.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import pytest
from hypothesis import HealthCheck, settings

import fastattn

settings.register_profile("default", deadline=None)
# The same examples every time, for machines whose verdict must not depend on luck.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "default")
)


def _why_no_gpu() -> str | None:
    config = fastattn.show_config("dict")
    if "cuda" not in config["backends"]:
        return "needs a GPU, and this build has no CUDA backend"
    if not config["cuda"]["devices"]:
        return "needs a GPU, and there is none"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", metavar="I/N", type=_which, help="run the I-th of N parts of the tests"
    )


def _which(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"--part {text}: takes I/N, such as 1/2")
    return int(part), int(parts)


# Optional: pytest-xdist, whose hook this is, may be missing.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For -n auto. One after the other on a GPU: some tests fill its memory, others time calls."""
    return 0 if _why_no_gpu() is None else min(4, os.cpu_count() or 1)


def _part(item: pytest.Item, parts: int) -> int:
    """Tests of one case stay together, as they share its answer; so do those without a case."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    kept = parameters.get("case") or item.nodeid.partition("[")[0]
    return zlib.crc32(str(kept).encode()) % parts


def _keep_part(config: pytest.Config, items: list[pytest.Item], part: int, parts: int) -> None:
    kept = [item for item in items if _part(item, parts) == part - 1]
    here = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in here])
    items[:] = kept


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if which := config.getoption("--part"):
        _keep_part(config, items, *which)
    reason = _why_no_gpu()
    if reason is None:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))
