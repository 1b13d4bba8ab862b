"""``python -m fastattn.profile``: what a GPU did while it ran a rung of the ladder.

NVIDIA's Nsight Compute (``ncu``) measures; this package runs it on the fused rungs, computes one
table from its counters and draws the roofline. The command is the interface; these functions serve
the project's tests and pages.
"""

from fastattn.profile._report import render_markdown, write_markdown
from fastattn.profile._roofline import draw as draw_roofline
from fastattn.profile._roofline import fingerprint as roofline_fingerprint

__all__ = ["draw_roofline", "render_markdown", "roofline_fingerprint", "write_markdown"]
