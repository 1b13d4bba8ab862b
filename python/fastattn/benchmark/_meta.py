"""The head of a record: on what, with what and when it was measured."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from typing import Any

import fastattn
from fastattn import _core
from fastattn.benchmark import _machine


def gpus() -> list[dict[str, Any]]:
    """The GPUs that fastattn sees: name, compute_capability, multiprocessors. The first is used."""
    return list(_core.cuda_devices())


def new_record(seed: int | None = None) -> dict[str, Any]:
    """A record without rows. torch's version is filled in where torch is imported by now."""
    root = _machine.source_root()
    torch = sys.modules.get("torch")
    meta: dict[str, Any] = {
        "gpu": gpus()[0]["name"] if gpus() else None,
        "cpu": _machine.cpu_model(),
        "cpu_threads": _core.cpu_threads(),
        "driver": _machine.nvidia_smi("driver_version") if gpus() else None,
        "cuda": _core.build_info()["cuda_toolkit"] or None,
        "torch": str(torch.__version__) if torch is not None else None,
        "fastattn": fastattn.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _machine.git_commit(root) if root else None,
        "source_hash": _machine.source_hash(root) if root else None,
        "sm_clock_mhz": None,
        "ceilings": {},
        "seed": seed,
    }
    return {"meta": meta, "rows": []}
