"""Messages to tokens, for a task that returns messages: by the chat template of the model's folder, else by ChatML."""
import functools
import json
import re
from contextlib import suppress
from datetime import datetime
from typing import Any, Callable

from plumbing.files import require
from plumbing.task_file import check_pieces

SYSTEM, *DUMMIES = [{"role": role, "content": "?"} for role in ("system", "user", "assistant", "user")]


def prompt_tokens(tokenizer: Any, found: Any) -> list[int]:
    """The tokens of what a task's `prompt` returned: messages; text; or a tuple of pieces, the first, third, ... of
    which are the task's own words, the others foreign text, such as a question from a data file. A control token in
    these, such as <|im_end|>, is encoded as plain characters."""
    if isinstance(found, list):
        return chat_tokens(tokenizer, found)
    return tokenizer.start + tokenizer.encode(*check_pieces(found, "prompt"))


def chat_tokens(tokenizer: Any, messages: list[dict]) -> list[int]:
    """The tokens of messages, such as {"role": "user", "content": text}, up to where the model's begins. ValueError for
    anything else, an assistant's at the end, and text with a special token, which could end its message."""
    texts = [x for m in messages if isinstance(m, dict) and m.keys() == {"role", "content"} for x in m.values()]
    require(messages and len(texts) == 2 * len(messages) and all(isinstance(text, str) for text in texts),
            f"the task's messages must each be a role and a content, both text, not {messages!r:.50}")
    require(messages[-1]["role"] != "assistant", "the last of the task's messages must not be the assistant's")
    for text in texts:
        if found := tokenizer.names.search(text):
            raise ValueError(f"the task's message {text!r:.50} contains {found[0]}, a special token: take it out")
    if tokenizer.chat and not tokenizer.template:
        return tokenizer.start + tokenizer.encode(chatml(messages))
    return tokenizer.encode(rendered(tokenizer, messages))  # a template writes what begins a prompt itself


def chatml(messages: list[dict], generate: bool = True) -> str:
    """ChatML without a system message but those given."""
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join(turns) + "<|im_start|>assistant\n" * generate


def rendered(tokenizer: Any, messages: list[dict]) -> str:
    """What the folder's template makes of messages. The date is always the same, so that a resumed run reads the same.
    As in transformers, but for the date. ValueError where there is no template or no Jinja, or the template fails."""
    require(tokenizer.template,
            "the task returns messages, but the model's folder has no chat template: take a chat model")
    compiled = compiler()
    try:
        return compiled(tokenizer.template).render(tokenizer.named | {
            "messages": messages, "tools": None, "documents": None, "add_generation_prompt": True})
    except Exception as error:  # a template is a program, and may raise anything
        raise ValueError("the chat template of the model's folder refuses the task's messages: "
                         f"{' '.join(str(error).split())}") from None


@functools.cache
def compiler() -> Callable[[str], Any]:
    """Jinja's compiler of templates, as transformers sets it up. Each is compiled once. ValueError without Jinja."""
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("the chat template of the model's folder needs Jinja: pip install jinja2") from None

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": refuse, "strftime_now": datetime(2024, 7, 26).strftime}
    # {% generation %} marks what a trainer may read of the assistant: here it is a scope like any other.
    scoped = functools.partial(re.sub, r"(\{%[-+]?\s*(?:end)?)generation\b", r"\1with")
    return functools.cache(lambda template: environment.from_string(scoped(template)))


def example(tokenizer: Any) -> str:
    """What the folder's template makes of three messages, behind a system message if it wants one; "" if it can't."""
    if tokenizer.template:
        compiler()  # says so where Jinja is missing
    for messages in (DUMMIES, [SYSTEM, *DUMMIES]):
        with suppress(ValueError):
            return rendered(tokenizer, messages)
    return ""
