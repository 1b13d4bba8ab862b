"""What each rung of the ladder does to memory, as formulas.

They are worked out from the sources of the rungs by hand, are shown as they stand here, and are
evaluated from the same text. The tests hold them against the counts of the emulation.

Symbols: ``B`` batch, ``H`` query heads, ``M`` query length, ``N`` key length, ``D`` head dim;
``Br`` rows and ``Bc`` keys of a tile, ``W`` warps of a block; of V6 also ``P``, the head dim that a
tile has. Bytes count what threads ask for, a sector has 32 bytes, a request is a warp's, and shared
memory has 32 banks of 4 bytes. All of them are of calls without a mask, where v has the head dim of
q and k, in arrays that lie as cudaMalloc and C order put them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

# Multiplications and additions of both products, as attention is counted everywhere.
FLOP = "4*B*H*M*N*D"


@dataclass(frozen=True)
class Shape:
    """One call: batch, query heads, lengths, head dim and dtype."""

    batch: int
    heads: int
    len_q: int
    len_kv: int
    head_dim: int
    dtype: str = "float32"

    @property
    def symbols(self) -> dict[str, int]:
        """Values of B, H, M, N and D."""
        return {
            "B": self.batch,
            "H": self.heads,
            "M": self.len_q,
            "N": self.len_kv,
            "D": self.head_dim,
        }

    @property
    def flop(self) -> int:
        """4 B H M N D."""
        return int(evaluate(FLOP, self.symbols))


def evaluate(text: str, symbols: dict[str, int]) -> Fraction:
    """The value of an expression of this file; divisions are exact."""
    names: dict[str, Any] = {name: Fraction(value) for name, value in symbols.items()}
    names |= {"ceil": math.ceil, "floor": math.floor, "gcd": lambda a, b: math.gcd(int(a), int(b))}
    # The texts are constants of this file, never a user's.
    return Fraction(eval(text, {"__builtins__": {}}, names))


@dataclass(frozen=True)
class Formula:
    """One count of one rung.

    Attributes
    ----------
    text : str
        Over the symbols of this file, with ``ceil``, ``floor`` and ``gcd``; what is true counts 1.
    why : str
        Where its terms come from.
    where : str
        The condition under which it holds; "" is always. The sectors of rows that begin inside of a
        sector, for example, follow no short formula.
    """

    text: str
    why: str
    where: str = ""


@dataclass(frozen=True)
class Rung:
    """A rung's tiles and formulas.

    Attributes
    ----------
    name : str
        Of the kernel.
    tiles : dict of str to int
        Values of Br, Bc, W and P, those that the rung has.
    formulas : dict of str to Formula
        By the name of the field of ``fastattn.emulation.Counts``. A count that has none is 0.
    """

    name: str
    tiles: dict[str, int]
    formulas: dict[str, Formula]

    def holds(self, count: str, shape: Shape) -> bool:
        """Whether the formula of ``count`` is meant for this shape."""
        formula = self.formulas.get(count)
        if formula is None or not formula.where:
            return True
        return bool(evaluate(formula.where, shape.symbols | self.tiles))

    def value(self, count: str, shape: Shape) -> int | None:
        """What ``count`` is by the formula; None where it does not hold."""
        if not self.holds(count, shape):
            return None
        formula = self.formulas.get(count)
        if formula is None:
            return 0
        value = evaluate(formula.text, shape.symbols | self.tiles)
        assert value.denominator == 1, f"{self.name} {count}: {formula.text} = {value}"
        return int(value)


_WHOLE_SECTORS = "D % 8 == 0"

_V0 = Rung(
    "v0",
    {},
    {
        "global_read_bytes": Formula(
            "4*B*H*M*N*(4*D + 3)",
            "a score reads a row of Q and one of K; the softmax reads S three times; each of D "
            "columns of a row reads N weights and N values",
        ),
        "global_write_bytes": Formula("4*B*H*M*(2*N + D + 1)", "S, P in its place, out and lse"),
        "global_read_requests": Formula(
            "2*D*ceil(B*H*M*N/32) + 3*B*H*M*ceil(N/32) + 2*N*ceil(B*H*M*D/32)",
            "a warp for 32 scores, for a row of S, for 32 elements of out",
        ),
        "global_write_requests": Formula(
            "ceil(B*H*M*N/32) + B*H*M*(ceil(N/32) + 1) + ceil(B*H*M*D/32)", "likewise"
        ),
        "global_read_sectors": Formula(
            "B*H*M*N*(33*D/32 + 3/8 + 5*D/32)",
            "32 lanes of a score read one value of Q and 32 rows of K; of out, one weight and 32 "
            "neighbours of V",
            "N % 32 == 0 and D % 32 == 0",
        ),
        "global_write_sectors": Formula(
            "B*H*M*(2*N/8 + D/8 + 1)", "dense rows; lse one by one", "N % 32 == 0 and D % 32 == 0"
        ),
        "exponentials": Formula("2*B*H*M*N", "once for the sum, and again for the quotient"),
        "shuffles": Formula("10*B*H*M", "5 for the maximum of a row and 5 for its sum"),
    },
)

_V1 = Rung(
    "v1",
    {"Br": 32, "Bc": 32, "W": 4},
    {
        "global_read_bytes": Formula(
            "4*B*H*(2*N*D + ceil(N/Bc)*M*(2*D + 2) + 2*M)",
            "K and V once; Q, O, m and l for each key tile; m and l at the end",
        ),
        "global_write_bytes": Formula(
            "4*B*H*((ceil(N/Bc) + 1)*M*(D + 2) + M)",
            "O, m and l at the start and for each key tile; lse",
        ),
        "global_read_requests": Formula(
            "B*H*(2*ceil(D/32)*(N + ceil(N/Bc)*M) + 2*ceil(M/Br)*(ceil(N/Bc) + 1))",
            "a warp for 32 columns of a row; m and l of a query tile by one warp",
        ),
        "global_write_requests": Formula(
            "B*H*(M*(ceil(D/32)*(ceil(N/Bc) + 1) + 2) + ceil(M/Br)*(2*ceil(N/Bc) + 1))",
            "likewise; at the start m and l one by one",
        ),
        "global_read_sectors": Formula(
            "B*H*(2*N*D + ceil(N/Bc)*M*(2*D + 2) + 2*M)/8",
            "all of it in whole sectors",
            "M % 8 == 0 and D % 8 == 0",
        ),
        "global_write_sectors": Formula(
            "B*H*((ceil(N/Bc) + 1)*M*D/8 + 2*M + ceil(N/Bc)*M/4 + M/8)",
            "whole sectors, but for m and l at the start",
            "M % 8 == 0 and D % 8 == 0",
        ),
        "shared_read_requests": Formula(
            "B*H*ceil(N/Bc)*(M*(2*D + 3 + ceil(D/32)*(2*Bc + 3)) + 2*ceil(M/Br))",
            "a row: two operands a multiply-add in both products, the score, m, l and both factors "
            "and the old O",
        ),
        "shared_write_requests": Formula(
            "B*H*ceil(N/Bc)*(2*Bc*ceil(D/32) + ceil(M/Br)*(2*Br*ceil(D/32) + 2) + 6*M)",
            "tiles of K and V, of Q and O with m and l; S, P, m, l and both factors of a row",
        ),
        "shared_read_transactions": Formula(
            "B*H*ceil(N/Bc)*(M*((1 + gcd(D, 32))*D + 3 + ceil(D/32)*(2*Bc + 3)) + 2*ceil(M/Br))",
            "a column of K, whose rows are D apart, takes gcd(D, 32) turns",
        ),
        "shared_read_conflicts": Formula(
            "B*H*ceil(N/Bc)*M*D*(gcd(D, 32) - 1)",
            "the turns beyond the first of K's column",
        ),
        "shared_write_transactions": Formula(
            "B*H*ceil(N/Bc)*(2*Bc*ceil(D/32) + ceil(M/Br)*(2*Br*ceil(D/32) + 2) + 6*M)",
            "one turn each",
        ),
        "exponentials": Formula(
            "2*32*B*H*ceil(N/Bc)*M", "each lane: its weight, and the factor of the old sum"
        ),
        "barriers": Formula(
            "B*H*(ceil(N/Bc)*(4*ceil(M/Br) + 1) + 1)",
            "4 a pair of tiles, 1 a key tile, 1 at the end",
        ),
        "warp_barriers": Formula("B*H*ceil(N/Bc)*M", "between reading m and l and writing them"),
        "shuffles": Formula("10*B*H*ceil(N/Bc)*M", "5 for a maximum and 5 for a sum"),
    },
)

_V2 = Rung(
    "v2",
    {"Br": 64, "Bc": 32, "W": 4},
    {
        "global_read_bytes": Formula(
            "4*B*H*(M*D + ceil(M/Br)*2*N*D)", "Q once; K and V for each query tile"
        ),
        "global_write_bytes": Formula("4*B*H*M*(D + 1)", "out and lse, once"),
        "global_read_requests": Formula(
            "B*H*ceil(D/32)*(M + ceil(M/Br)*2*N)", "a warp for 32 columns of a row"
        ),
        "global_write_requests": Formula("B*H*M*(ceil(D/32) + 1)", "likewise; lse one by one"),
        "global_read_sectors": Formula(
            "B*H*(M*D + ceil(M/Br)*2*N*D)/8", "whole sectors", _WHOLE_SECTORS
        ),
        "global_write_sectors": Formula(
            "B*H*M*(D/8 + 1)", "whole sectors; lse one by one", _WHOLE_SECTORS
        ),
        "shared_read_requests": Formula(
            "B*H*(ceil(M/Br)*ceil(N/Bc)*Br*(2*D + 5 + ceil(D/32)*(2*Bc + 2)) + M*(ceil(D/32) + 4))",
            "a row: two operands a multiply-add in both products, the score, both maxima, l, the "
            "factor and the old O; at the end O, l and m",
        ),
        "shared_write_requests": Formula(
            "B*H*ceil(M/Br)*(Br*(2*ceil(D/32) + 2)"
            " + ceil(N/Bc)*(2*Bc*ceil(D/32) + Br*(ceil(D/32) + 6)))",
            "Q, and O, m and l at the start; a key tile: K and V, and for each row O, S, P, both "
            "maxima, the factor and l",
        ),
        "shared_read_transactions": Formula(
            "B*H*(ceil(M/Br)*ceil(N/Bc)*Br*((1 + gcd(D, 32))*D + 5 + ceil(D/32)*(2*Bc + 2))"
            " + M*(ceil(D/32) + 4))",
            "a column of K, whose rows are D apart, takes gcd(D, 32) turns",
        ),
        "shared_read_conflicts": Formula(
            "B*H*ceil(M/Br)*ceil(N/Bc)*Br*D*(gcd(D, 32) - 1)",
            "the turns beyond the first of K's column",
        ),
        "shared_write_transactions": Formula(
            "B*H*ceil(M/Br)*(Br*(2*ceil(D/32) + 2)"
            " + ceil(N/Bc)*(2*Bc*ceil(D/32) + Br*(ceil(D/32) + 6)))",
            "one turn each",
        ),
        "exponentials": Formula(
            "33*B*H*ceil(M/Br)*ceil(N/Bc)*Br", "each lane its weight; one lane the factor"
        ),
        "barriers": Formula("2*B*H*ceil(M/Br)*ceil(N/Bc)", "around the loading of K and V"),
        "warp_barriers": Formula(
            "B*H*ceil(M/Br)*(ceil(N/Bc)*(Br + 2*W) + W)",
            "a row's maximum is read by all lanes before one writes it; between the phases",
        ),
        "shuffles": Formula("10*B*H*ceil(M/Br)*ceil(N/Bc)*Br", "5 for a maximum and 5 for a sum"),
    },
)

_V3 = Rung(
    "v3",
    {"Br": 64, "Bc": 32, "W": 8},
    {
        "global_read_bytes": Formula(
            "4*B*H*(M*D + ceil(M/Br)*2*N*D)", "Q once; K and V for each query tile"
        ),
        "global_write_bytes": Formula("4*B*H*M*(D + 1)", "out and lse, once"),
        "global_read_requests": Formula(
            "B*H*(M*D + ceil(M/Br)*2*N*D)/32", "a warp for 32 columns of a row"
        ),
        "global_write_requests": Formula("B*H*M*(D/32 + 1)", "likewise; lse one by one"),
        "global_read_sectors": Formula("B*H*(M*D + ceil(M/Br)*2*N*D)/8", "whole sectors"),
        "global_write_sectors": Formula("B*H*M*(D/8 + 1)", "whole sectors; lse one by one"),
        "shared_read_requests": Formula(
            "B*H*ceil(M/Br)*ceil(N/Bc)*(D*(W + Br) + Bc*D/32*(W + Br))",
            "a warp reads a value of K or V once for its Br/W rows, and each value of Q and P for "
            "every key or 32 columns",
        ),
        "shared_write_requests": Formula(
            "B*H*ceil(M/Br)*(Br*D/32 + ceil(N/Bc)*(2*Bc*D/32 + Br))",
            "Q; for each key tile K, V, and the weights",
        ),
        "shared_read_transactions": Formula(
            "B*H*ceil(M/Br)*ceil(N/Bc)*(D*(gcd(D, 32)*W + Br) + Bc*D/32*(W + Br))",
            "a column of K, whose rows are D apart, takes gcd(D, 32) turns",
        ),
        "shared_read_conflicts": Formula(
            "B*H*ceil(M/Br)*ceil(N/Bc)*D*W*(gcd(D, 32) - 1)",
            "the turns beyond the first of K's column",
        ),
        "shared_write_transactions": Formula(
            "B*H*ceil(M/Br)*(Br*D/32 + ceil(N/Bc)*(2*Bc*D/32 + Br))", "one turn each"
        ),
        "exponentials": Formula(
            "2*32*B*H*ceil(M/Br)*ceil(N/Bc)*Br", "each lane: its weight, and the row's factor"
        ),
        "barriers": Formula(
            "4*B*H*ceil(M/Br)*ceil(N/Bc)", "around the loading of K, and around that of V"
        ),
        "shuffles": Formula("10*B*H*ceil(M/Br)*ceil(N/Bc)*Br", "5 for a maximum and 5 for a sum"),
    },
)

_V4 = Rung(
    "v4",
    _V3.tiles,
    _V3.formulas
    | {
        "global_read_requests": Formula(
            "B*H*(ceil(M/2) + ceil(M/Br)*2*ceil(N/2))", "a warp for 2 rows of 64: 16 bytes a lane"
        ),
        "shared_write_requests": Formula(
            "B*H*ceil(M/Br)*(Br*D/128 + ceil(N/Bc)*(Bc*D/32 + Bc*D/128 + Br))",
            "16 bytes a lane for Q and V; K's padded rows take 4 writes of 4 bytes; the weights",
        ),
        "shared_read_transactions": Formula(
            "B*H*ceil(M/Br)*ceil(N/Bc)*(D*(W + Br) + Bc*D/32*(W + Br))",
            "one turn each: rows of K that are 65 apart put a column into 32 banks",
        ),
        "shared_read_conflicts": Formula("0", "none is left"),
        "shared_write_transactions": Formula(
            "B*H*ceil(M/Br)*(Br*D/32 + ceil(N/Bc)*(2*Bc*D/32 + Bc*D/32 + Br))",
            "16 bytes a lane take 4 turns; the writes of K 2, since 32 lanes write every 4th float "
            "of 2 rows",
        ),
        "shared_write_conflicts": Formula(
            "B*H*ceil(M/Br)*ceil(N/Bc)*Bc*D/32", "the second turn of K's writes"
        ),
    },
)

# Head dims to 64 are one shape, with tiles that are filled up with zeros; larger ones have others.
_ONE_SHAPE = "D <= 64"
_WHOLE_CHUNKS = "D <= 64 and D % 4 == 0"

_V5 = Rung(
    "v5",
    {"Br": 128, "Bc": 64, "W": 4},
    {
        "global_read_bytes": Formula(
            "4*B*H*(M*D + ceil(M/Br)*2*N*D)", "Q once; K and V for each query tile"
        ),
        "global_write_bytes": Formula("4*B*H*M*(D + 1)", "out and lse, once"),
        "global_read_requests": Formula(
            "B*H*(ceil(M/2) + ceil(M/Br)*2*ceil(N/2))",
            "a warp for 2 rows of up to 64: 16 bytes a lane",
            _WHOLE_CHUNKS,
        ),
        "global_write_requests": Formula(
            "B*H*ceil(M/4)*(4*ceil(D/32) + 1)",
            "a warp for every 4th of 32 columns of 4 rows; lse of 4 rows",
            _WHOLE_CHUNKS,
        ),
        "global_read_sectors": Formula(
            "B*H*(M*D + ceil(M/Br)*2*N*D)/8", "whole sectors", _WHOLE_SECTORS
        ),
        "global_write_sectors": Formula(
            "B*H*(M*D/2 + M/4)",
            "4 requests touch every sector of out, each for 2 of its 8 floats",
            "D <= 64 and D % 8 == 0 and M % 4 == 0",
        ),
        "shared_read_requests": Formula(
            "B*H*ceil(M/Br)*ceil(N/Bc)*W*2*16*(8 + 8)",
            "in both products a lane reads 8 times 16 bytes of either side for 8*8*4 multiply-adds",
            _ONE_SHAPE,
        ),
        "shared_write_requests": Formula(
            "B*H*ceil(M/Br)*(Br*64/128 + ceil(N/Bc)*(2*Bc*64/128 + Br*Bc/32))",
            "Q, K and V by 16 bytes a lane; the weights by 4",
            _WHOLE_CHUNKS,
        ),
        "shared_read_transactions": Formula(
            "4*B*H*ceil(M/Br)*ceil(N/Bc)*W*2*16*(8 + 8)",
            "16 bytes a lane take 4 turns, a quarter of the warp each",
            _ONE_SHAPE,
        ),
        "shared_read_conflicts": Formula("0", "chunks are swizzled", _ONE_SHAPE),
        "shared_write_transactions": Formula(
            "B*H*ceil(M/Br)*(Br*64/32 + ceil(N/Bc)*(2*Bc*64/32 + Br*Bc/32))",
            "16 bytes a lane take 4 turns, the weights one",
            _WHOLE_CHUNKS,
        ),
        "shared_write_conflicts": Formula("0", "none", _WHOLE_CHUNKS),
        "exponentials": Formula(
            "B*H*ceil(M/Br)*ceil(N/Bc)*Br*(Bc + 8)",
            "a weight for each key, and the factor of the row in each of its 8 lanes",
            _ONE_SHAPE,
        ),
        "barriers": Formula(
            "2*B*H*ceil(M/Br)*ceil(N/Bc)", "before a piece of K, and of V, is read", _ONE_SHAPE
        ),
        "warp_barriers": Formula("B*H*ceil(M/Br)*ceil(N/Bc)*W", "between writing P and reading it"),
        "shuffles": Formula(
            "3*8*B*H*ceil(M/Br)*W*(ceil(N/Bc) + 1)",
            "3 for the maximum of each of a lane's 8 rows; at the end 3 for its sum",
            _ONE_SHAPE,
        ),
    },
)

# ---- V6 ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MmaTiles:
    """What V6's instances differ in.

    Attributes
    ----------
    warps : int
        Of a block.
    row_tiles : int
        A warp's, of 16 query rows each.
    keys : int
        Of a tile.
    stages : int
        Tiles of K and V that have a place in shared memory.
    q_in_registers : bool
        Q's fragments are read once, not for each tile of keys.
    k_in_registers : bool
        Of float32: the hi parts of 16 keys are read once for both kinds of products.
    """

    warps: int
    row_tiles: int
    keys: int
    stages: int
    q_in_registers: bool
    k_in_registers: bool = True

    def tiles(self, head_dim: int) -> dict[str, int]:
        """Values of Br, Bc, W and P."""
        rows = 16 * self.row_tiles * self.warps
        return {"Br": rows, "Bc": self.keys, "W": self.warps, "P": head_dim}

    def half_bytes(self, head_dim: int) -> int:
        """Shared memory of a block, for float16 and bfloat16: Q, and tiles of K and V."""
        rows = self.tiles(head_dim)["Br"] + 2 * self.stages * self.keys
        return 2 * rows * head_dim

    def split_bytes(self, head_dim: int) -> int:
        """For float32: Q's parts, where they are there, the parts of K and V, and tiles' heads."""
        rows = 0 if self.q_in_registers else 2 * self.tiles(head_dim)["Br"]
        return 2 * (rows + 4 * self.stages * self.keys) * head_dim + 16 * self.stages


# By the head dim that a tile has: the numbers of both Shape<...>, in half.cuh and split_kv.cuh. The
# tests compare the emulation's launches and counts with what follows from them.
V6_HALF = {
    64: MmaTiles(warps=4, row_tiles=2, keys=64, stages=1, q_in_registers=True),
    128: MmaTiles(warps=4, row_tiles=2, keys=32, stages=1, q_in_registers=False),
    256: MmaTiles(warps=4, row_tiles=1, keys=64, stages=1, q_in_registers=False),
}
V6_SPLIT = {
    64: MmaTiles(warps=4, row_tiles=2, keys=32, stages=3, q_in_registers=True),
    128: MmaTiles(warps=8, row_tiles=1, keys=32, stages=3, q_in_registers=True),
    256: MmaTiles(
        warps=8, row_tiles=1, keys=16, stages=2, q_in_registers=False, k_in_registers=False
    ),
}
_SPLIT_WARPS = 8  # of a block of the kernel that splits K and V

# Rows that begin at multiples of 16 bytes, and no tile that the end of the keys cuts through.
_WHOLE_ROWS = "D % 8 == 0"
_WHOLE_TILES = "D % 8 == 0 and N % Bc == 0"
_WHOLE_SECTORS_16 = "D % 16 == 0"
# No warp has rows on both sides of the tensor's end, whose lanes write number by number. Lanes with
# columns beyond it write nothing, and go apart from the others all the same.
_WHOLE_WARPS = "M % (Br/W) == 0"
_ONE_WAY = f"D == P and {_WHOLE_WARPS}"


def _v6_half(head_dim: int) -> Rung:
    """float16 and bfloat16."""
    tiles = V6_HALF[head_dim]
    q_reads = "Br*P/256" if tiles.q_in_registers else "ceil(N/Bc)*Br*P/256"
    reads = f"B*H*ceil(M/Br)*({q_reads} + ceil(N/Bc)*W*Bc*P/128)"
    whole = f"{_WHOLE_TILES} and {_WHOLE_WARPS}"
    q_why = "Q's fragments once" if tiles.q_in_registers else "Q's fragments for each tile of keys"
    return Rung(
        "v6",
        tiles.tiles(head_dim),
        {
            "global_read_bytes": Formula(
                "2*B*H*(M*D + ceil(M/Br)*2*N*D)",
                "Q once; K and V for each query tile",
                _WHOLE_ROWS,
            ),
            "global_write_bytes": Formula("B*H*M*(2*D + 4)", "out and lse, once", _WHOLE_ROWS),
            "global_read_requests": Formula(
                "B*H*(ceil(M*P/256) + ceil(M/Br)*2*N*P/256)",
                "16 bytes a lane: a warp for 256 numbers",
                _WHOLE_TILES,
            ),
            "global_write_requests": Formula(
                "B*H*M*(P/256 + W/Br)",
                "likewise, of rows that are all in the tensor; lse of a warp's rows at once",
                _ONE_WAY,
            ),
            "global_read_sectors": Formula(
                "B*H*(M*D + ceil(M/Br)*2*N*D)/16", "whole sectors", _WHOLE_SECTORS_16
            ),
            "global_write_sectors": Formula(
                "B*H*(M*D/16 + M/8)",
                "whole sectors",
                _ONE_WAY,
            ),
            "shared_read_requests": Formula(
                f"{reads} + B*H*M*P/256",
                f"ldmatrix of 16 x 16: {q_why}, those of K and V for each warp; at the end O, by "
                "16 bytes a lane",
                whole,
            ),
            "shared_write_requests": Formula(
                "B*H*ceil(M/Br)*(Br*P/256 + ceil(N/Bc)*Bc*P/128 + Br*P/64)",
                "16 bytes a lane for Q, K and V; O by 4, in the place of Q",
                _WHOLE_TILES,
            ),
            "shared_read_transactions": Formula(
                f"4*{reads} + B*H*M*ceil(D/64)",
                "ldmatrix takes 4 turns, one of its 8 x 8 matrices each; 64 numbers of O one",
                whole,
            ),
            "shared_read_conflicts": Formula("0", "chunks are swizzled", whole),
            "shared_write_transactions": Formula(
                "B*H*ceil(M/Br)*(Br*P/64 + ceil(N/Bc)*Bc*P/32 + Br*P/64)",
                "16 bytes a lane take 4 turns, 4 bytes one",
                _WHOLE_TILES,
            ),
            "shared_write_conflicts": Formula("0", "likewise", _WHOLE_TILES),
            "exponentials": Formula(
                "B*H*ceil(M/Br)*ceil(N/Bc)*Br*Bc", "a weight for each key", _WHOLE_TILES
            ),
            "barriers": Formula(
                "B*H*ceil(M/Br)*2*ceil(N/Bc)",
                "before K of a tile is read, and before V; the copy of the other one starts there",
                _WHOLE_TILES,
            ),
            "warp_barriers": Formula(
                "B*H*ceil(M/Br)*2*W",
                "before O is written to the place of Q, and between writing and reading it",
            ),
            "shuffles": Formula(
                "B*H*ceil(M/Br)*Br/8*(4 + 2)",
                "of 8 rows: 2 for a maximum and 2 for a sum when they get their reference, which "
                "random data does not move again; 2 for the sum at the end",
                _WHOLE_TILES,
            ),
            "votes": Formula(
                "B*H*ceil(M/Br)*ceil(N/Bc)*W", "whether a reference has to move", _WHOLE_TILES
            ),
            "mmas": Formula(
                "2*B*H*ceil(M/Br)*ceil(N/Bc)*Br*Bc*P/2048",
                "both products, 16 * 8 * 16 multiply-adds each",
                _WHOLE_TILES,
            ),
        },
    )


def _v6_split(head_dim: int) -> Rung:
    """float32: a kernel that splits K and V into parts, and one of attention."""
    tiles = V6_SPLIT[head_dim]
    # ldmatrix of a warp for 16 keys and 16 columns of a tile, in both products together.
    k_reads = 2 if tiles.k_in_registers else 3
    q_reads = 0 if tiles.q_in_registers else 3 * tiles.row_tiles
    fragments = k_reads + q_reads + 1 + tiles.row_tiles
    q_writes = "" if tiles.q_in_registers else " + Br*P/32"
    lanes = (head_dim // 8).bit_length() - 1  # log2 of the lanes that share a row of K or V
    # Of the warps that split: each reads what all of them wrote.
    split_reads = f"ceil(N/Bc)*2*{_SPLIT_WARPS}*3*{_SPLIT_WARPS}"
    tile_reads = f"ceil(N/Bc)*({fragments}*Bc*P/256 + 1)"
    return Rung(
        "v6",
        tiles.tiles(head_dim),
        {
            "global_read_bytes": Formula(
                "4*B*H*(2*N*D + M*D + ceil(M/Br)*ceil(N/Bc)*(2*Bc*P + 4))",
                "K and V once, to be split; Q once; the parts of K and V, and a head of 16 bytes a "
                "tile, for each query tile",
                _WHOLE_ROWS,
            ),
            "global_write_bytes": Formula(
                "4*B*H*(M*(D + 1) + ceil(N/Bc)*(2*Bc*(P + 1) + 4))",
                "out and lse; of each tile two parts of K and of V, a factor a row, and the head",
            ),
            "global_read_requests": Formula(
                "B*H*(N*P/64 + (2*ceil(M/8) - (D == P)*floor(M/Br)*Br/8)*D/8"
                " + ceil(M/Br)*ceil(N/Bc)*(Bc*P/64 + 1))",
                "16 bytes a lane for K, V and their parts; for 8 rows of Q 8 where a tile is full, "
                "else 4",
                _WHOLE_TILES,
            ),
            "global_write_requests": Formula(
                "B*H*(ceil(M/8)*(2 - (D == P))*D/8 + ceil(M*W/Br) + ceil(N/Bc)*(6*Bc*P/256 + 4))",
                "8 bytes a lane for out where it fills the tile, else 4; lse of a warp's rows; 16 "
                "for parts; a factor a row, of 32 chunks at once",
                _WHOLE_TILES,
            ),
            "global_read_sectors": Formula(
                "B*H*(N*D/2 + (2*M - (D == P)*floor(M/Br)*Br)*D/8"
                " + ceil(M/Br)*ceil(N/Bc)*(Bc*P/4 + 1))",
                "a lane's 32 bytes of K or V in two reads of the sector; likewise Q where it is "
                "read by 4 bytes; the parts whole",
                _WHOLE_TILES,
            ),
            "global_write_sectors": Formula(
                "B*H*(M*((2 - (D == P))*D + 1)/8 + ceil(N/Bc)*(Bc*P/4 + 2*Bc*P/256 + 4))",
                "whole sectors, but for the factors and the heads; those of out twice where it is "
                "written by 4 bytes",
                f"{_WHOLE_TILES} and M % 8 == 0",
            ),
            "shared_read_requests": Formula(
                f"B*H*({split_reads} + ceil(M/Br)*W*({tile_reads} + 4))",
                "3 values of all warps by each warp that splits; "
                f"{fragments} ldmatrix for 16 keys and 16 columns of both products; the tile's "
                "head, and the first one 4 more times, until its kind of step is found",
                _WHOLE_TILES,
            ),
            "shared_write_requests": Formula(
                f"B*H*(ceil(N/Bc)*2*{_SPLIT_WARPS}*3"
                f" + ceil(M/Br)*(ceil(N/Bc)*(Bc*P/64 + 1){q_writes}))",
                "of each warp that splits the largest and the smallest of its rows' maxima, and "
                "what kinds of rows it has; the parts by 16 bytes a lane, and the head"
                + ("; Q's parts" if q_writes else ""),
                _WHOLE_TILES,
            ),
            "shared_read_transactions": Formula(
                f"B*H*({split_reads} + ceil(M/Br)*W*(4*{tile_reads} + 10))",
                "16 bytes a lane take 4 turns; 2 of the first head's 4 reads are of 4 bytes",
                _WHOLE_TILES,
            ),
            "shared_read_conflicts": Formula("0", "chunks are swizzled", _WHOLE_TILES),
            "shared_write_transactions": Formula(
                f"B*H*(ceil(N/Bc)*2*{_SPLIT_WARPS}*3"
                f" + ceil(M/Br)*(ceil(N/Bc)*(Bc*P/16 + 1){q_writes}))",
                "likewise; the head is one lane's",
                _WHOLE_TILES,
            ),
            "shared_write_conflicts": Formula("0", "likewise", _WHOLE_TILES),
            "exponentials": Formula(
                "B*H*ceil(M/Br)*ceil(N/Bc)*Br*Bc", "a weight for each key", _WHOLE_TILES
            ),
            "barriers": Formula(
                "B*H*(ceil(N/Bc)*2 + ceil(M/Br)*(ceil(N/Bc) + 1))",
                "1 for K's and 1 for V's splitting; 1 before a tile is read, and at the end",
                _WHOLE_TILES,
            ),
            "shuffles": Formula(
                f"B*H*(ceil(N/Bc)*2*(Bc*P/256*{lanes} + {_SPLIT_WARPS}*10)"
                " + ceil(M/Br)*Br/8*(2 + 2))",
                "for the maxima of rows of K or V, and both of a warp; of 8 rows: 2 for that of Q, "
                "2 for the sum at the end; scores are near the reference that rows start with",
                _WHOLE_TILES,
            ),
            "votes": Formula(
                f"B*H*(ceil(N/Bc)*2*{_SPLIT_WARPS}*2 + ceil(M/Br)*W*(ceil(N/Bc) + 1))",
                "of K and V, whether rows hold inf or NaN, and whether any is 0; whether Q needs "
                "care; whether a tile's scores are near their references, as those of random data "
                "are",
                _WHOLE_TILES,
            ),
            "mmas": Formula(
                "3*2*B*H*ceil(M/Br)*ceil(N/Bc)*Br*Bc*P/2048",
                "three for each of both products, 16 * 8 * 16 multiply-adds each",
                _WHOLE_TILES,
            ),
        },
    )


def _v6(shape: Shape) -> Rung:
    """V6 with the tiles that it has for this call."""
    head_dim = next(size for size in V6_SPLIT if shape.head_dim <= size)
    return _v6_split(head_dim) if shape.dtype == "float32" else _v6_half(head_dim)


# Of V6, as of V5, the tiles of head dims to 64, and its form for float32: see acting().
RUNGS: dict[str, Rung] = {rung.name: rung for rung in (_V0, _V1, _V2, _V3, _V4, _V5, _v6_split(64))}


def dtypes(kernel: str) -> tuple[str, ...]:
    """The dtypes for which a rung has formulas; those of float16 are bfloat16's too."""
    return ("float32", "float16") if kernel == "v6" else ("float32",)


def acting(kernel: str, shape: Shape) -> Rung:
    """The rung that runs when ``kernel`` is asked for, with its tiles for this shape.

    V3 and V4 hand other head dims to V2; V5 has other tiles for them, V6 other tiles and, for
    float16 and bfloat16, another form.
    """
    if kernel == "v6":
        return _v6(shape)
    rung = RUNGS[kernel]
    if rung is _V5 and shape.head_dim > 64:
        large = shape.head_dim > 128
        return replace(
            rung, tiles={"Br": 64 if large else 128, "Bc": 256 if large else 128, "W": 8}
        )
    return RUNGS["v2"] if rung.tiles is _V3.tiles and shape.head_dim != 64 else rung
