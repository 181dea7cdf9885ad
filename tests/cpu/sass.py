"""Machine code of compiled kernels, looked through for what the compiler should not have done."""

from __future__ import annotations

import re
import subprocess
import tempfile

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\d+ )?(.*?)\s*;")
PRODUCT = re.compile(r"HGMMA\S* R\d+, R(\d+), gdesc")
"""A matrix product of four warps whose first operand is in four registers."""
TARGET = re.compile(r"(\S+) (?:P\d, )?R(\d+)")
BACK = re.compile(r"BRA\S* .*?0x([0-9a-f]+)")
NO_TARGET = ("ST", "LDGSTS", "RED", "BRA", "HGMMA")
LOW_WORD = re.compile(r"UIADD3 UR\d+, (UP\d), (UR\d+), ")
HIGH_WORD = re.compile(r"UIADD3\.X UR\d+, (UR\d+), (-?0x[0-9a-f]+), URZ, (UP\d)")
UNIFORM = re.compile(r"[SU]\w[\w.]* (?:UP\d, )?UR(\d+)")
ADDRESS = re.compile(r"(USGXT\.U32 .* 0xe|ULOP3\.LUT .* 0x3fff, URZ, 0xc0, !UPT)$")
"""What leaves 14 bits: a place in shared memory, in units of 16 bytes."""


def listing(cubin: bytes) -> str:
    """The disassembly of a compiled kernel."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def overwritten(text: str) -> list[str]:
    """Instructions that write a register which a product under way may still read.

    Such products read registers after they were issued, until WARPGROUP.DEPBAR has waited for all of them. ptxas takes
    the registers for free at once, and Triton 3.6 lets the products of one pass of a loop go on in the next.
    """
    code = [(int(m[1], 16), m[2]) for m in INSTRUCTION.finditer(text)]
    found = _overwritten(code)
    for at, instruction in code:
        back = BACK.match(instruction)
        if back and int(back[1], 16) < at:
            # A loop's end meets its beginning.
            found += _overwritten([c for c in code if int(back[1], 16) <= c[0] <= at] * 2)
    return list(dict.fromkeys(found))


def _overwritten(code: list[tuple[int, str]]) -> list[str]:
    busy: set[int] = set()
    found = []
    for at, instruction in code:
        if product := PRODUCT.match(instruction):
            busy.update(range(int(product[1]), int(product[1]) + 4))
        elif instruction.startswith("WARPGROUP.DEPBAR") and instruction.endswith("0x0"):
            busy.clear()
        elif (target := TARGET.match(instruction)) and not target[1].startswith(NO_TARGET):
            wide = 4 if ".128" in target[1] or "M88.4" in target[1] else 2 if re.search(r"\.64|WIDE", target[1]) else 1
            if busy & set(range(int(target[2]), int(target[2]) + wide)):
                found.append(f"{at:#x} {instruction}")
    return found


def misaddressed(text: str) -> list[str]:
    """Descriptors of an operand in shared memory that are not the operand's place plus a constant.

    A product's second and later steps take 64 bits: the place's 14, zero-extended, plus a constant whose two highest
    bits name the swizzle. ptxas 12.8 sometimes adds the constant to registers that hold something else.
    """
    written: dict[str, str] = {}
    carries: dict[str, bool] = {}
    found = []
    for m in INSTRUCTION.finditer(text):
        instruction = m[2]
        if high := HIGH_WORD.match(instruction):
            constant = int(high[2], 16) & 0xFFFFFFFF
            swizzled = constant >> 30 and constant != 0xFFFFFFFF
            zero = written.get(high[1], "").endswith(", URZ")
            if swizzled and not (zero and carries.get(high[3], False)):
                found.append(f"{int(m[1], 16):#x} {instruction}")
        elif low := LOW_WORD.match(instruction):
            carries[low[1]] = bool(ADDRESS.search(written.get(low[2], "")))
        if target := UNIFORM.match(instruction):
            written[f"UR{target[1]}"] = instruction
            if ".64" in instruction or "WIDE" in instruction:
                written[f"UR{int(target[1]) + 1}"] = instruction
    return found
