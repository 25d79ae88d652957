"""081 · KV connectors: vLLM's verbs over lesson 08's transfers. The middle part of lesson 08.

One interface, `KVConnectorBase`: who asks, who loads, who saves, who frees, and when. Behind it three connectors from
engine to engine that differ in their wire (shared memory, TCP, torch.distributed), and one without a partner: a store
of blocks by hash, on two tiers, for any engine that comes later. The protocol below is in 080; the scheduler that asks
and the runner that loads and saves are in 08_disagg.

Read for this: vLLM 0.32 `distributed/kv_transfer/kv_connector/v1/base.py`, `example_connector.py`, `offloading/`,
`nixl/pull_scheduler.py`; Liu et al. 2025 (LMCache), Qin et al. 2025 (Mooncake Store).
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import queue
import secrets
import socket
import struct
import threading
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from engine.kv_transfer import links as kv_transfer
from engine.output import KVConnectorMetadata, KVConnectorOutput, SchedulerOutput
from engine.request import Request, RequestStatus

handshake = kv_transfer.handshake
Consumer, Link, Producer = kv_transfer.Consumer, kv_transfer.Link, kv_transfer.Producer


# --- 1. A store: blocks by their hash, in tiers -----------------------------------------------------------------------


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

    def __init__(self, folder: str | Path, cpu_bytes: int, disk_bytes: int = 0, num_layers: int = 1) -> None:
        """`folder` names the store: engines that name the same one share it."""
        tag = hashlib.sha256(str(Path(folder).resolve()).encode()).hexdigest()[:16]
        self.disk = Tier(Path(folder), disk_bytes) if disk_bytes else None
        demote = self._demote if self.disk else os.unlink
        self.cpu = Tier(kv_transfer.SHM / f"kvstore-{tag}", cpu_bytes, demote)
        self.num_layers = num_layers
        self.stats: Counter[str] = Counter()

    def _demote(self, path: Path) -> None:
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
        (self.cpu if path.parent == self.cpu.folder else self.disk).discard(path)

    def put(self, key: str, layers: Sequence[torch.Tensor]) -> None:
        """A block: one payload per layer, layer 0 first, so that a reader can begin with layer 0. Where it cannot be
        written, the store has one less, and its engine goes on."""
        if self.find(key) is None:
            parts = [kv_transfer.as_bytes(layer).cpu().numpy() for layer in layers]
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


# --- 2. The interface: vLLM's verbs ----------------------------------------------------------------------------------


@dataclass
class KVTransferConfig:
    """`--kv-transfer-config`, with vLLM's keys (`vllm/config/kv_transfer.py`). Raises InputError.

    Of `kv_connector_extra_config` these are understood: host (to listen at, and what others are told; 127.0.0.1),
    kv_lease_duration (seconds that finished blocks wait for a reader; 30), timeout and retries (of a reader; 10 and 1),
    folder, cpu_bytes and disk_bytes (of a store).
    """

    kv_connector: str | None = None
    kv_role: str | None = None
    engine_id: str = ""
    kv_port: int = 14579
    kv_load_failure_policy: str | None = None  # fail, as in vLLM; of a store, which is a cache, recompute
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)

    ROLES: ClassVar = ("kv_producer", "kv_consumer", "kv_both")
    EXTRA: ClassVar = {"host": str, "kv_lease_duration": float, "timeout": float, "retries": int, "folder": str,
                       "cpu_bytes": int, "disk_bytes": int}  # fmt: skip

    def __post_init__(self) -> None:
        self.engine_id = self.engine_id or secrets.token_hex(4)
        if self.kv_load_failure_policy is None:
            self.kv_load_failure_policy = "recompute" if self.kv_connector == "StoreConnector" else "fail"
        allowed = {"kv_connector": tuple(CONNECTORS), "kv_role": self.ROLES,
                   "kv_load_failure_policy": ("fail", "recompute")}  # fmt: skip
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise common.InputError(f"{name} {getattr(self, name)!r}: must be one of {', '.join(values)}")
        if type(self.kv_port) is not int or not 0 <= self.kv_port < 65536:
            raise common.InputError(f"kv_port {self.kv_port!r}: must be a whole number from 0 to 65535")
        if not isinstance(self.kv_connector_extra_config, dict):
            raise common.InputError("kv_connector_extra_config: must be an object")
        for name, value in self.kv_connector_extra_config.items():
            kind = self.EXTRA.get(name)
            if kind is None:
                raise common.InputError(f"kv_connector_extra_config: no {name!r}; allowed: {', '.join(self.EXTRA)}")
            right = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
            if not right or (kind is not str and not 0 <= value < 1 << 50):
                raise common.InputError(f"kv_connector_extra_config: {name} {value!r}: must be a {kind.__name__}")
        if self.kv_connector == "StoreConnector" and not self.extra("folder", ""):
            raise common.InputError("kv_connector_extra_config: StoreConnector needs a folder")

    @classmethod
    def from_json(cls, text: str | dict[str, Any]) -> KVTransferConfig:
        """From the flag's text. Raises InputError."""
        try:
            found = json.loads(text) if isinstance(text, str) else text
        except ValueError as error:
            raise common.InputError(f"--kv-transfer-config: not JSON ({error})") from None
        names = [f.name for f in dataclasses.fields(cls)]
        if not isinstance(found, dict):
            raise common.InputError(f"--kv-transfer-config: must be an object with {', '.join(names)}")
        if unknown := [name for name in found if name not in names]:
            raise common.InputError(f"--kv-transfer-config: no key {unknown[0]!r}; allowed: {', '.join(names)}")
        return cls(**found)

    def extra(self, name: str, default: Any) -> Any:
        return self.kv_connector_extra_config.get(name, default)

    def port_of(self, rank: int) -> int:
        """Where the r-th rank of all engines listens. Whoever only fetches listens nowhere; 0 is any port."""
        return self.kv_port + rank if self.kv_port and self.is_kv_producer else self.kv_port

    @property
    def is_kv_producer(self) -> bool:
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        return self.kv_role in ("kv_consumer", "kv_both")


def kv_transfer_params(request: Request) -> dict[str, Any]:
    """What a request says about its keys and values; it travels in `SamplingParams.extra_args`, as in vLLM.

    For a prefill worker: do_remote_decode, transfer_id. For a decode worker: do_remote_prefill, transfer_id,
    remote_host, remote_port and, if the producer is sharded, tp_size (its rank r listens at remote_port + r).
    """
    return (request.sampling_params.extra_args or {}).get("kv_transfer_params") or {}


def check_kv_transfer_params(params: Any) -> None:
    """Raises InputError unless `params` are what the functions below rely on."""
    kinds = {"do_remote_decode": bool, "do_remote_prefill": bool, "transfer_id": str, "remote_host": str,
             "remote_port": int, "tp_size": int}  # fmt: skip
    if not isinstance(params, dict):
        raise common.InputError("kv_transfer_params: must be an object")
    for name, value in params.items():
        if name in kinds and type(value) is not kinds[name]:
            raise common.InputError(f"kv_transfer_params: {name} must be a {kinds[name].__name__}")
    if params.get("do_remote_decode") and params.get("do_remote_prefill"):
        raise common.InputError("kv_transfer_params: do_remote_decode and do_remote_prefill exclude each other")
    wanted = ("transfer_id", "remote_host", "remote_port") if params.get("do_remote_prefill") else ()
    wanted = ("transfer_id",) if params.get("do_remote_decode") else wanted
    if missing := [name for name in wanted if name not in params]:
        raise common.InputError(f"kv_transfer_params: {missing[0]} is missing")
    port, ranks = params.get("remote_port", 1), params.get("tp_size", 1)
    if not (port > 0 and 1 <= ranks <= 1024 and port + ranks <= 65536):  # rank r listens at remote_port + r
        raise common.InputError("kv_transfer_params: remote_port or tp_size is out of range")


def attach_params(sampling_params: Any, params: Any) -> None:
    """Send `params` with a request of the API. Raises InputError."""
    check_kv_transfer_params(params)
    if sampling_params.n != 1:
        raise common.InputError(f"n {sampling_params.n}: must be 1 with kv_transfer_params: one transfer, one answer")
    sampling_params.extra_args = {"kv_transfer_params": params}


async def give_up(params: dict[str, Any]) -> None:
    """Nobody will come for this prompt: say so to every rank that keeps it, as a decode worker would. A rank that
    cannot be reached keeps it until its lease is up."""
    address = params["remote_host"], params["remote_port"]
    ranks = [(address[0], address[1] + rank) for rank in range(params.get("tp_size", 1))]
    await asyncio.gather(*(asyncio.to_thread(cancel, rank, params["transfer_id"]) for rank in ranks))


def cancel(address: tuple[str, int], transfer: str, seconds: float = 5.0) -> None:
    """Tell the producer at `address` that nobody wants this transfer any more."""
    stop = time.monotonic() + seconds
    with (
        contextlib.suppress(OSError, OverflowError, UnicodeError),
        handshake.dial(address, handshake.secret(), seconds) as sock,
    ):
        sock.sendall(kv_transfer.pack_frame({"kind": "CANCEL", "transfer": transfer}))
        sock.shutdown(socket.SHUT_WR)
        while True:  # its HELLO, and then its end of the connection: it has heard
            handshake.read_exactly(sock, 1, stop)


SAMPLE = 61  # every 61st input, or output: training and rounding change nearly all weights of a matrix, not a few


def weights_digest(model: Any) -> str:
    """Tells models of one shape apart by what their keys and values depend on: all weights but the output matrix.

    Equal on all ranks, and however many there are: each adds up the bits of a sample of its part, and then they add up
    their sums. These are whole numbers, which have one sum in any order. All ranks must call this. Weights
    that ranks have rounded for themselves are others for another number of them, where a scale spans the cut; so is
    their digest.
    """
    c, group = model.config, getattr(model, "group", None)
    rank, ranks = (group.rank_in_group, group.world_size) if group else (0, 1)

    def total(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]).sum()

    sums, grids = [total(model.embed_tokens[:, ::SAMPLE])], set()  # a grid is what a layer rounds its inputs to
    sums += [total(norm) * (rank == 0) for norm in model.norms]  # whole on every rank: one of them counts
    for name, layer in model.linear.items():
        if name == "lm_head":
            continue
        layer = getattr(layer, "local", layer)  # lesson 05c: this rank's part
        matrix = layer.weight if layer.weight is not None else getattr(layer, "packed", layer).codes  # lesson 05b
        if type(matrix.data) is not torch.Tensor:  # torchao's
            matrix = matrix.dequantize()
        by_inputs = name.endswith(("o_proj", "down_proj"))  # so are they cut, and others by outputs
        copies = max(1, ranks // c.num_key_value_heads) if name.endswith("qkv_proj") else 1
        mine = slice(model.num_heads * c.head_dim if rank % copies else None)  # a neighbour counts the same KV head
        bias = 0 if layer.bias is None else total(layer.bias[mine])
        sums.append(total(matrix[::SAMPLE] if by_inputs else matrix[mine, ::SAMPLE]) + bias)
        grids.add(str(getattr(layer, "grid", None)))
    found = torch.stack(sums)
    found = group.all_reduce(found) if group else found
    made_of = (found.tolist(), sorted(grids), c.rope_theta, c.rope_scaling, c.rms_norm_eps)
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]


class KVConnectorBase:
    """Who asks, who loads, who saves, who frees, and when (`kv_connector/v1/base.py:KVConnectorBase_V1`).

        a request comes            on_new_request
        a request is admitted      get_num_new_matched_tokens   is more of it elsewhere? Now, or later?
        its blocks are there       update_state_after_alloc     then bring it here
        the step is planned        build_connector_meta         from the scheduler's half to the worker's
        before the model runs      start_load_kv
        before a layer's attention wait_for_layer_load
        after it                   save_kv_layer
        after the model            wait_for_save, get_finished
        a request has ended        request_finished             may its blocks be freed, or does somebody need them?

    vLLM makes two objects of it, one in the scheduler's process and one in each worker's; ours lives in one process.
    """

    fetches_later: ClassVar[bool] = False  # between steps, while its request waits
    needs_hashes: ClassVar[bool] = False  # of all full blocks, as lesson 05's prefix cache does
    patience: ClassVar[float | None] = None  # seconds after which an idle engine asks again for `has_pending_work`

    def __init__(self, config: KVTransferConfig) -> None:
        self.config, self.meta, self.stats = config, KVConnectorMetadata(), Counter()
        self.loads: list[tuple[Request, list[int], int, int]] = []
        self.wake = threading.Event()

    # -- the scheduler's half --

    @property
    def load_failure_policy(self) -> str:
        return self.config.kv_load_failure_policy

    def on_new_request(self, request: Request) -> None:
        """Raises InputError if what it says about its keys and values makes no sense."""
        check_kv_transfer_params(kv_transfer_params(request))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """(tokens beyond `num_computed_tokens` that can be loaded, whether that takes longer than a step).

        The scheduler does not use the answer for a request that may not read the cache (`skip_reading_prefix_cache`).
        """
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: list[int], num_external_tokens: int) -> None:
        """The request has blocks; `num_external_tokens` of it are to be loaded into them."""

    def saves(self, request: Request) -> bool:
        """Does anybody else want what this request computes?"""
        return False

    def build_connector_meta(self, output: SchedulerOutput, tables: dict[str, list[int]]) -> KVConnectorMetadata:
        """The worker's orders for a step; `tables` are the block tables."""
        requests = (*output.scheduled_running_reqs, *output.scheduled_new_reqs, *output.scheduled_resumed_reqs)
        saves = [(r, tables[r.request_id], r.num_computed_tokens) for r in requests if self.saves(r)]
        loads, self.loads = self.loads, []
        return KVConnectorMetadata(loads, saves, list(output.preempted_reqs))

    def request_finished(self, request: Request, blocks: list[int]) -> bool:
        """True: leave its blocks alone until `get_finished` names it among `finished_sending`. They are left alone in
        any case while they are being loaded: until it is named among `finished_recving`, or `failed_recving`."""
        return False

    def answer_params(self, request: Request) -> dict[str, Any] | None:
        """For the answer of a request whose blocks are kept: the kv_transfer_params of whoever goes on with it."""

    def has_pending_work(self) -> bool:
        """Must the engine go on stepping although nobody is scheduled?"""
        return False

    # -- the worker's half --

    def register_kv_caches(self, layers: list[torch.Tensor], model: Any) -> None:
        """The memory: [2, num_blocks, block_size, Hkv, D] for each layer; `model` is what they belong to."""
        self.layers, self.model = layers, model
        self.block_size = layers[0].shape[2]
        # A tensor-parallel rank holds some of the heads; all numbers on the wire are those of the whole model.
        group, self.num_kv_heads = getattr(model, "group", None), model.config.num_key_value_heads
        self.tp_rank, self.tp_size = (group.rank_in_group, group.world_size) if group else (0, 1)
        self.head, self.heads = kv_transfer.owned_heads(self.num_kv_heads, self.tp_size, self.tp_rank)
        self.digest = weights_digest(model)

    def bind_connector_metadata(self, meta: KVConnectorMetadata) -> None:
        self.meta = meta

    def start_load_kv(self) -> None: ...

    def wait_for_layer_load(self, layer: int) -> None: ...

    def save_kv_layer(self, layer: int) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self) -> KVConnectorOutput:
        return KVConnectorOutput()

    def idle(self, seconds: float) -> None:
        """Nothing to compute: wait for news from the network, but not for longer."""
        self.wake.wait(seconds)
        self.wake.clear()

    def close(self) -> None: ...

    # -- for both kinds of connectors --

    def layout(self) -> str:
        """What two caches must have in common. Neither block size nor tensor-parallel degree is part of it."""
        c = self.model.config
        found = (c.num_hidden_layers, self.num_kv_heads, c.head_dim, self.layers[0].dtype, c.hidden_size, c.vocab_size)
        return "/".join(map(str, (*found, self.digest)))

    def table(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.layers[0].device)

    def payload(self, blocks: Sequence[int], layer: int, first: int, count: int, head: int,
                heads: int) -> torch.Tensor:  # fmt: skip
        """A rectangle of our cache as bytes; `head` is numbered as in the whole model."""
        found = kv_transfer.gather_kv(self.layers[layer], self.table(blocks), first, count, head - self.head, heads)
        self.stats["bytes_out"] += found.nbytes
        return kv_transfer.as_bytes(found)

    def write(self, blocks: Sequence[int], header: dict[str, Any], payload: torch.Tensor | None) -> bool:
        """A rectangle into our cache; False, and nothing is written, if its bytes are not those that were meant."""
        kv_cache = self.layers[header["layer"]]
        shape = (2, header["count"], header["heads"], kv_cache.shape[4])
        nbytes = kv_cache.element_size() * shape[0] * shape[1] * shape[2] * shape[3]
        if payload is None or payload.nbytes != nbytes or kv_transfer.checksum(payload) != header["crc"]:
            return False
        buffer = payload.to(kv_cache.device).view(kv_cache.dtype).view(shape)
        kv_transfer.scatter_kv(buffer, kv_cache, self.table(blocks), header["first"], header["head"] - self.head)
        self.stats["bytes_in"] += nbytes
        return True


class P2PConnector(KVConnectorBase):
    """From the engine that computed a prompt to the one that will go on with it: the producer's blocks are the buffer,
    the consumer's request waits outside the batch until all of it has arrived. The wire is the subclass's."""

    link_class: ClassVar[type[Link]] = Link
    fetches_later = True
    patience = 0.1  # whoever asks for a prompt that is gone must hear of it, also if nobody else wants anything

    def __init__(self, config: KVTransferConfig) -> None:
        super().__init__(config)
        self.host = config.extra("host", "127.0.0.1")
        self.timeout = config.extra("timeout", 10.0)
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.links: dict[tuple[str, int], Link] = {}  # those that we made, by address
        self.refused: dict[Link, str] = {}  # of these: whose HELLO named another cache than ours
        self.accepted: list[Link] = []
        self.names: dict[str, str] = {}  # transfer: request id, of what we export
        self.wire: Callable[[Link, dict, Any], Iterable[tuple[dict, Any]]] | None = None  # faults, for 08_disagg
        self.in_use: set[str] = set()  # transfers, from the request's arrival to its end on this side
        self.asked: set[str] = set()  # requests that have been, or are being, fetched
        self.server: socket.socket | None = None
        self.reception: handshake.Reception | None = None
        self.key = handshake.secret()
        self.port, self.closed = 0, False
        if config.is_kv_producer:
            try:
                self.server = socket.create_server((self.host, config.kv_port))
            except (OSError, UnicodeError) as error:
                why = getattr(error, "strerror", None) or error
                raise common.InputError(f"kv_port {config.kv_port}: {why}") from None
            self.port = self.server.getsockname()[1]

    @property
    def address(self) -> dict[str, Any]:
        """Where a decode worker finds us: goes into its kv_transfer_params."""
        return {"remote_host": self.host, "remote_port": self.port - self.tp_rank, "tp_size": self.tp_size,
                "remote_engine_id": self.config.engine_id}  # fmt: skip

    # -- the scheduler's half --

    def on_new_request(self, request: Request) -> None:
        """InputError for a transfer_id that is in use, or heads that cannot be shared out."""
        super().on_new_request(request)
        name, ranks = (kv_transfer_params(request).get(key) for key in ("transfer_id", "tp_size"))
        if ranks and ranks % self.num_kv_heads and self.num_kv_heads % ranks:  # some head would be nobody's
            raise common.InputError(f"kv_transfer_params: tp_size {ranks}: cannot share {self.num_kv_heads} KV heads")
        if name in self.in_use or name in self.producer.exports:
            raise common.InputError(f"kv_transfer_params: transfer_id {name!r:.80} is in use")
        self.in_use |= {name} - {None}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """All of the prompt: its last token is computed here again, for what it predicts, but its block is whole."""
        wanted = self.config.is_kv_consumer and kv_transfer_params(request).get("do_remote_prefill")
        if wanted and request.request_id not in self.asked:  # once: whoever was preempted computes it again
            return request.num_prompt_tokens - num_computed_tokens, True
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: list[int], num_external_tokens: int) -> None:
        end = request.num_prompt_tokens
        self.asked.add(request.request_id)
        self.loads.append((request, blocks, end - num_external_tokens, end))

    def saves(self, request: Request) -> bool:
        return self.config.is_kv_producer and bool(kv_transfer_params(request).get("do_remote_decode"))

    def request_finished(self, request: Request, blocks: list[int]) -> bool:
        """A prompt that was computed for somebody keeps its blocks; one that was aborted does not."""
        params = kv_transfer_params(request)
        self.in_use.discard(params.get("transfer_id"))
        if self.saves(request):
            transfer = params["transfer_id"]
            if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
                if self.producer.finish(transfer):
                    return True  # `get_finished` will name it
            else:
                self.producer.forget(transfer, "the prefill was aborted")
            self.names.pop(transfer, None)
        elif params.get("do_remote_prefill") and self.config.is_kv_consumer:
            self.consumer.cancel(request.request_id)
            if request.request_id not in self.asked:  # ended before it was admitted: somebody keeps its prompt for us
                self.loads.append((request, [], 0, 0))
            self.asked.discard(request.request_id)
        return False

    def answer_params(self, request: Request) -> dict[str, Any]:
        transfer = kv_transfer_params(request)["transfer_id"]
        return {"do_remote_prefill": True, "transfer_id": transfer, **self.address}

    def has_pending_work(self) -> bool:
        held = self.producer.exports or self.consumer.imports or self.consumer.cancelled or self.loads
        return bool(held) or not self.inbox.empty() or self.producer.is_late()

    # -- the worker's half --

    def register_kv_caches(self, layers: list[torch.Tensor], model: Any) -> None:
        """Producer, consumer, and the thread that takes calls: from here on there are blocks to move."""
        super().register_kv_caches(layers, model)
        lease, retries = self.config.extra("kv_lease_duration", 30.0), self.config.extra("retries", 1)
        self.producer = Producer(len(layers), self.payload, lease)
        self.consumer = Consumer(len(layers), self.write, self.timeout, retries)
        if self.server:
            self.reception = handshake.Reception(self.server, self.key, self.welcome)

    def welcome(self, sock: socket.socket, address: tuple) -> None:
        """Another engine of ours has called. It asks and says when it has enough: none of that has a payload."""
        hello = {"kind": "HELLO", "layout": self.layout(), "engine_id": self.config.engine_id, "port": 0}
        link = self.link_class(self.inbox, self.wake, sock, timeout=self.timeout, hello=hello, max_payload=0)
        self.accepted.append(link)
        if self.closed:  # in the very moment in which somebody came
            link.close()

    def connect(self, address: tuple[str, int]) -> Link:
        """The link to a producer's rank; no payload of it is larger than a message that we could have asked for."""
        if address not in self.links:
            row = max(kv_cache[:, 0, 0].nbytes for kv_cache in self.layers)  # of one position, all our heads
            self.links[address] = self.link_class(self.inbox, self.wake, address=address, timeout=self.timeout,
                                                  max_payload=Producer.PIECE * row)  # fmt: skip
        return self.links[address]

    def start_load_kv(self) -> None:
        """Offer what this step finishes, ask every rank that has a piece of what it needs. Does not wait."""
        for request in self.meta.preempted:
            if self.saves(request):
                self.producer.preempted(kv_transfer_params(request)["transfer_id"])
        for request, blocks, _ in self.meta.to_save:
            transfer = kv_transfer_params(request)["transfer_id"]
            self.names[transfer] = request.request_id
            self.producer.export(transfer, blocks)
        for request, blocks, first, end in self.meta.to_load:
            params = kv_transfer_params(request)
            tp_size, port = params.get("tp_size", 1), params["remote_port"]
            sources = []
            for piece in kv_transfer.tp_sources(self.num_kv_heads, tp_size, self.tp_size, self.tp_rank):
                readers = kv_transfer.num_consumers(self.num_kv_heads, tp_size, self.tp_size, piece.rank)
                sources.append((self.connect((params["remote_host"], port + piece.rank)), piece, readers))
            self.consumer.start(params["transfer_id"], request.request_id, blocks, first, end, sources)
            for rank in range(tp_size) if self.tp_rank == 0 else ():  # copies of heads that nobody reads from
                if not kv_transfer.num_consumers(self.num_kv_heads, tp_size, self.tp_size, rank):
                    done = {"kind": "DONE", "transfer": params["transfer_id"]}
                    self.connect((params["remote_host"], port + rank)).send(done)
        for link, why in self.refused.items():  # HELLO is said once for all requests
            self.consumer.on_lost(link, why)
        self.poll()

    def save_kv_layer(self, layer: int) -> None:
        """This layer's part of the step is in the blocks: off it goes, while the next layer is computed."""
        for request, _, num_tokens in self.meta.to_save:
            self.producer.written(kv_transfer_params(request)["transfer_id"], layer, num_tokens)
        if self.meta.to_save:
            self.poll()
            self.pump()

    def get_finished(self) -> KVConnectorOutput:
        """Ids of requests sent, received or failed since the last step: the scheduler frees or resumes them."""
        self.poll()
        self.pump()
        self.producer.expire()
        self.consumer.check()
        sent = {self.names.pop(transfer) for transfer in self.producer.released if transfer in self.names}
        over = {*self.consumer.finished, *self.consumer.cancelled}
        output = KVConnectorOutput(sent, over, dict(self.consumer.failed))
        for told in (self.producer.released, self.consumer.finished, self.consumer.cancelled, self.consumer.failed):
            told.clear()
        return output

    def pump(self) -> None:
        self.producer.pump(self.put_on_wire)

    def put_on_wire(self, link: Link, header: dict[str, Any], payload: torch.Tensor) -> None:
        header = {**header, "crc": kv_transfer.checksum(payload)}
        for each in self.wire(link, header, payload) if self.wire else [(header, payload)]:
            link.send(*each)

    def poll(self) -> None:
        """Everything that the network has brought."""
        while True:
            try:
                link, header, payload = self.inbox.get_nowait()
            except queue.Empty:
                return
            kind = header["kind"]
            if kind == "LOST":
                self.consumer.on_lost(link, header["why"])
                self.producer.on_lost(link)
                self.links = {address: other for address, other in self.links.items() if other is not link}
                self.refused.pop(link, None)
                with contextlib.suppress(ValueError):  # it is ours; or lost before _accept() noted it
                    self.accepted.remove(link)
            elif kind == "HELLO":
                if (theirs := header["layout"]) != (ours := self.layout()):
                    self.refused[link] = f"its cache is of another kind: {theirs}, ours is {ours}"
                    self.consumer.on_lost(link, self.refused[link])
            elif kind in ("KV", "GONE"):
                self.consumer.on_message(link, header, payload)
            elif kind == "GET" and not self.has_heads(header["head"], header["heads"]):
                why = f"heads {self.head} to {self.head + self.heads - 1} are here, and no others"
                link.send({"kind": "GONE", "transfer": header["transfer"], "why": why})
            else:
                self.producer.on_message(link, header)

    def has_heads(self, head: int, heads: int) -> bool:
        """The kernel would read beside them, and the checksum would fit."""
        return heads > 0 and self.head <= head and head + heads <= self.head + self.heads

    def close(self) -> None:
        """End the thread and all links."""
        self.closed = True
        if self.reception:
            self.reception.close()
        elif self.server:
            self.server.close()
        for link in (*self.links.values(), *self.accepted):
            link.close()


class TCPConnector(P2PConnector):
    """Between hosts: the payload is part of the message."""


class SharedMemoryConnector(P2PConnector):
    """On one host: the message names the memory."""

    link_class = kv_transfer.SharedMemoryLink


class TorchDistributedConnector(P2PConnector):
    """From tensor to tensor: gloo, or NCCL where the two sides have a GPU each."""

    link_class = kv_transfer.DistributedLink


class StoreConnector(KVConnectorBase):
    """No partner, only a place: full blocks under their hashes (lesson 05), for this engine tomorrow or another today.

    A hit is loaded inside the step that needs it, layer by layer, in front of the model: a thread reads and verifies
    layer i + 1 while layer i is computed. A block that turns out to be unreadable makes the step's result void for
    whoever has it in its table; the scheduler lets them compute it after all, or ends them, by policy.
    """

    needs_hashes = True

    def __init__(self, config: KVTransferConfig) -> None:
        super().__init__(config)
        self.reader = ThreadPoolExecutor(1)
        self.layers_read: list[Future] = []
        self.void: set[int] = set()
        self.staged: dict[str, list[torch.Tensor]] = {}

    def register_kv_caches(self, layers: list[torch.Tensor], model: Any) -> None:
        """Opens the store; its keys begin with layout, block size and rank: others' bytes are no hit."""
        super().register_kv_caches(layers, model)
        self.store = KVStore(self.config.extra("folder", ""), self.config.extra("cpu_bytes", 1 << 30),
                             self.config.extra("disk_bytes", 0), len(layers))  # fmt: skip
        part = f"{self.layout()}/{self.block_size}/{self.tp_size}/{self.tp_rank}"
        self.prefix = hashlib.sha256(part.encode()).hexdigest()[:12]

    def key(self, block_hash: bytes) -> str:
        return f"{self.prefix}-{block_hash.hex()[:40]}"

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Blocks in the store behind the local hit, without a gap. One token is left to compute, for its logits."""
        if not self.config.is_kv_consumer:
            return 0, False
        first, last = num_computed_tokens // self.block_size, (request.num_tokens - 1) // self.block_size
        found = 0
        for block_hash in request.block_hashes[first:last]:
            if self.store.find(self.key(block_hash)) is None:
                break
            found += self.block_size
        return found, False

    def update_state_after_alloc(self, request: Request, blocks: list[int], num_external_tokens: int) -> None:
        end = request.num_computed_tokens
        self.loads.append((request, blocks, end - num_external_tokens, end))

    def saves(self, request: Request) -> bool:
        return self.config.is_kv_producer

    def start_load_kv(self) -> None:
        """Start reading all layers of all hits; layer 0 first."""
        wanted = []  # (path, block)
        for request, blocks, first, end in self.meta.to_load:
            for i in range(first // self.block_size, end // self.block_size):
                wanted.append((self.store.find(self.key(request.block_hashes[i])), blocks[i]))
        read = functools.partial(self._read_layer, wanted)
        self.layers_read = [self.reader.submit(read, layer) for layer in range(len(self.layers) if wanted else 0)]

    def _read_layer(self, wanted: list[tuple[Path | None, int]], layer: int) -> list[tuple[int, torch.Tensor | None]]:
        found: list[tuple[int, torch.Tensor | None]] = []
        for path, block in wanted:
            payload = None
            if path is not None:  # else evicted since it was found
                try:
                    payload = self.store.read_layer(path, layer)
                    if payload.nbytes != self.layers[layer][:, 0].nbytes:
                        raise ValueError(f"{path.name}: layer {layer} has {payload.nbytes} bytes")
                except (OSError, ValueError):  # evicted meanwhile, cut short, changed
                    self.store.discard(path)
                    payload = None
            found.append((block, payload))
        return found

    def wait_for_layer_load(self, layer: int) -> None:
        """Scatter a layer that was read ahead; a block that cannot be read is `void` and is computed again."""
        if not self.layers_read:
            return
        kv_cache = self.layers[layer]
        shape = (2, self.block_size, *kv_cache.shape[3:])
        for block, payload in self.layers_read[layer].result():
            if payload is None:
                self.void.add(block)
                continue
            buffer = payload.to(kv_cache.device).view(kv_cache.dtype).view(shape)
            kv_transfer.scatter_kv(buffer, kv_cache, self.table([block]), 0, 0)
            self.stats["bytes_in"] += buffer.nbytes

    def save_kv_layer(self, layer: int) -> None:
        """Copy the blocks that this step has filled."""
        for request, blocks, num_tokens in self.meta.to_save:
            for i in range(getattr(request, "num_saved_blocks", 0), self._full_blocks(request, num_tokens)):
                key = self.key(request.block_hashes[i])
                if layer == 0 and self.store.find(key) is None:
                    self.staged[key] = []
                if key in self.staged and len(self.staged[key]) == layer:
                    self.staged[key].append(self.payload([blocks[i]], layer, 0, self.block_size, self.head, self.heads))

    def _full_blocks(self, request: Request, num_tokens: int) -> int:
        return min(num_tokens // self.block_size, len(request.block_hashes))

    def wait_for_save(self) -> None:
        """When the step is over, whoever asks finds its blocks; a step with void blocks has nothing to offer."""
        if not self.void:
            for key, layers in self.staged.items():
                self.store.put(key, layers)
            for request, _, num_tokens in self.meta.to_save:
                request.num_saved_blocks = self._full_blocks(request, num_tokens)
        self.staged, self.layers_read = {}, []

    def get_finished(self) -> KVConnectorOutput:
        void, self.void = self.void, set()
        self.stats["void_blocks"] += len(void)
        return KVConnectorOutput(invalid_block_ids=void)

    def close(self) -> None:
        self.reader.shutdown(wait=False)


CONNECTORS: dict[str, type[KVConnectorBase]] = {
    kind.__name__: kind for kind in (SharedMemoryConnector, TCPConnector, TorchDistributedConnector, StoreConnector)
}
