"""What every test shares: GPU tests skip where there is none, Hypothesis profiles."""

from __future__ import annotations

import os

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_no_gpu()
    if reason is None:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))
