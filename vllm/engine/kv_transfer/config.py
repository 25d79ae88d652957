"""`--kv-transfer-config`: which connector, on which side of it, and what it needs to know.

Owns the keys and refuses what contradicts itself; read by connectors and by the command line. It never opens a port.
vLLM: `vllm/config/kv_transfer.py`.
"""

from __future__ import annotations

import common

import dataclasses
import json
import secrets
from dataclasses import dataclass, field
from typing import Any, ClassVar


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

    CONNECTORS: ClassVar = ("SharedMemoryConnector", "TCPConnector", "TorchDistributedConnector", "StoreConnector")
    ROLES: ClassVar = ("kv_producer", "kv_consumer", "kv_both")
    EXTRA: ClassVar = {
        "host": str,
        "kv_lease_duration": float,
        "timeout": float,
        "retries": int,
        "folder": str,
        "cpu_bytes": int,
        "disk_bytes": int,
    }

    def __post_init__(self) -> None:
        self.engine_id = self.engine_id or secrets.token_hex(4)
        if self.kv_load_failure_policy is None:
            self.kv_load_failure_policy = "recompute" if self.kv_connector == "StoreConnector" else "fail"
        allowed = {
            "kv_connector": self.CONNECTORS,
            "kv_role": self.ROLES,
            "kv_load_failure_policy": ("fail", "recompute"),
        }
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
        if self.kv_connector == "StoreConnector" and not self.extra("folder", "") and not self.is_private:
            raise common.InputError("kv_connector_extra_config: StoreConnector needs a folder, or cpu_bytes alone")

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

    @property
    def is_private(self) -> bool:
        """Is it a store in this engine's memory, and nobody else's?"""
        return self.kv_connector == "StoreConnector" and self.kv_connector_extra_config.keys() == {"cpu_bytes"}

    def port_of(self, rank: int) -> int:
        """Where the r-th rank of all engines listens. Whoever only fetches listens nowhere; 0 is any port."""
        return self.kv_port + rank if self.kv_port and self.is_kv_producer else self.kv_port

    @property
    def is_kv_producer(self) -> bool:
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        return self.kv_role in ("kv_consumer", "kv_both")
