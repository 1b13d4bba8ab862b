"""GDB commands for a rung that the CPU emulates: ``source scripts/gdb_emulation.py`` in GDB.

The threads of a block are fibers, of which GDB sees the one that runs. These show the others::

    fibers                  where every thread of the block is, and what it waits for
    fiber 37 print row_max  a command in thread 37, in the frame of the kernel
    fiber 32-39 print lane  the same for several; ``fiber all ...`` for every one that has begun

For x86-64 with the GNU C library; the library must be built with ``CMAKE_BUILD_TYPE=Debug``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gdb

_NAMESPACE = "fastattn::emulation"
# Registers that a jump restores, by their place in glibc's jmp_buf.
_PLACES = {"rbx": 0, "rbp": 1, "r12": 2, "r13": 3, "r14": 4, "r15": 5, "rsp": 6, "rip": 7}
_MANGLED = {"rbp", "rsp", "rip"}  # rotated, and XORed with a secret of the process
_WORD = 2**64


def _current() -> Any:
    """The emulated thread that runs on the selected thread of the process."""
    try:
        thread = gdb.parse_and_eval(f"{_NAMESPACE}::current_thread()")
    except gdb.error as error:
        raise gdb.GdbError(f"needs a Debug build of libfastattn that runs: {error}") from None
    if not thread:
        raise gdb.GdbError("no rung runs on this thread: stop inside of a kernel first")
    return thread


def _threads() -> list[Any]:
    """All threads of the block."""
    vector = _current()["block"].dereference()["threads_"]
    pointer = gdb.lookup_type(f"{_NAMESPACE}::Thread").pointer()
    # A vector begins with its first and its last pointer, and a unique_ptr is one.
    begin, end = (vector.address.cast(pointer.pointer().pointer())[i] for i in range(2))
    return [begin[i].dereference() for i in range(int(end - begin))]


def _registers(thread: Any) -> dict[str, int]:
    """Those with which a thread that waits goes on."""
    saved = thread["fiber"]["here_"][0]["__jmpbuf"]
    secret = int(gdb.parse_and_eval("*(unsigned long*)($fs_base + 0x30)"))
    found = {}
    for name, place in _PLACES.items():
        value = int(saved[place]) % _WORD
        if name in _MANGLED:
            value = ((value >> 17) | (value << 47)) % _WORD ^ secret
        found[name] = value
    return found


def _has_begun(thread: Any) -> bool:
    return not thread["fiber"]["fresh_"]


def _has_ended(thread: Any) -> bool:
    return str(thread["state"]).endswith("kDone")


@contextlib.contextmanager
def _inside(thread: Any) -> Iterator[None]:
    """The registers of the process are those of that thread, for as long as this lasts."""
    selected = gdb.selected_frame()
    gdb.newest_frame().select()
    before = {name: int(gdb.parse_and_eval(f"(unsigned long)${name}")) for name in _PLACES}
    own = thread.address == _current()
    try:
        if not own:
            _set(_registers(thread))
        _select_kernel()
        yield
    finally:
        if not own:
            gdb.newest_frame().select()
            _set(before)
            gdb.newest_frame().select()
        elif selected.is_valid():
            selected.select()


def _set(registers: dict[str, int]) -> None:
    for name, value in registers.items():
        gdb.execute(f"set var ${name} = {value:#x}", to_string=True)


def _select_kernel() -> None:
    """The outermost frame of a .cu file, or of a header of a kernel that is a folder."""
    frame, kernel = gdb.newest_frame(), None
    while frame is not None:
        place = frame.find_sal().symtab
        name = "" if place is None else place.filename
        if name.endswith(".cu") or "cuda/kernels/" in name:
            kernel = frame
        frame = frame.older()
    if kernel is not None:
        kernel.select()


def _where(thread: Any) -> str:
    """Its line of the kernel, and what it waits for."""
    if thread.address == _current():
        doing = "runs"
    elif not _has_begun(thread):
        return "has not begun"
    elif _has_ended(thread):
        return "has ended"
    else:
        doing = {
            "kReady": "goes on here",
            "kAtBarrier": "waits at __syncthreads",
            "kAtWarpOp": {
                "kSync": "waits at __syncwarp",
                "kShuffle": "waits at a shuffle",
                "kBallot": "waits at a vote",
            }[str(thread["op"]["kind"]).rpartition(":")[2]],
        }[str(thread["state"]).rpartition(":")[2]]
    with _inside(thread):
        sal = gdb.selected_frame().find_sal()
        name = "?" if sal.symtab is None else Path(sal.symtab.filename).name
        return f"{name}:{sal.line} {doing}"


class Fibers(gdb.Command):
    """Where every thread of the block is, and what it waits for."""

    def __init__(self) -> None:
        super().__init__("fibers", gdb.COMMAND_STACK)

    def invoke(self, argument: str, from_tty: bool) -> None:
        """One line for neighbours that are at one place."""
        block = _current()["block"].dereference()
        print(f"block {int(block['number_'])}, {len(_threads())} threads")
        places = [(int(thread["number"]), _where(thread)) for thread in _threads()]
        for place, group in itertools.groupby(places, key=lambda each: each[1]):
            numbers = [number for number, _ in group]
            last = f"-{numbers[-1]}" if len(numbers) > 1 else ""
            mark = "*" if place.endswith("runs") else " "
            print(f"{mark} {numbers[0]}{last}".ljust(12), place)


class FiberCommand(gdb.Command):
    """Runs a command inside of threads of the block: fiber 37 print row_max."""

    def __init__(self) -> None:
        super().__init__("fiber", gdb.COMMAND_STACK)

    def invoke(self, argument: str, from_tty: bool) -> None:
        """``argument``: a number, "first-last" or "all", then the command."""
        which, _, command = argument.partition(" ")
        threads = _threads()
        try:
            first, _, last = (
                ("0", "", str(len(threads) - 1)) if which == "all" else (which.partition("-"))
            )
            chosen = threads[int(first) : int(last or first) + 1]
        except ValueError:
            raise gdb.GdbError("usage: fiber NUMBER|FIRST-LAST|all COMMAND") from None
        if not chosen or not command:
            raise gdb.GdbError(f"usage: fiber NUMBER COMMAND, with a number below {len(threads)}")
        for thread in chosen:
            number = int(thread["number"])
            if not _has_begun(thread) or _has_ended(thread):
                if which != "all":
                    print(f"thread {number} {_where(thread)}")
                continue
            with _inside(thread):
                print(f"thread {number}: " + gdb.execute(command, to_string=True).rstrip())


Fibers()
FiberCommand()
