"""Messages to tokens, for a task that returns messages: by the chat template of the model's folder, else by ChatML.

A message is {"role": "user", "content": text}. Its content is foreign text: a control token in it stays characters.
"""
import functools
import json
import re
from collections import Counter
from datetime import datetime
from typing import Any, Callable, Sequence

from plumbing.files import require

MARK = "73105298461"  # is put behind a turn that is to be found again; digits, because few templates change them
SYSTEM, *DUMMIES = [{"role": role, "content": "?"} for role in ("system", "user", "assistant", "user")]


def chat_tokens(tokenizer: Any, messages: list[dict], before: Sequence[dict] = (), stop: int = -1) -> list[int]:
    """The tokens that the model reads before it writes. An assistant's message at the end it continues.
    before: what the messages reply to. It ends in the model's own turn, whose last token was stop. History is never
    rendered again: only what the template writes behind that turn is returned."""
    texts = [m.get(key) if isinstance(m, dict) else None for m in messages for key in ("role", "content")]
    require(texts and all(isinstance(text, str) for text in texts),
            f"the task's messages must each have a role and a content, both text, not {messages!r:.50}")
    by_hand, mark = tokenizer.chat and not tokenizer.template, MARK
    write = chatml if by_hand else functools.partial(rendered, tokenizer)
    while any(mark in m["content"] for m in (*before, *messages)):
        mark += MARK[-1]
    plain, before, continued = [*before, *messages], marked(before, mark), messages[-1]["role"] == "assistant"
    whole = before + (marked(messages, f"{mark} ") if continued else messages)
    text, real = protected(tokenizer, whole, functools.partial(write, generate=not continued))
    *parts, rest = text.split(mark)
    require(len(parts) >= bool(before) + continued,
            "the chat template of the model's folder leaves out the end of an assistant's message")
    private = re.compile("|".join(map(re.escape, real)))
    if continued:
        restored = private.sub(lambda found: real[found[0]], "".join(parts)).rstrip()
        if len(parts) > 1 + bool(before) or not write(plain, generate=False).startswith(restored):
            raise ValueError("the chat template of the model's folder rewrites the message that is to be continued")
        # As transformers does, which also tells by a space whether the template trims.
        rest = parts.pop() if rest.startswith(" ") else parts.pop().rstrip()
    if not before:
        text = "".join([*parts, rest])
    else:
        text = after_stop(rest, write(before, generate=False).rpartition(mark)[2], tokenizer, stop)
    pieces = re.split(f"({private.pattern})", text)
    tokens = tokenizer.encode(*(real.get(piece, piece) for piece in pieces))
    return tokenizer.start + tokens if by_hand and not before else tokens  # a template writes these itself


def marked(messages: Sequence[dict], mark: str) -> list[dict]:
    """The messages, the last one's content with a mark behind it."""
    return [*messages[:-1], *(m | {"content": m["content"] + mark} for m in messages[-1:])]


def after_stop(text: str, closing: str, tokenizer: Any, stop: int) -> str:
    """What is left of a text behind the model's turn, which the token stop ended. closing: what it would be if nobody
    had replied. Another stop token than the template's, or that of another role, replaces nothing of the text."""
    name = tokenizer.library.id_to_token(stop)
    gap, found, rest = text.partition(name)
    text = rest if found and (name in closing or not gap.strip()) else text
    return text.lstrip() if tokenizer.special[name].rstrip else text


def protected(tokenizer: Any, messages: list[dict], write: Callable) -> tuple[str, dict[str, str]]:
    """What a template writes, in which private characters stand for some of the foreign ones; and the real ones. The
    real content may hold a control token. So its first character is replaced, or, where the template joins one from
    several places, each character that could begin or end one. But first comes the text that hides least."""
    edges = sorted({edge for name in tokenizer.special for edge in (name[0], name[-1])})
    taken = json.dumps([tokenizer.template, messages], ensure_ascii=False, default=str)
    forms = ((c, f"\\u{ord(c):04x}") for c in map(chr, range(0xE000, 0x110000)))  # the second one in JSON
    free = [next(pair for pair in forms if not any(form in taken for form in pair)) for _ in edges]
    private = {edge: c for edge, (c, _) in zip(edges, free)}

    def hidden(pattern: str) -> str:
        return write(replaced(messages, lambda text: re.sub(pattern, lambda found: private[found[0]], text)))

    text, surest, written = write(messages), hidden("|".join(map(re.escape, edges))), tokenizer.names.findall
    if foreign := Counter(written(text)) - Counter(written(surest)):  # surest has the template's own alone
        text = hidden("|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in foreign))
    return (text if written(text) == written(surest) else surest,
            {form: edge for edge, pair in zip(edges, free) for form in pair})


def replaced(value: Any, change: Callable[[str], str]) -> Any:
    """Messages, or a part of one, with a change to all texts but the roles."""
    if isinstance(value, dict):
        return {key: x if key == "role" else replaced(x, change) for key, x in value.items()}
    if isinstance(value, list):
        return [replaced(x, change) for x in value]
    return change(value) if isinstance(value, str) else value


def chatml(messages: list[dict], generate: bool = True) -> str:
    """ChatML without a system message but those given."""
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join(turns) + "<|im_start|>assistant\n" * generate


def rendered(tokenizer: Any, messages: list[dict], generate: bool = True) -> str:
    """What the folder's template makes of messages. The date is always the same, so that a resumed run reads the same.
    As in transformers, but for the date. ValueError where there is no template or no Jinja, or the template fails."""
    if not tokenizer.template:
        raise ValueError("the task returns messages, but the model's folder has no chat template: take a chat model")
    compiled, messages = compiler(), [{key: x for key, x in m.items() if x is not None} for m in messages]
    try:
        return compiled(tokenizer.template).render(tokenizer.named | {
            "messages": messages, "tools": None, "documents": None, "add_generation_prompt": generate})
    except Exception as error:  # a template is a program, and may raise anything
        raise ValueError("the chat template of the model's folder refuses the task's messages: "
                         f"{' '.join(str(error).split())}") from None


@functools.cache
def compiler() -> Callable:
    """Jinja's compiler of templates, as transformers sets it up. Each is compiled once. ValueError without Jinja."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("the chat template of the model's folder needs Jinja: pip install jinja2") from None

    class Generation(Extension):
        """{% generation %}, which marks what the assistant wrote: it is written as it stands."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Scope:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True), lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(x: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=["jinja2.ext.loopcontrols", Generation])
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": refuse, "strftime_now": datetime(2024, 7, 26).strftime}
    return functools.cache(environment.from_string)


def example(tokenizer: Any) -> str:
    """What the folder's template makes of three messages, behind a system message if it wants one; "" if it can't."""
    if tokenizer.template:
        compiler()  # says so where Jinja is missing
    for messages in (DUMMIES, [SYSTEM, *DUMMIES]):
        try:
            return rendered(tokenizer, messages)
        except ValueError:
            continue
    return ""
