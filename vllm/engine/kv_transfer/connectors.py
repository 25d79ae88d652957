"""All connectors, by the names that `--kv-transfer-config` knows.

Owns the table; whoever makes an engine asks it. It never looks into a connector.
vLLM: `vllm/distributed/kv_transfer/kv_connector/factory.py`.
"""

from __future__ import annotations

from engine.kv_transfer.base import KVConnectorBase
from engine.kv_transfer.config import KVTransferConfig
from engine.kv_transfer.p2p import SharedMemoryConnector, TCPConnector, TorchDistributedConnector
from engine.kv_transfer.store_connector import StoreConnector

CONNECTORS: dict[str, type[KVConnectorBase]] = {
    kind.__name__: kind for kind in (SharedMemoryConnector, TCPConnector, TorchDistributedConnector, StoreConnector)
}


def make_connector(config: KVTransferConfig) -> KVConnectorBase:
    """The connector that a configuration names."""
    assert config.kv_connector, "a configuration without one is refused"
    return CONNECTORS[config.kv_connector](config)
