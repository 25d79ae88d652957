"""What the API server is started with, beside its engine: who may ask, over what, and how much; and what it says.

Owns these choices; read by `run_server` and by the application, made by `serve` from its flags. They never change what
an engine computes.
vLLM: `FrontendArgs` in `vllm/entrypoints/common/cli_args.py`, `AsyncEngineArgs` in `vllm/engine/arg_utils.py`.
"""

from __future__ import annotations

import common

import ssl
from dataclasses import dataclass, field

from engine.choices import LOG_LEVELS
from engine.config import whole
from engine.serving.openai.limits import MAX_BODY_BYTES


@dataclass
class FrontendArgs:
    """vLLM's names, except for `max_body_bytes`: vLLM reads bodies of any size. Raises InputError."""

    uvicorn_log_level: str = "info"
    disable_uvicorn_access_log: bool = False
    disable_log_stats: bool = False  # no line every ten seconds and, as in vLLM, none of its own metrics
    enable_log_requests: bool = False
    enable_request_id_headers: bool = False
    enable_prompt_tokens_details: bool = True  # OpenAI always says them; vLLM if it is asked to
    enable_force_include_usage: bool = False
    enable_server_load_tracking: bool = False
    stream_interval: int = 1  # tokens in a piece of a stream
    uds: str | None = None  # a socket in the file system, in place of host and port
    max_body_bytes: int = MAX_BODY_BYTES
    root_path: str = ""  # what a proxy in front of us cuts off, or leaves on
    disable_fastapi_docs: bool = False
    allowed_origins: list[str] = field(default_factory=lambda: ["*"])
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    allow_credentials: bool = False
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0  # of clients: 0 none, 1 if they have one, 2 always
    ssl_ciphers: str | None = None

    def __post_init__(self) -> None:
        if self.uvicorn_log_level not in LOG_LEVELS:
            allowed = ", ".join(LOG_LEVELS)
            raise common.InputError(f"uvicorn_log_level {self.uvicorn_log_level!r}: must be one of {allowed}")
        if type(self.stream_interval) is not int or self.stream_interval < 1:
            raise common.InputError(f"stream_interval {self.stream_interval!r}: must be a whole number of at least 1")
        for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
            value = getattr(self, name)
            if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
                flag = f"--{name.replace('_', '-')}"
                raise common.InputError(f"{flag} {value!r:.60}: must be a JSON list of texts, as in '[\"*\"]'")
        if self.root_path:
            self.root_path = f"/{self.root_path.strip('/')}".rstrip("/")
        whole("max_body_bytes", self.max_body_bytes, 1 << 10, 1 << 40)
        self._check_tls()

    def _check_tls(self) -> None:
        """A wrong file is found now, before a model is loaded."""
        if self.ssl_certfile is None:
            others = ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers")
            if wrong := [name for name in others if getattr(self, name)]:
                raise common.InputError(f"--{wrong[0].replace('_', '-')}: needs --ssl-certfile")
            return
        context, name, value = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "--ssl-certfile", self.ssl_certfile
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
            if self.ssl_ca_certs:
                name, value = "--ssl-ca-certs", self.ssl_ca_certs
                context.load_verify_locations(self.ssl_ca_certs)
            if self.ssl_ciphers:
                name, value = "--ssl-ciphers", self.ssl_ciphers
                context.set_ciphers(self.ssl_ciphers)
        except (OSError, ssl.SSLError) as error:
            key = f" with --ssl-keyfile {self.ssl_keyfile}" if name == "--ssl-certfile" and self.ssl_keyfile else ""
            raise common.InputError(f"{name} {value}{key}: {error.strerror or error}") from None

    def tls(self) -> dict[str, object]:
        """For uvicorn."""
        if self.ssl_certfile is None:
            return {}
        return {
            "ssl_certfile": self.ssl_certfile,
            "ssl_keyfile": self.ssl_keyfile,
            "ssl_ca_certs": self.ssl_ca_certs,
            "ssl_cert_reqs": self.ssl_cert_reqs,
            "ssl_ciphers": self.ssl_ciphers or "TLSv1",  # uvicorn's default
        }

    @property
    def scheme(self) -> str:
        return "https" if self.ssl_certfile else "http"
