"""mem0 on a real server of ours: it remembers by vectors of ours, and finds what is nearest to a question."""

from __future__ import annotations

import json

import pytest

from lab.running_server import running_server
from support import clients

PROGRAM = """
import json, os
from mem0 import Memory

about = {"model": "smol", "openai_base_url": os.environ["URL"] + "/v1", "api_key": "none"}
memory = Memory.from_config({
    "llm": {"provider": "openai", "config": {**about, "temperature": 0, "max_tokens": 32}},
    "embedder": {"provider": "openai", "config": about},
    "vector_store": {"provider": "qdrant", "config": {"path": "qdrant", "embedding_model_dims": 576}},
    "history_db_path": "history.db",
})
for text in ("A cat sleeps on the sofa.", "Interest rates rose again in March."):
    memory.add(text, user_id="me", infer=False)
found = memory.search("A kitten naps on the couch.", filters={"user_id": "me"}, limit=2)
print(json.dumps([each["memory"] for each in found["results"]]))
"""


@pytest.mark.long
def test_it_remembers_and_finds(tmp_path):
    interpreter = clients.python("mem0ai==2.2.1")
    with running_server("--max-model-len", "1024", "--kv-cache-gib", "0.1", "--served-model-name", "smol") as (url, _):
        about = {"URL": url, "MEM0_TELEMETRY": "False", "MEM0_DIR": str(tmp_path)}
        found = json.loads(clients.script(interpreter, PROGRAM, tmp_path, **about).splitlines()[-1])
    assert found[0] == "A cat sleeps on the sofa."
