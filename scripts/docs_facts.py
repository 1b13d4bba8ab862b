"""What the ladder's pages are computed from: the rungs' sources, measured records, GPU limits.

Nothing here is a result: tile sizes are read from the rungs' files, measurements from
``benchmarks/results/``, and the figures published for an RTX 4080 from ``docs/ladder``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from math import ceil, prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LADDER = ROOT / "docs" / "ladder"
RESULTS = ROOT / "benchmarks" / "results"
KERNELS = ROOT / "src" / "cuda" / "kernels"
CARD = "nvidia-h200"  # whose records the pages discuss

WARP = 32
FLOAT = 4  # bytes
TIMES = " \N{MULTIPLICATION SIGN} "  # between the sides of a tile


@dataclass(frozen=True)
class Shape:
    """A problem: M = N, as many key heads as query heads."""

    batch: int
    heads: int
    length: int
    head_dim: int

    @property
    def flop(self) -> int:
        """Two matrix products, a multiplication and an addition each."""
        return 4 * self.batch * self.heads * self.length**2 * self.head_dim

    @property
    def tensor_bytes(self) -> int:
        """Of one of Q, K, V and O, in float32."""
        return FLOAT * self.batch * self.heads * self.length * self.head_dim

    @property
    def score_bytes(self) -> int:
        """Of the score matrices of all heads, in float32."""
        return FLOAT * self.batch * self.heads * self.length**2


PRIMARY = Shape(batch=4, heads=12, length=2048, head_dim=64)


# --- GPUs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """Limits of one GPU: NVIDIA's data sheet, and the CUDA programming guide's table.

    Attributes
    ----------
    name : str
        As the pages call it.
    sms : int
        Multiprocessors (SMs).
    shared_bytes : int
        Shared memory of an SM; a block takes ``reserved_bytes`` more than it asks for.
    warps, blocks : int
        The most that an SM holds.
    """

    name: str
    sms: int
    shared_bytes: int
    warps: int
    blocks: int
    registers: int = 65536
    schedulers: int = 4
    reserved_bytes: int = 1024
    lanes: int = 128  # float32 multiply-adds a clock and SM
    bank_bytes: int = 128  # that shared memory gives a clock and SM

    def blocks_by_shared(self, dynamic_bytes: int) -> int:
        """How many blocks the shared memory of an SM holds; it is handed out by 128 bytes."""
        return self.shared_bytes // (ceil(dynamic_bytes / 128) * 128 + self.reserved_bytes)

    def blocks_by_registers(self, threads: int, registers: int) -> int:
        """How many blocks the registers hold: a warp takes 256 at a time, of its scheduler's."""
        per_warp = ceil(registers * WARP / 256) * 256
        warps = self.registers // self.schedulers // per_warp * self.schedulers
        return warps * WARP // threads

    def blocks_by_threads(self, threads: int) -> int:
        """How many blocks the SM's warp slots hold."""
        return self.warps * WARP // threads

    def blocks_per_sm(self, threads: int, dynamic_bytes: int, registers: int) -> int:
        """The least of the limits."""
        return min(
            self.blocks,
            self.blocks_by_shared(dynamic_bytes),
            self.blocks_by_registers(threads, registers),
            self.blocks_by_threads(threads),
        )

    def occupancy(self, threads: int, dynamic_bytes: int, registers: int) -> float:
        """Resident warps over warp slots, where there are blocks enough."""
        blocks = self.blocks_per_sm(threads, dynamic_bytes, registers)
        return blocks * threads / WARP / self.warps


H200 = Gpu("H200", sms=132, shared_bytes=228 * 1024, warps=64, blocks=32)
RTX4080 = Gpu("RTX 4080", sms=76, shared_bytes=100 * 1024, warps=48, blocks=24)


# --- rungs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Array:
    """An array in a block's shared memory."""

    name: str
    shape: tuple[int, ...]  # floats

    @property
    def bytes(self) -> int:
        """Its size."""
        return FLOAT * prod(self.shape)


@dataclass(frozen=True)
class Rung:
    """A kernel of the ladder, as its source file defines it."""

    name: str
    source: Path  # of a folder, the file that defines its `Kernel`
    constants: dict[str, int]
    arrays: tuple[Array, ...]  # shared memory at D = 64; none: an unfused rung
    tiles_queries: bool  # a block owns a query tile; else all of a head

    @property
    def block_q(self) -> int:
        """Br."""
        return self.constants["kBlockQ"]

    @property
    def block_kv(self) -> int:
        """Bc."""
        return self.constants["kBlockKV"]

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.constants["kThreads"]

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.threads // WARP

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block at D = 64."""
        return sum(array.bytes for array in self.arrays)

    def blocks(self, shape: Shape) -> int:
        """Of the grid."""
        tiles = ceil(shape.length / self.block_q) if self.tiles_queries else 1
        return shape.batch * shape.heads * tiles

    def tile_pairs(self, shape: Shape) -> int:
        """Pairs of a query tile and a key tile, over all heads."""
        queries, keys = ceil(shape.length / self.block_q), ceil(shape.length / self.block_kv)
        return shape.batch * shape.heads * queries * keys


def _evaluate(expression: str, names: dict[str, int]) -> int:
    """An integer constant expression of C++ that is one of Python too, but for its division."""
    choice = re.fullmatch(r"(.+) == (.+) \? (.+) : (.+)", expression)
    if choice:
        first, second, same, other = (_evaluate(part, names) for part in choice.groups())
        return same if first == second else other
    if not re.fullmatch(r"[\w\s+*/()-]+", expression):
        raise ValueError(f"not a plain integer expression: {expression!r}")
    return int(eval(expression.replace("/", "//"), {"__builtins__": {}}, dict(names)))


def _constants(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    pattern = r"^constexpr (?:int|std::size_t) (k\w+) =\s*([^;]+);"
    for name, expression in re.findall(pattern, text, re.MULTILINE):
        found[name] = _evaluate(expression, found)
    # A kernel of several shapes: the first of them, which is that of the H200 for D = 64.
    struct = re.search(r"^struct Shape \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL)
    if struct:
        table = re.search(r"^constexpr Shape kShapes\[\] = \{\s*\{([\d, ]+)\}", text, re.MULTILINE)
        given = re.search(r"^  int ([\w, ]+);", struct[1], re.MULTILINE)
        if not (table and given):
            raise ValueError("struct Shape, but no table of its fields")
        values = [int(value) for value in table[1].split(", ")]
        shape = found | dict(zip(given[1].split(", "), values, strict=True))
        for name, expression in re.findall(r"^  int (\w+) = ([^;]+);", struct[1], re.MULTILINE):
            shape[name] = _evaluate(expression, shape)
        for line in re.findall(r"^  constexpr int (k[^;]+);", text, re.MULTILINE):
            for name, expression in (part.split(" = ") for part in line.split(", ")):
                found[name] = _evaluate(expression.replace("kS.", ""), shape | found)
    return found


def _arrays(text: str, names: dict[str, int]) -> tuple[Array, ...]:
    """From the SharedStorage struct, or from the pointers into one array and their comments."""
    struct = re.search(r"^struct SharedStorage \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL)
    if struct:
        fields = re.findall(r"^  float (\w+)\[(\w+) \* (\w+)\];", struct[1], re.MULTILINE)
        return tuple(
            Array("s" + name.upper(), (names[rows], names[columns]))
            for name, rows, columns in fields
        )
    if "dynamic_shared<float>" not in text:
        return ()
    pointers = re.findall(
        r"^  float\* (\w+) = (?:dynamic_shared|\w+ \+)[^;]*; +// \[([\w, ]+)\]", text, re.MULTILINE
    )
    known = names | {"D": PRIMARY.head_dim}
    if "kDepthK" in names:
        known["k_pieces"] = ceil(PRIMARY.head_dim / names["kDepthK"])
    return tuple(
        Array(name, tuple(known[part] for part in shape.split(", "))) for name, shape in pointers
    )


def registry() -> dict[str, str]:
    """Public name to file stem, in ladder order, from ``kernels.def``."""
    text = (ROOT / "src" / "cuda" / "kernels.def").read_text()
    return dict(re.findall(r"^FASTATTN_CUDA_KERNEL\((\w+), (\w+)\)", text, re.MULTILINE))


def sources(name: str, kernels: Path = KERNELS) -> list[Path]:
    """The files of a rung: its one file; of a folder, the one that defines its ``Kernel`` first.

    Raises
    ------
    LookupError
        A folder in which no file, or more than one, defines it.
    """
    stem = registry()[name]
    if (kernels / f"{stem}.cu").is_file():
        return [kernels / f"{stem}.cu"]
    files = sorted(path for path in (kernels / stem).rglob("*") if path.suffix in {".cu", ".cuh"})
    definition = re.compile(rf"^(?:extern )?const Kernel {stem} = \{{", re.MULTILINE)
    main = [path for path in files if definition.search(path.read_text())]
    if len(main) != 1:
        raise LookupError(f"{name}: {len(main)} files of {stem}/ define its Kernel, not one")
    return main + [path for path in files if path != main[0]]


@cache
def rung(name: str) -> Rung:
    """A rung of the registry."""
    source = sources(name)[0]
    text = source.read_text()
    names = _constants(text)
    arrays = _arrays(text, names)
    tiles_queries = re.search(r"ceil_div\(p\.len_q, (?:kBlockQ|s\.block_q)\)", text) is not None
    return Rung(name, source, names, arrays, tiles_queries)


# --- measurements ---------------------------------------------------------------------------------


class MissingRecordError(LookupError):
    """A record that is not in the tree: what it would fill is left as it is."""


def _load(path: Path, command: str) -> dict[str, Any]:
    if not path.is_file():
        raise MissingRecordError(f"{path.relative_to(ROOT)} is missing: {command} writes it")
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def benchmark_record() -> dict[str, Any]:
    """Of the benchmark."""
    return _load(RESULTS / f"{CARD}.json", "scripts/gpu_check on a GPU")


def profile_record() -> dict[str, Any]:
    """Of the profiler."""
    path = RESULTS / f"profile-{CARD}.json"
    return _load(path, f"python -m fastattn.profile all --json {path.relative_to(ROOT)} on a GPU")


def steps_record() -> dict[str, Any]:
    """Of V4's steps."""
    path = RESULTS / f"v4-steps-{CARD}.json"
    return _load(path, f"benchmarks/v4_steps/run.py --json {path.relative_to(ROOT)} on a GPU")


def speed_record() -> dict[str, Any]:
    """Of the emulated rungs."""
    path = RESULTS / "emulation-cpu.json"
    return _load(path, f"benchmarks/emulation_speed.py --json {path.relative_to(ROOT)}")


def forward_record() -> dict[str, Any]:
    """Of the suite "forward"."""
    path = RESULTS / f"forward-{CARD}.json"
    command = f"python -m fastattn.benchmark --suite forward --json {path.relative_to(ROOT)}"
    return _load(path, f"{command} on a GPU")


def auto_record() -> dict[str, Any]:
    """Of the suite "auto"."""
    path = RESULTS / f"auto-{CARD}.json"
    command = f"python -m fastattn.benchmark --suite auto --json {path.relative_to(ROOT)}"
    return _load(path, f"{command} on a GPU")


def published() -> dict[str, Any]:
    """What was published for an RTX 4080; by another implementation of the same ladder."""
    record: dict[str, Any] = json.loads((LADDER / "published.json").read_text())
    return record


def benchmark_row(impl: str, length: int = PRIMARY.length) -> dict[str, Any]:
    """The benchmark's row of a kernel or of torch."""
    for row in benchmark_record()["rows"]:
        if (row["suite"], row["impl"], row["len_q"]) == ("ladder", impl, length):
            return dict(row)
    raise MissingRecordError(f"no benchmark row of {impl} at N={length}")


def profile_row(impl: str, dtype: str = "float32") -> dict[str, Any]:
    """The profiler's row of a rung."""
    for row in profile_record()["rows"]:
        if (row["impl"], row["dtype"]) == (impl, dtype):
            return dict(row)
    raise MissingRecordError(f"no profile row of {impl} in {dtype}")
