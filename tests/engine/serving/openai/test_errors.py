"""Every error in one shape."""

from __future__ import annotations

import common

import pytest

from engine.errors import EngineDeadError
from engine.serving.openai.errors import as_api_error
from support.scripted_api import Letters, P, ask, check_error, serve


def test_errors_name_the_clients_field():
    for said, param in (("prompt_token_ids: token id -1 must be", "prompt"), ("tokens: token id -1 must be", "tokens"),
                        ("lora_name 'x': is loaded already", "lora_name")):  # fmt: skip
        error = as_api_error(common.InputError(said))
        assert error.param == param and str(error).startswith(param)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineDeadError("gone"), 500),
        (common.InputError("prompt: no"), 400),
        (ZeroDivisionError("secret"), 500),
    ],
)
def test_errors_of_the_engine_have_a_status(error, status, capsys):
    heard = ask(serve(Letters([error]))[1], "/v1/completions", P)
    message = check_error(heard, status)["message"]
    assert "secret" not in message and ("secret" in capsys.readouterr().err) == isinstance(error, ZeroDivisionError)
