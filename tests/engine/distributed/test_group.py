"""Where ranks meet: no other machine can reach it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from engine.distributed.group import meeting_point


def listeners(port):
    """The addresses at which this machine listens on a TCP port, in hexadecimal as the kernel writes them."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the kernel's list of sockets is Linux's")
def test_ranks_meet_where_no_other_machine_can_reach():
    """torch's own store listens at every address, whatever host it is given."""
    store = meeting_point()
    assert listeners(store.port) == ["0100007F"], "127.0.0.1 alone"
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    other.set("rank", "here")
    assert store.get("rank") == b"here"
