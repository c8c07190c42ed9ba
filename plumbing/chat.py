"""Messages to tokens, for a task that returns messages: by ChatML, or by the chat template of the model's folder.

A message is {"role": "user", "content": text}. Its content is foreign text: a control token in it stays characters.
"""
import json
import re
from datetime import datetime
from typing import Any

MARK = "\ufdd0"  # stands on both sides of a message's number while a template is rendered; no text has it
DUMMIES = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


def chat_tokens(tokenizer: Any, messages: list[dict], reply: bool) -> list[int]:
    """The tokens that the model reads before its own turn; reply: after a turn of its own, else from the start.

    History is never rendered again: a reply is what the template writes behind the end token of some earlier turn.
    """
    if not messages or not all(isinstance(m, dict) and isinstance(m.get("role"), str)
                               and isinstance(m.get("content"), str) for m in messages):
        raise ValueError(f"the task's messages must each have a role and a content, both text, not {messages!r:.50}")
    messages = DUMMIES * reply + messages
    marked = [m | {"content": f"{MARK}{i}{MARK}"} for i, m in enumerate(messages)]
    text = chatml(marked) if tokenizer.chat else rendered(tokenizer, marked)
    if reply:
        ends = "|".join(re.escape(tokenizer.library.id_to_token(token)) for token in tokenizer.end_tokens)
        _, *found = re.split(ends, text.partition(f"{MARK}1{MARK}")[2], maxsplit=1)
        if not found:
            raise ValueError("this model's chat template writes no end token after a turn: take another model")
        text = found[0]
    pieces = re.split(f"{MARK}([0-9]+){MARK}", text)
    tokens = tokenizer.encode(*(messages[int(x)]["content"] if i % 2 else x for i, x in enumerate(pieces)))
    return tokenizer.start + tokens if tokenizer.chat and not reply else tokens  # another template writes these itself


def chatml(messages: list[dict]) -> str:
    """ChatML without a system message but those given."""
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def rendered(tokenizer: Any, messages: list[dict]) -> str:
    """What the folder's template makes of messages. The date is always the same, so that a resumed run reads the same.

    As in transformers, but for the date. ValueError where there is no template or no Jinja, or the template refuses.
    """
    if not tokenizer.template:
        raise ValueError("the task returns messages, but the model's folder has no chat template: take a chat model")
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("the chat template of the model's folder needs Jinja: pip install jinja2") from None

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda x, **options: json.dumps(x, **{"ensure_ascii": False} | options)
    environment.globals |= {"raise_exception": refuse, "strftime_now": datetime(2024, 7, 26).strftime}
    try:
        return environment.from_string(tokenizer.template).render(
            messages=messages, add_generation_prompt=True, **tokenizer.named)
    except TemplateError as error:
        raise ValueError(f"the chat template of the model's folder refuses the task's messages: {error}") from None
