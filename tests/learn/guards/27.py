from engine.kv_transfer.links import SHM
from engine.kv_transfer.store import Tier


def guard():
    tier = Tier(SHM / "guard-of-27", 1 << 20)
    tier.put("block", [b"x"])
    try:
        written = tier.path("block").stat().st_mtime_ns
        used = [tier.find("block").stat().st_mtime_ns for _ in range(20_000)]  # longer than a tick of the clock
    finally:
        tier.discard(tier.path("block"))
        tier.folder.rmdir()
    assert used[-1] > written, "who is used stays"
