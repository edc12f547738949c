"""How a request wants its conversation rendered."""

from __future__ import annotations

from octavo.errors import RequestError
from octavo.server.conversation import TemplateOptions
from octavo.server.openai.protocol import ChatBody, TokenizeBody
from octavo.server.service import Service


def template_options(body: ChatBody | TokenizeBody, service: Service) -> TemplateOptions:
    """Raises RequestError for what excludes itself or is not allowed."""
    if body.chat_template is not None and not service.options.trust_request_chat_template:
        raise RequestError(
            "this server takes no chat_template from requests (--trust-request-chat-template)", field="chat_template"
        )
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other", field="continue_final_message"
        )
    documents = getattr(body, "documents", None)
    return TemplateOptions(
        documents=documents or None,
        add_generation_prompt=not continues and body.add_generation_prompt is not False,
        continue_final_message=continues,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        add_special_tokens=bool(body.add_special_tokens),
    )
