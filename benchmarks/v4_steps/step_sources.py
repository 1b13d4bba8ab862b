"""The sources of V4's steps: V3, one patch a step on the way to V4, one step beyond, one control.

A step is kept as a unified diff against the step that it adds to: it shows what it changes, and
nothing is written twice. Step 4 must come out as V4's own code, so that a change of V3 or V4 that
the patches don't follow is found at once, without a GPU. The comment that opens each rung is left
out.

To mend the patches after such a change: ``run.py --write-sources DIR`` writes the steps, as far as
their patches apply; edit them; ``run.py --read-sources DIR`` makes the patches anew.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KERNELS = ROOT / "src" / "cuda" / "kernels"
PATCHES = HERE / "patches"
# Lines around a change: few, so that a change nearby rarely breaks a patch.
_CONTEXT = 1


@dataclass(frozen=True)
class Step:
    """One variant: what it is, what it is made from, and what was published of it."""

    label: str
    name: str
    title: str
    base: int  # the step that its patch changes
    published_us: float | None = None  # RTX 4080, the same shape
    published_registers: int | None = None
    published_blocks: int | None = None  # per multiprocessor


# The published figures are those of the fp32 ladder's author, whose V4 ends with step 3: which
# loops its compiler unrolled isn't known.
STEPS = (
    Step("0", "v3", "V3 as it is", 0, 7778.20),
    Step("1", "vector_copies", "16-byte copies of Q, K and V", 0, 7243.62),
    Step("2", "padded_keys", "K rows of 65 floats in shared memory", 1, 5393.84),
    Step("3", "narrow_indices", "32-bit indices within a tile", 2, 3810.30, 80, 3),
    Step("4", "bounded_unrolling", "products unrolled by 4, copies not at all: V4 as it is", 3),
    Step("5", "full_unrolling", "V4 with its copies and products unrolled fully", 4, None, 91, 2),
    Step("0b", "v3_unrolled", "control: V3 with its product over d unrolled by 4", 0),
)
V4 = 4  # the step that is V4


class PatchError(ValueError):
    """A patch does not fit what it is applied to."""


def code_of(path: Path) -> str:
    """A rung's source without the comment that opens it, which tells of results, not of steps."""
    text = path.read_text()
    start = text.find("#include")
    if start < 0:
        raise PatchError(f"{path}: no #include")
    return text[start:]


def patch_path(step: int) -> Path:
    """The patch that makes a step from its base."""
    return PATCHES / f"{STEPS[step].label}_{STEPS[step].name}.patch"


def _hunks(patch: str) -> list[tuple[int, list[str]]]:
    """The hunks of a unified diff: the first line that each changes, from 0, and its lines."""
    hunks: list[tuple[int, list[str]]] = []
    for line in patch.splitlines():
        head = re.match(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@", line)
        if head:
            hunks.append((int(head[1]) - 1, []))
        elif hunks and line[:1] in (" ", "-", "+"):
            hunks[-1][1].append(line)
        elif hunks:
            raise PatchError(f"not a line of a unified diff: {line!r}")
    return hunks


def apply(text: str, patch: str, name: str) -> str:
    """Applies a unified diff.

    Every line that a hunk keeps or removes must be there as it is, at whatever line number: the
    nearest such place counts.

    Parameters
    ----------
    text
        What the patch is applied to.
    patch
        A unified diff of one file; lines before its first hunk are comments.
    name
        The patch's name, for errors.

    Raises
    ------
    PatchError
        A hunk does not fit, or there is none.
    """
    lines = text.splitlines()
    done: list[str] = []
    position = drift = 0
    hunks = _hunks(patch)
    if not hunks:
        raise PatchError(f"{name}: no hunk in it")
    for number, (first, hunk) in enumerate(hunks, 1):
        old = [line[1:] for line in hunk if line[0] != "+"]
        new = [line[1:] for line in hunk if line[0] != "-"]
        places = [
            at
            for at in range(position, len(lines) - len(old) + 1)
            if lines[at : at + len(old)] == old
        ]
        if not old or not places:
            raise PatchError(
                f"{name}: hunk {number} of {len(hunks)} does not fit; it looks for:\n"
                + "\n".join(f"  {line}" for line in old)
            )
        at = min(places, key=lambda place: abs(place - first - drift))
        drift = at - first
        done += lines[position:at] + new
        position = at + len(old)
    return "\n".join([*done, *lines[position:]]) + "\n"


def sources() -> list[str]:
    """The source of every step, in order.

    Raises
    ------
    PatchError
        A patch does not fit, or step 4 is not V4's code.
    OSError
        A file can't be read.
    """
    texts, error = partial_sources()
    if error is not None:
        raise error
    difference = diff(texts[V4], code_of(KERNELS / "v4_vectorized.cu"), "step 4", "V4")
    if difference:
        raise PatchError(f"the patches do not lead from V3 to V4; what is left:\n{difference}")
    return texts


def plan_of(text: str) -> tuple[int, int]:
    """Threads and bytes of dynamic shared memory of a block, as a step's source states them.

    Raises
    ------
    PatchError
        It does not.
    """
    threads = re.search(r"\bkThreads = (\d+);", text)
    shared = re.search(r"static_assert\(sizeof\(SharedStorage\) == (\d+)\);", text)
    if threads is None or shared is None:
        raise PatchError("a step no longer states kThreads and sizeof(SharedStorage) as numbers")
    return int(threads[1]), int(shared[1])


def partial_sources() -> tuple[list[str], PatchError | None]:
    """The sources as far as the patches apply, and the error of the first that doesn't."""
    texts = [code_of(KERNELS / "v3_warp_local.cu")]
    for step in range(1, len(STEPS)):
        path = patch_path(step)
        try:
            texts.append(apply(texts[STEPS[step].base], path.read_text(), path.name))
        except PatchError as error:
            return texts, error
    return texts, None


def diff(old: str, new: str, old_name: str, new_name: str) -> str:
    """A unified diff with little context; empty where the two are the same."""
    return "".join(
        difflib.unified_diff(
            old.splitlines(keepends=True),
            new.splitlines(keepends=True),
            old_name,
            new_name,
            n=_CONTEXT,
        )
    )


def write_sources(folder: Path) -> list[Path]:
    """Writes the steps' sources into a folder, as far as the patches apply.

    Raises
    ------
    PatchError
        A patch does not fit; the steps before it are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts, error = partial_sources()
    paths = [folder / source_name(step) for step in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    if error is not None:
        raise error
    return paths


def source_name(step: int) -> str:
    """The file name of a step's source."""
    return f"{STEPS[step].label}_{STEPS[step].name}.cu"


def read_sources(folder: Path) -> list[Path]:
    """Makes the patches anew from edited sources; steps whose source is missing end the row.

    Step 0 is V3, wherever the folder's copy of it stands.
    """
    texts = [code_of(KERNELS / "v3_warp_local.cu")]
    written: list[Path] = []
    for step in range(1, len(STEPS)):
        source = folder / source_name(step)
        if not source.is_file():
            break
        texts.append(source.read_text())
        base = STEPS[step].base
        path = patch_path(step)
        path.write_text(
            preamble(path.read_text() if path.is_file() else "", step)
            + diff(texts[base], texts[step], f"a/{source_name(base)}", f"b/{source_name(step)}")
        )
        written.append(path)
    return written


def preamble(patch: str, step: int) -> str:
    """The comment before a patch's first hunk, or the step's title where there is none yet."""
    lines: Sequence[str] = patch.splitlines(keepends=True)
    for i, line in enumerate(lines):
        if line.startswith("--- "):
            return "".join(lines[:i])
    return f"Step {STEPS[step].label}: {STEPS[step].title}.\n\n"
