"""The head of a record: on what, with what and when it was measured."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from typing import Any

import fastattn
from fastattn.benchmark import _machine


def gpus() -> list[dict[str, Any]]:
    """The GPUs that fastattn sees, as ``fastattn.show_config("dict")`` tells; device 0 is used."""
    found: list[dict[str, Any]] = fastattn.show_config("dict")["gpus"]
    return found


def new_record(seed: int | None = None) -> dict[str, Any]:
    """A record without rows. torch's version is filled in where torch is imported by now."""
    config = fastattn.show_config("dict")
    root = _machine.source_root()
    torch = sys.modules.get("torch")
    meta = {
        "gpu": gpus()[0]["name"] if gpus() else None,
        "cpu": _machine.cpu_model(),
        "cpu_threads": config["cpu_threads"],
        "driver": _machine.nvidia_smi("driver_version") if gpus() else None,
        "cuda": config["cuda_toolkit"] or None,
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
