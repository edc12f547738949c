"""Text to token ids and back, for every place a tokenizer can come from. Imports no torch.

`load_tokenizer` reads it, `Tokenizer` is what the rest of Octavo sees. Streaming is in `detokenizer.py`, chat
templates in `chat_template.py`, the files of a model folder in `tokenizer_files.py` and `gguf_tokenizer.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.chat_template import ChatTemplate, compile_template
from octavo.config import ModelConfig
from octavo.detokenizer import Detokenizer
from octavo.errors import ConfigError, ModelNotFoundError, RequestError
from octavo.gguf_tokenizer import read_gguf_tokenizer
from octavo.tokenizer_backends import Backend
from octavo.tokenizer_files import fetch_tokenizer_files, read_folder, read_template
from octavo.weights.locate import locate

logger = logging.getLogger(__name__)


class Tokenizer:
    """Encodes, decodes and renders chats. Safe to use from several threads.

    vocab_size: highest id + 1 (a model's vocabulary may be padded beyond it).
    eos_token_ids: the tokenizer's own end tokens; the model's generation config may name more.
    special_ids: ids that `skip_special_tokens` leaves out. chat_template: None if the model has none.
    special_tokens: text of each role ("bos_token", "eos_token", ...), also the variables of chat templates.
    response_template: how to read the model's answers, if it says so itself.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_templates: Mapping[str, str] | None = None,
        response_template: Mapping[str, Any] | None = None,
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.vocab_size = backend.vocab_size
        self.special_ids = backend.special_ids
        self.bos_token_id = self._role("bos_token")
        eos = self._role("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *eos_token_ids]))
        self.response_template = response_template
        self.chat_template: ChatTemplate | None = None
        if chat_templates:
            self.chat_template = ChatTemplate(chat_templates, special_tokens=self.special_tokens)
        self.adds_bos = self.bos_token_id is not None and (
            backend.encode("", add_special_tokens=True)[:1] == [self.bos_token_id]
        )
        """Whether this tokenizer puts BOS before a text."""
        self._warned_of_bos = False

    def _role(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self._backend.id_of(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; the texts of special tokens in it become those tokens.

        add_special_tokens: add what the model wants around a text (BOS for most, nothing for some). A text that
        already begins with BOS does not get a second one. Raises RequestError for lone surrogates.
        """
        check_unicode(text, "prompt")
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens)
        if add_special_tokens and self.adds_bos and ids[:2] == [self.bos_token_id] * 2:
            if not self._warned_of_bos:
                self._warned_of_bos = True
                logger.warning(
                    "a prompt begins with the BOS token, which the tokenizer adds too: it is used once. "
                    "Leave it out of the prompt, or set add_special_tokens to false"
                )
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids, exactly as a stream of them gives it. Ids that the vocabulary lacks have no text."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; for a special token its text; empty for an id the vocabulary lacks."""
        return self._backend.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """A token for display: U+FFFD where its bytes are no character alone."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def detokenizer(self, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """A stream of text for tokens that follow `prompt_ids`."""
        return self._backend.detokenizer(skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids)

    def use_template(self, chat_template: str) -> None:
        """Render chats with this template (a file or its source) from now on. Raises ConfigError; the old one stays."""
        source = checked_template(chat_template)
        self.chat_template = ChatTemplate({"default": source}, special_tokens=self.special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a chat; see `ChatTemplate.render`. RequestError if the model has no chat template."""
        chat_template = self.chat_template
        if chat_template is None:
            if template is None:
                raise RequestError(
                    "the model has no chat template; start with --chat-template FILE, or use completions",
                    field="messages",
                )
            chat_template = ChatTemplate({}, special_tokens=self.special_tokens)
        return chat_template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template=template,
            template_kwargs=template_kwargs,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of a chat. The template writes all special tokens; `add_special_tokens` adds BOS where the
        tokenizer would and the template did not. BOS never comes twice."""
        text = self.render_chat(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template=template,
            template_kwargs=template_kwargs,
        )
        return self.encode_rendered(text, add_special_tokens=add_special_tokens)

    def encode_rendered(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of what `render_chat` gave, for who needs both the text and the ids."""
        check_unicode(text, "messages")
        ids = self._backend.encode(text, add_special_tokens=False)
        bos = self.bos_token_id
        if bos is None:
            return ids
        if add_special_tokens and self.adds_bos and ids[:1] != [bos]:
            ids.insert(0, bos)
        while ids[:2] == [bos, bos] and self.adds_bos:
            del ids[0]
        return ids


def check_unicode(text: str, field: str) -> None:
    """Raise RequestError if the text holds half a surrogate pair, which no tokenizer can take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{field} is not valid Unicode: a lone surrogate at character {error.start}", field=field
        ) from None


def load_tokenizer(
    source: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
) -> Tokenizer:
    """Load the tokenizer of a model: a folder, a .gguf file, or a repository of the hub (only its small files).

    chat_template: a file or a template's source; it replaces the model's own.
    Raises ModelNotFoundError naming the files looked for, CheckpointError for a file that cannot be read,
    ConfigError for a bad chat_template.
    """
    if not str(source):
        raise ModelNotFoundError("no tokenizer named: give a folder, a .gguf file or a hub repository")
    path = Path(source)
    if not path.exists():
        path = fetch_tokenizer_files(str(source), revision=revision, trust_remote_code=trust_remote_code)
    parts = read_gguf_tokenizer(path) if path.is_file() else read_folder(path, trust_remote_code=trust_remote_code)
    templates: Mapping[str, str] = parts.chat_templates
    if chat_template is not None:
        templates = {"default": checked_template(chat_template)}
    return Tokenizer(
        parts.backend,
        special_tokens=parts.special_tokens,
        eos_token_ids=parts.eos_token_ids,
        chat_templates=templates,
        response_template=parts.response_template,
    )


def checked_template(chat_template: str) -> str:
    """The source of a template given as a file or as its source. Raises ConfigError if it is none."""
    source = read_template(chat_template)
    try:
        compile_template(source)
    except RequestError as error:
        raise ConfigError(f"chat_template: {error}") from error
    return source


def load_tokenizer_for(config: ModelConfig) -> Tokenizer | None:
    """The model's tokenizer, or the one that the config names; None with skip_tokenizer_init."""
    if config.skip_tokenizer_init:
        return None
    source: str | Path = config.tokenizer or locate(
        config.model, revision=config.revision, load_format=config.load_format, code=config.trust_remote_code
    )
    return load_tokenizer(
        source,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template,
    )
