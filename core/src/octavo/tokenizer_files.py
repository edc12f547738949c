"""The tokenizer files of a model folder, or of a repository of the hub.

tokenizer.json is read by `tokenizers` directly, and it alone says whether BOS and EOS are added: flags such as
add_bos_token in tokenizer_config.json are for building one, as in Transformers. Everything else (sentencepiece
models, vocab.json, tokenizers with their own code) goes through Transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from octavo.errors import CheckpointError, ConfigError, ModelNotFoundError
from octavo.gguf_tokenizer import read_gguf_tokenizer
from octavo.tokenizer_backends import FastBackend, SlowBackend, TokenizerParts

SLOW_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.tiktoken",
)
"""Files that Transformers can build a tokenizer from when there is no tokenizer.json."""

SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "config.json")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_folder(folder: Path, *, trust_remote_code: bool = False) -> TokenizerParts:
    """Read the tokenizer of a model folder. Raises ModelNotFoundError naming the files looked for."""
    settings = read_json(folder / "tokenizer_config.json")
    templates = read_templates(folder, settings)
    described = settings.get("response_template")
    response_template = described if isinstance(described, dict) else None
    if (folder / "tokenizer.json").is_file():
        return replace(_fast(folder, settings, templates), response_template=response_template)
    if any(path.is_file() for pattern in SLOW_FILES for path in folder.glob(pattern)) or (
        trust_remote_code and "auto_map" in settings
    ):
        parts = _through_transformers(folder, templates, trust_remote_code=trust_remote_code)
        return replace(parts, response_template=response_template)
    gguf_files = sorted(folder.glob("*.gguf"))
    if len(gguf_files) == 1:
        return read_gguf_tokenizer(gguf_files[0])
    looked_for = ", ".join(["tokenizer.json", *SLOW_FILES, "one .gguf file"])
    raise ModelNotFoundError(
        f"no tokenizer in {folder}: looked for {looked_for}. Name another with --tokenizer, or serve token ids only "
        "with --skip-tokenizer-init"
    )


def fetch_tokenizer_files(repository: str, *, revision: str | None, trust_remote_code: bool) -> Path:
    """Download the small files of a hub repository (or find them in the cache) and return their folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["tokenizer.json", *SLOW_FILES, *SETTINGS_FILES, *TEMPLATE_FILES]
    if trust_remote_code:
        wanted.append("*.py")
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=wanted))
    except HFValidationError as error:
        raise ModelNotFoundError(f"no such file or folder, and not the name of a repository: {repository}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(
            f"no file or folder {repository}, and the hub does not give a repository of that name: {error}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no such file. Raises CheckpointError if it is not one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"cannot be read: {error}", path=str(path)) from error
    if not isinstance(value, dict):
        raise CheckpointError("does not hold a JSON object", path=str(path))
    return value


def read_template(value: str) -> str:
    """The source of `--chat-template`: the text of a file, or the value itself if it is Jinja."""
    if "{%" in value or "{{" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template {value!r} is neither a readable file nor a Jinja template") from error


def read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files of their own win over tokenizer_config.json, as in Transformers."""
    templates: dict[str, str] = {}
    for value in (read_json(folder / "chat_template.json").get("chat_template"), settings.get("chat_template")):
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, list):
            templates |= {entry["name"]: entry["template"] for entry in value}
    files = [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))]
    for path in files:
        if path.is_file():
            name = "default" if path.name == "chat_template.jinja" else path.stem
            templates[name] = path.read_text(encoding="utf-8")
    return templates


def _fast(folder: Path, settings: Mapping[str, Any], templates: Mapping[str, str]) -> TokenizerParts:
    path = folder / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for every fault of the file
        raise CheckpointError(f"is not a tokenizer: {error}", path=str(path)) from error
    roles = _roles(read_json(folder / "special_tokens_map.json")) | _roles(settings)
    _mark_special(tokenizer, roles, settings)
    return TokenizerParts(backend=FastBackend(tokenizer), special_tokens=roles, chat_templates=templates)


def _roles(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role; each is a string or an object with its content."""
    named = settings.get("extra_special_tokens")
    found = {role: settings.get(role) for role in ROLES} | (dict(named) if isinstance(named, dict) else {})
    contents = {role: t.get("content") if isinstance(t, dict) else t for role, t in found.items()}
    return {role: content for role, content in contents.items() if isinstance(content, str)}


def _mark_special(tokenizer: tokenizers.Tokenizer, roles: Mapping[str, str], settings: Mapping[str, Any]) -> None:
    """Make the tokens special that only tokenizer_config.json calls so, if the vocabulary has them."""
    special = set(roles.values())
    for entry in (settings.get("added_tokens_decoder") or {}).values():
        if entry.get("special"):
            special.add(entry["content"])
    have = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    missing = [token for token in sorted(special - have) if tokenizer.token_to_id(token) is not None]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in missing])


def _through_transformers(folder: Path, templates: Mapping[str, str], *, trust_remote_code: bool) -> TokenizerParts:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:  # code of the model's author may run here
        raise CheckpointError(f"Transformers cannot build its tokenizer: {error}", path=str(folder)) from error
    fast = getattr(loaded, "backend_tokenizer", None)
    backend = FastBackend(fast) if isinstance(fast, tokenizers.Tokenizer) else SlowBackend(loaded)
    roles = {role: str(getattr(loaded, role)) for role in ROLES if getattr(loaded, role, None) is not None}
    return TokenizerParts(backend=backend, special_tokens=roles, chat_templates=templates)
