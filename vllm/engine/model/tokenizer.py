"""Text to token ids and back, and chats by the folder's own template.

Owns the `tokenizers` backend of one folder; engines, servers and scripts call it. It never knows a model. vLLM:
`vllm/tokenizers/`.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.model import folders
from engine.model.chat_template import compiled, read_chat_templates
from engine.model.folders import read_json

LONG = 4096  # characters or tokens that take a millisecond


class Tokenizer:
    """Text to token ids and back, from a folder's `tokenizer.json`; chat messages by the folder's own template."""

    def __init__(self, folder: Path) -> None:
        import tokenizers

        if not (folder / "tokenizer.json").is_file():
            raise common.InputError(f"{folder}: tokenizer.json is missing (only fast tokenizers are supported)")
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the Rust parser raises nothing more specific
            raise common.InputError(f"{folder / 'tokenizer.json'}: {error}") from None
        self.backend.no_truncation()  # a file may ask for both: that was for training
        self.backend.no_padding()
        self.vocab_size: float = math.inf  # the model's, which may have fewer tokens
        self.config = _read_if_there(folder / "tokenizer_config.json")
        self.special_tokens = special_tokens(folder)  # bos_token, eos_token, …: a template may know them
        self.backend.encode_special_tokens = self.config.get("split_special_tokens") is True
        try:
            self.backend.add_tokens(_more_tokens(self.config, self.special_tokens, self.backend))
        except (TypeError, ValueError, AttributeError) as error:
            raise common.InputError(f"{folder / 'tokenizer_config.json'}: a token is not readable ({error})") from None
        self.chat_template = read_chat_templates(folder, self.config)

    def encode(self, text: str, add_special_tokens: bool = True, max_length: int | None = None) -> list[int]:
        """Token ids; `add_special_tokens` adds what the tokenizer puts around every text (SmolLM2: nothing).

        Of more than `max_length` the first ones of the text go, and what was put around it stays. Raises InputError
        for a token that the model does not have.
        """
        if len(text) > LONG:  # `encode` lets no other thread run Python meanwhile, `encode_batch` does
            (encoding,) = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        else:
            encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
        ids = encoding.ids
        if (largest := max(ids, default=0)) >= self.vocab_size:
            raise common.InputError(f"token id {largest} of the tokenizer: the model has {self.vocab_size} tokens")
        if max_length is None or len(ids) <= max_length:
            return ids
        of_text = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
        gone = set(of_text[: len(ids) - max_length])
        kept = [token for i, token in enumerate(ids) if i not in gone]
        return kept[len(kept) - max_length :]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are not valid UTF-8 become U+FFFD."""
        if len(token_ids) > LONG:
            return self.backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def chat(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Render `messages` ({"role", "content"} each) with the model's chat template and encode the result."""
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)

    def ask(self, question: str) -> list[int]:
        """A question as the model expects it: by its chat template, or as it is where there is none."""
        return self.converse([{"role": "user", "content": question}])

    def converse(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """A chat as the model expects it: by its template, or line by line where there is none.

        A template may refuse a system's message, as Gemma's and Mistral's first ones do: it begins the question then.
        """
        if not self.chat_template:
            return self.encode("\n".join(message["content"] for message in messages))
        try:
            return self.chat(messages)
        except common.InputError:
            if messages[0]["role"] != "system":
                raise
            system, question, *rest = messages
            return self.chat([question | {"content": f"{system['content']}\n\n{question['content']}"}, *rest])

    def render_chat(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a chat. `variables` are what else a template may know: tools, switches.

        Raises InputError if there is no template or if it refuses the messages.
        """
        template = self.get_chat_template(variables.get("tools"))
        known = {"tools": None, "documents": None, **self.special_tokens, **variables}
        try:
            messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
            return compiled(template).render(
                {**known, "messages": messages, "add_generation_prompt": add_generation_prompt}
            )
        except Exception as error:  # the template is a stranger's code, and the variables are a client's
            raise common.InputError(f"chat template: {error}") from None

    def get_chat_template(self, tools: Any = None) -> str:
        """The template of a chat with these tools: of several, "tool_use" if there are any, otherwise "default".

        Raises InputError if there is none.
        """
        if not self.chat_template:
            raise common.InputError("this model has no chat template")
        if isinstance(self.chat_template, str):
            return self.chat_template
        name = "tool_use" if tools is not None and "tool_use" in self.chat_template else "default"
        if name not in self.chat_template:
            raise common.InputError(
                f"chat template: this model has {', '.join(sorted(self.chat_template))}, and no default"
            )
        return self.chat_template[name]


def read_tokenizer(path_or_id: str | None, model: str | None) -> Tokenizer:
    """That of `--tokenizer`, or else that of `--model`. Raises InputError."""
    own = path_or_id is None
    return Tokenizer(folders.model_folder(model) if own else folders.model_folder(path_or_id, "--tokenizer"))


CLASS_TOKENS = {  # what tokenizers of these classes have without saying so
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
}


def special_tokens(folder: Path) -> dict[str, str]:
    """Texts of a tokenizer's bos_token, eos_token, … Raises InputError for a file that is not readable.

    `special_tokens_map.json` is an older file. As in Transformers it comes first, until the newer one lists all tokens
    that were added.
    """
    config = _read_if_there(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config = config | _read_if_there(folder / "special_tokens_map.json")
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
    by_class = CLASS_TOKENS.get(str(config.get("tokenizer_class")).removesuffix("Fast"), {})
    # A null is a token that there is not, whatever the class has.
    return {k: v for k, v in (by_class | texts).items() if isinstance(v, str)}


def _more_tokens(config: dict[str, Any], named: dict[str, str], backend: Any) -> list[Any]:
    """Tokens that `tokenizer_config.json` knows better than `tokenizer.json`: new ones, and what became special."""
    from tokenizers import AddedToken

    def token(given: str | dict[str, Any]) -> Any:
        if isinstance(given, str):
            return AddedToken(given, special=True)
        return AddedToken(**{key: value for key, value in given.items() if key != "__type"})

    listed = config.get("added_tokens_decoder") or {}
    more = [token(listed[token_id]) for token_id in sorted(listed, key=int)]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = extra.values() if isinstance(extra, dict) else extra
    known = {str(each) for each in [*backend.get_added_tokens_decoder().values(), *more]}
    return more + [each for each in map(token, [*named.values(), *extra]) if str(each) not in known]


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
