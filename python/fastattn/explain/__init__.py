"""``python -m fastattn.explain v3``: counts what a rung does, beside the formulas that predict it.

The rung's own source runs on the CPU (``fastattn.emulation``), so no GPU is needed. The formulas
serve the project's tests and pages as well.
"""

from fastattn.explain._formulas import FLOP, RUNGS, Formula, Rung, Shape

__all__ = ["FLOP", "RUNGS", "Formula", "Rung", "Shape"]
