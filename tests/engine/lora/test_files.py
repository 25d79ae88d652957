"""What is read of an adapter's folder."""

from __future__ import annotations

from engine.lora import files


def test_a_config_that_has_been_read_is_not_read_again(tmp_path):
    """The file may have changed meanwhile, and the digest is of what was read first."""
    path = tmp_path / "adapter_config.json"
    path.write_text('{"r": 4, "lora_alpha": 8}')
    assert files.read_config(tmp_path, content=b'{"r": 2, "lora_alpha": 8}') == (2, 4.0)
    assert files.read_config(tmp_path) == (4, 2.0)
