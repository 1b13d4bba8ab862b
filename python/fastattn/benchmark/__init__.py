"""``python -m fastattn.benchmark``: times every kernel, beside PyTorch where it is installed.

The package's functions serve the project's scripts and tests; the command is the interface.
"""

from fastattn.benchmark._machine import source_hash, source_root
from fastattn.benchmark._record import dump_record, load_record, render_ladder, write_readme

__all__ = [
    "dump_record",
    "load_record",
    "render_ladder",
    "source_hash",
    "source_root",
    "write_readme",
]
