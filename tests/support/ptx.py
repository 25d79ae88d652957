"""NVIDIA's instructions that no interpreter runs."""

from __future__ import annotations

import torch


def emulated_ptx(asm, constraints, args, dtype, is_pure, pack):
    """Three of NVIDIA's instructions, for four codes at a time: what the inline assembly of `decode_four_bits` does."""
    assert (constraints, is_pure, pack, len(args)) == ("=r,=r,r", True, 4, 1)
    words = args[0].view(torch.int32).tolist()
    halves = []
    for word in words:
        registers = {"$2": word & 0xFFFFFFFF}
        for line in asm.strip("{} ").split(";")[1:]:
            if not line.strip():
                continue
            name, operands = line.split(None, 1)
            target, *values = (x.strip() for x in operands.split(","))
            values = [registers[x] if x in registers else int(x, 0) for x in values]
            if name == "prmt.b32":  # byte i of the result is the one that nibble i of the selector names
                source = [*values[0].to_bytes(4, "little"), *values[1].to_bytes(4, "little")]
                chosen = bytes(source[values[2] >> 4 * i & 15] for i in range(4))
                registers[target] = int.from_bytes(chosen, "little")
            else:
                registers[target] = {"shr.b32": values[0] >> values[1], "and.b32": values[0] & values[1]}[name]
        halves += [registers["$0"] & 0xFFFF, registers["$0"] >> 16, registers["$1"] & 0xFFFF, registers["$1"] >> 16]
    bits = torch.tensor(halves, dtype=torch.int32).to(torch.int16)  # keeps the bits
    return bits.view(dtype)
