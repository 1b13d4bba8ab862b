"""What each rung of the ladder does to memory, as formulas.

They are worked out from the sources of the rungs by hand, are shown as they stand here, and are
evaluated from the same text. The tests hold them against the counts of the emulation.

Symbols: ``B`` batch, ``H`` query heads, ``M`` query length, ``N`` key length, ``D`` head dim;
``Br`` rows and ``Bc`` keys of a tile, ``W`` warps of a block. Bytes count what threads ask for, a
sector has 32 bytes, a request is a warp's, and shared memory has 32 banks of 4 bytes. All of them
are of calls without a mask, where v has the head dim of q and k.
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
    """One call: batch, query heads, lengths and head dim."""

    batch: int
    heads: int
    len_q: int
    len_kv: int
    head_dim: int

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
    names |= {"ceil": math.ceil, "gcd": lambda a, b: math.gcd(int(a), int(b))}
    # The texts are constants of this file, never a user's.
    return Fraction(eval(text, {"__builtins__": {}}, names))


@dataclass(frozen=True)
class Formula:
    """One count of one rung.

    Attributes
    ----------
    text : str
        Over the symbols of this file, with ``ceil`` and ``gcd``.
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
        Values of Br, Bc and W, those that the rung has.
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

RUNGS: dict[str, Rung] = {rung.name: rung for rung in (_V0, _V1, _V2, _V3, _V4, _V5)}


def acting(kernel: str, shape: Shape) -> Rung:
    """The rung that runs when ``kernel`` is asked for, with its tiles for this shape.

    V3 and V4 hand other head dims to V2; V5 has other tiles for them.
    """
    rung = RUNGS[kernel]
    if rung is _V5 and shape.head_dim > 64:
        large = shape.head_dim > 128
        return replace(
            rung, tiles={"Br": 64 if large else 128, "Bc": 256 if large else 128, "W": 8}
        )
    return RUNGS["v2"] if rung.tiles is _V3.tiles and shape.head_dim != 64 else rung
