"""A store of blocks by hash, on two tiers: what memory evicts goes to the disk, what the disk evicts is forgotten.

Owns files and how many bytes of them there may be; called by `store_connector`, of many engines at once. It knows keys
and bytes, never requests. vLLM: `vllm/distributed/kv_transfer/kv_connector/v1/offloading/`, LMCache.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import struct
import time
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.kv_transfer.frames import as_bytes, host_bytes
from engine.kv_transfer.links import SHM


class Tier:
    """A folder of blocks that holds at most `capacity` bytes; the least recently used leave first.

    Several engines may share it: a block appears by a rename, complete or not at all, and whoever opens one that has
    just been evicted finds nothing, which is a miss. What `evict` gets is the path of a block on its way out.

    A disk may be full, fail, or be read-only from one moment to the next. Whatever the system refuses costs blocks,
    never more: nothing here raises OSError once the folder is there, and each reason is told once.
    """

    STALE = 60.0  # seconds since the last write: a block takes milliseconds, so its writer was killed

    def __init__(self, folder: Path, capacity: int, evict: Callable[[Path], None] = os.unlink) -> None:
        """Raises InputError: there is no such folder, and none can be made."""
        self.folder, self.capacity, self.evict = Path(folder), capacity, evict
        self.told: set[str] = set()  # what went wrong so far
        self.unreadable: set[Path] = set()  # blocks that could not be read, and not be removed either
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise common.InputError(f"KV store {folder}: {error.strerror}") from None

    def path(self, key: str) -> Path:
        return self.folder / key

    @contextlib.contextmanager
    def losing(self, what: str) -> Iterator[None]:
        """What the system refuses in here ends what is done in here, and no more."""
        try:
            yield
        except OSError as error:
            if (why := f"{what}: {error.strerror}") not in self.told:
                self.told.add(why)
                warnings.warn(f"KV store {self.folder}: {why}; blocks are lost, the engine goes on", stacklevel=4)

    def find(self, key: str) -> Path | None:
        """Where a block is, if it is; it counts as used now, unless the disk is read-only."""
        path = self.path(key)
        try:
            os.utime(path)
        except OSError:
            if not os.path.isfile(path):
                return None
        return None if path in self.unreadable else path

    def put(self, key: str, parts: Iterable[Any]) -> bool:
        """Write a block, then make room for it. False, and nothing is left of it, if there is no room for it."""
        path = self.folder / f".{secrets.token_hex(8)}"
        with self.losing("cannot write a block"):
            try:
                with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                    file.writelines(parts)
                os.replace(path, self.path(key))
            except OSError:
                with contextlib.suppress(OSError):
                    path.unlink()
                raise
            self.unreadable.discard(self.path(key))
            if self.trim() <= self.capacity:
                return True
            self.path(key).unlink(missing_ok=True)  # nothing else could be removed for it
        return False

    def discard(self, path: Path) -> None:
        """Forget a block that cannot be read."""
        self.unreadable.add(path)  # in case that it stays
        with self.losing("cannot remove a block"):
            path.unlink(missing_ok=True)
            self.unreadable.discard(path)

    def trim(self) -> int:
        """Evict the files unused for longest until `capacity` bytes are left, and remove those that will never be
        complete; others may do so at the same time. Returns the bytes left."""
        found, stale = [], time.time() - self.STALE
        with self.losing("cannot list it"), os.scandir(self.folder) as entries:
            for entry in entries:
                with self.losing("cannot look at a block"), contextlib.suppress(FileNotFoundError):
                    stat = entry.stat(follow_symlinks=False)
                    if entry.name.startswith("."):
                        if stat.st_mtime < stale:
                            os.unlink(entry.path)
                    elif entry.is_file(follow_symlinks=False):  # what else somebody keeps here is not ours
                        found.append((stat.st_mtime_ns, stat.st_size, Path(entry.path)))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.capacity:
                break
            with self.losing("cannot evict a block"), contextlib.suppress(FileNotFoundError):  # others were faster
                self.evict(path)
            total -= 0 if os.path.exists(path) else size
        return total


class KVStore:
    """Lesson 11's second tier for many engines at once: what memory evicts goes to the disk, what the disk evicts is
    forgotten. A block on either is a block less to compute, whoever computed it (the idea of LMCache)."""

    HEADER = struct.Struct("<II")  # of each layer: bytes and CRC

    def __init__(self, folder: str | Path | None, cpu_bytes: int, disk_bytes: int = 0, num_layers: int = 1) -> None:
        """`folder` names the store: engines that name the same one share it. Without one it is this process's, in
        memory alone, and goes with it: `remove_private_stores` if that was killed."""
        self.disk = Tier(Path(folder), disk_bytes) if folder and disk_bytes else None
        demote = self._demote if self.disk else os.unlink
        if folder:
            tag = hashlib.sha256(str(Path(folder).resolve()).encode()).hexdigest()[:16]
        else:
            remove_private_stores()
            tag = f"of-{os.getpid()}-{secrets.token_hex(4)}"
        self.cpu = Tier(SHM / f"kvstore-{tag}", cpu_bytes, demote)
        if not folder:
            weakref.finalize(self, shutil.rmtree, self.cpu.folder, ignore_errors=True)
        self.num_layers = num_layers
        self.stats: Counter[str] = Counter()

    def _demote(self, path: Path) -> None:
        assert self.disk is not None, "nothing is demoted without a second tier"
        try:
            body = path.read_bytes()
        finally:
            path.unlink()  # readable or not, it leaves
        self.stats["demoted"] += self.disk.put(path.name, [body])

    def find(self, key: str) -> Path | None:
        """Where a block is, if it is; it counts as used now."""
        found = (tier.find(key) for tier in (self.cpu, self.disk) if tier)
        return next(filter(None, found), None)

    def discard(self, path: Path) -> None:
        """Forget a block that cannot be read: it is a block more to compute, once."""
        tier = self.cpu if self.disk is None or path.parent == self.cpu.folder else self.disk
        tier.discard(path)

    def put(self, key: str, layers: Sequence[torch.Tensor]) -> None:
        """A block: one payload per layer, layer 0 first, so that a reader can begin with layer 0. Where it cannot be
        written, the store has one less, and its engine goes on."""
        if self.find(key) is None:
            parts = [host_bytes(as_bytes(layer)) for layer in layers]
            heads = [self.HEADER.pack(part.nbytes, zlib.crc32(part)) for part in parts]
            if self.cpu.put(key, [*heads, *parts]):
                self.stats["stored"] += 1
                self.stats["bytes"] += sum(part.nbytes for part in parts)

    def read_layer(self, path: Path, layer: int) -> torch.Tensor:
        """uint8. Raises OSError or ValueError if the block is gone, cut short or changed."""
        with open(path, "rb") as file:
            head = file.read(self.num_layers * self.HEADER.size)
            if len(head) < self.num_layers * self.HEADER.size:
                raise ValueError(f"{path.name}: cut short")
            sizes = list(self.HEADER.iter_unpack(head))
            if len(head) + sum(size for size, _ in sizes) != os.fstat(file.fileno()).st_size:
                raise ValueError(f"{path.name}: has another length than it says")  # before memory is taken for it
            file.seek(sum(size for size, _ in sizes[:layer]), os.SEEK_CUR)
            size, crc = sizes[layer]
            body = bytearray(file.read(size))
        if zlib.crc32(body) != crc:
            raise ValueError(f"{path.name}: layer {layer} is not what was stored")
        return torch.frombuffer(body, dtype=torch.uint8)

    def clear(self) -> None:
        """Forget all of it, and the folders."""
        for tier in filter(None, (self.cpu, self.disk)):
            for path in tier.folder.iterdir():
                tier.discard(path)
            with contextlib.suppress(OSError):
                tier.folder.rmdir()


def remove_private_stores(pid: int | None = None) -> None:
    """Those of a process that is about to end, or by default of all that were killed. If one of these is alive, in a
    container whose processes we cannot see, it finds less than it stored."""
    for path in SHM.glob("kvstore-of-*"):
        if owner := re.fullmatch(r"kvstore-of-(\d+)-[0-9a-f]{8}", path.name):
            with contextlib.suppress(OSError, OverflowError):
                try:
                    gone = int(owner[1]) == pid if pid else os.kill(int(owner[1]), 0)
                except ProcessLookupError:
                    gone = True
                if gone:
                    shutil.rmtree(path, ignore_errors=True)
