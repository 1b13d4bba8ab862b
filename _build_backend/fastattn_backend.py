"""In-tree PEP 517 backend."""

from scikit_build_core.build import *  # noqa: F403
