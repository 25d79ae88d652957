"""NVIDIA's machine code (SASS), as `cuobjdump -sass` prints it: who writes what a product still reads?"""

from __future__ import annotations

import re

# One instruction: its address, its guard, the operation, its operands.
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+)?\s*([\w.]+)\s*(.*?)\s*;", re.M)


def written(operation: str, operands: str) -> set[int]:
    """The registers that an instruction writes, as far as names tell."""
    first = re.match(r"R(\d+)\b", operands)
    if first is None or operation.startswith(("ST", "RED", "BAR", "BRA", "SYNCS.ARRIVE", "UTMA")):
        return set()
    wide = 4 if ".128" in operation or operation.startswith(("HMMA", "IMMA", "QMMA")) else 1
    if ".64" in operation or ".WIDE" in operation:
        wide = 2
    return set(range(int(first[1]), int(first[1]) + wide))


def overwritten(text: str) -> list[str]:
    """Hopper's tensor cores (wgmma) read their first operand from registers while the program goes on. Says what, on
    some path to the wait for such a product, writes a register that it reads: the assembler does not look."""
    code = [(int(m[1], 16), m[2], m[3], m[4]) for m in INSTRUCTION.finditer(text)]
    place = {address: i for i, (address, *_) in enumerate(code)}
    found = []
    for start, (_, _, operation, operands) in enumerate(code):
        product = re.match(r"[HQI]GMMA", operation) and re.match(r"R\d+, R(\d+),", operands)
        if not product:
            continue
        reads = set(range(int(product[1]), int(product[1]) + 4))
        paths, seen = [(start + 1, 0 if "gsb0" in operands else -1)], set()  # the last of a group closes it
        while paths:  # where we are, and how many groups have been closed since its own
            here, groups = paths.pop()
            if here >= len(code) or (here, groups) in seen:
                continue
            seen.add((here, groups))
            _, guard, operation, operands = code[here]
            if operation.startswith("WARPGROUP.DEPBAR") and int(operands.split(",")[1], 16) <= groups:
                continue  # waited for
            if "GMMA" in operation:
                groups = min(groups + ("gsb0" in operands), 4)
            elif written(operation, operands) & reads:
                found.append(f"{operation} {operands}")
                break
            if operation.startswith("BRA") and (target := re.search(r"0x([0-9a-f]+)", operands)):
                paths.append((place[int(target[1], 16)], groups))
            if guard or not operation.startswith(("BRA", "EXIT")):
                paths.append((here + 1, groups))
    return found
