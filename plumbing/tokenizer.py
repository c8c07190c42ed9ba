"""A byte-level tokenizer.json: text to tokens, and tokens back to text with the span of each. (The tokenizers library
gives offsets for text that it encodes, but not for tokens that it decodes.)
"""
import codecs
import os
import re
from pathlib import Path
from typing import Iterable, Sequence

import tokenizers
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel

from plumbing.chat import DUMMIES, chatml, example
from plumbing.files import read_json, require

END_TOKENS = ("<|im_end|>", "<|endoftext|>")  # each ends a response, and so does what these files name:
NAMED_IN = {"tokenizer_config.json": "eos_token", "special_tokens_map.json": "eos_token",
            "generation_config.json": "eos_token_id", "config.json": "eos_token_id"}
CHATML = "<|im_start|>"
UNKNOWN = "\ufffd".encode()


class Tokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, folder: str | Path):
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: save_pretrained of transformers' AutoTokenizer can write it")
        try:
            self.library = library = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8-sig"))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"{file} is not a tokenizer: {error}") from None
        library.no_truncation()
        library.no_padding()
        if getattr(library.model, "dropout", None):  # of BPE: the same text would be other tokens each time
            print(f"{file} has a dropout of {library.model.dropout:g} for training a tokenizer: it is off")
            library.model.dropout = None
        settings = read_settings(file.parent)
        add_listed_tokens(file.parent, settings, library)
        # Beyond the highest id, which may exceed the number of tokens, a model's vocabulary may be padded.
        self.size = max(library.get_vocab().values(), default=-1) + 1
        self.template = template = settings["chat_template"]
        self.named = named_tokens(settings)  # a template's variables
        written = example(self)
        is_chatml = template is None or chatml(DUMMIES, generate=False) in written
        self.chat = library.token_to_id(CHATML) is not None and is_chatml
        self.end_tokens = find_end_tokens(file.parent, library)
        control = [*map(library.id_to_token, self.end_tokens), *[CHATML] * self.chat]
        added = {token.content: token for token in library.get_added_tokens_decoder().values()}
        library.add_special_tokens([added.get(name, name) for name in control])  # not every file marks them as such
        self.bytes, self.added = token_bytes(library, self.size, self.end_tokens), library.get_added_tokens_decoder()
        self.special = {token.content: token for token in self.added.values() if token.special}
        words = [rf"(?<!\w){re.escape(name)}(?!\w)" if token.single_word else re.escape(name)
                 for name, token in sorted(self.special.items(), key=lambda item: -len(item[0]))]
        self.names = re.compile(f"({'|'.join(words)})")
        self.start = first_tokens(settings, library, written, self.chat)
        library.encode_special_tokens = True  # a special token's name stays characters; `encode` finds those meant

    def encode(self, *pieces: str) -> list[int]:
        """The tokens of a text, in which `<|im_start|>` and the like become special tokens. It may be cut in pieces:
        then every second one is somebody's own text, in which they stay characters."""
        parts = [""]  # text, a special token's name, text, ..., text. It stays whole: a cut could change its tokens
        for i, piece in enumerate(pieces):
            first, *others = self.names.split(piece) if i % 2 == 0 else [piece]
            parts[-1] += first
            parts += others
        for i in range(1, len(parts), 2):  # some special tokens include the white space beside them
            if self.special[parts[i]].lstrip:
                parts[i - 1] = parts[i - 1].rstrip()
            if self.special[parts[i]].rstrip:
                parts[i + 1] = parts[i + 1].lstrip()
        return [token for i, part in enumerate(parts)
                for token in ([self.library.token_to_id(part)] if i % 2 else self.encode_text(part))]

    def encode_text(self, text: str) -> list[int]:
        """The tokens of a text without special ones. ValueError where the library, in silence, drops a character."""
        tokens, normalizer = self.library.encode(text, add_special_tokens=False).ids, self.library.normalizer
        kept = b"".join(self.bytes[token] for token in tokens).decode(errors="replace")
        kept, text = (normalizer.normalize_str(t) if normalizer else t for t in (kept, text))
        if any(self.added[token].lstrip or self.added[token].rstrip for token in self.added.keys() & tokens):
            kept, text = "".join(kept.split()), "".join(text.split())
        if kept not in (text, " " + text):  # some tokenizers add a space
            lost = text[len(os.path.commonprefix([kept, text])) :][:1]
            raise ValueError(f"tokenizer.json has no token for {lost!r}, which a prompt has: take another tokenizer")
        return tokens

    def decode(self, tokens: Iterable[int]) -> tuple[str, list[tuple[int, int]]]:
        """The text of the tokens, and the span (start, stop) of each in it; an end token's is empty, after the text.
        Tokens that share a character both have it in their span. Bytes that are not UTF-8 become U+FFFD, and so does a
        token beyond the tokenizer's, which a trainer may sample where a model's vocabulary is padded."""
        parts = [self.bytes[token] if token < self.size else UNKNOWN for token in tokens]
        spans, stop = [], 0
        text, owner = characters(b"".join(parts))
        for part in parts:
            start, stop = stop, stop + len(part)
            spans.append((owner[start], owner[stop - 1] + 1) if part else (len(text), len(text)))
        return text, spans

    def as_code(self, token: int) -> str:
        """A token's text, as Python would write it, as Markdown code."""
        letters = self.bytes[token] or self.library.id_to_token(token).encode()  # an end token has none
        text = repr(letters.decode("utf-8", "backslashreplace"))  # it may be a part of a letter
        fence = "`" + max(re.findall("`+", text), default="")  # which no backquote in it ends
        return f"{fence} {text} {fence}" if len(fence) > 1 else f"`{text}`"


def characters(data: bytes) -> tuple[str, Sequence[int]]:
    """Bytes as text, and the index of each byte's character."""
    if data.isascii():  # as nearly always, and then quick
        return data.decode(), range(len(data))
    decoder, text, owner = codecs.getincrementaldecoder("utf-8")("replace"), "", []
    for byte in data:
        text += decoder.decode(bytes([byte]))
        owner.append(len(text + decoder.getstate()[0].decode(errors="replace")) - 1)  # as if no more came
    return text + decoder.decode(b"", final=True), owner


def token_bytes(library: tokenizers.Tokenizer, size: int, end_tokens: list[int]) -> list[bytes]:
    """The bytes of every token. An end token has none: it is not part of the text."""
    # Byte-level BPE writes a printable byte as the Unicode character of that number, any other as one from 256 up.
    alphabet = sorted(ByteLevel.alphabet())
    letters = dict(zip(alphabet, sorted(range(256), key=lambda byte: chr(byte) not in alphabet)))
    names, added = [library.id_to_token(i) or "" for i in range(size)], library.get_added_tokens_decoder()
    try:
        return [b"" if i in end_tokens else name.encode() if i in added else bytes(letters[c] for c in name)
                for i, name in enumerate(names)]
    except KeyError as error:
        raise ValueError(f"the tokenizer is not a byte-level one: a token contains {error}") from None


def name_of(token: object) -> object:
    """The name of a token, which a file may give as an object with flags."""
    return token.get("content") if isinstance(token, dict) else token


def named_tokens(settings: dict) -> dict[str, str]:
    """The names of special tokens that transformers hands to a template, by what they are for, such as pad_token."""
    extra = settings.get("extra_special_tokens")
    named = {key: name_of(x) for key, x in settings.items() if key.endswith("_token")}
    named |= {key: name_of(x) for key, x in extra.items()} if isinstance(extra, dict) else {}
    return {key: name for key, name in named.items() if isinstance(name, str)}


def read_settings(folder: Path) -> dict:
    """tokenizer_config.json and what transformers reads beside it; ValueError for a setting that is not supported.
    chat_template becomes text, or None where the folder says nothing about its tokenizer."""
    config, jinja = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    settings = read_json(config, missing={})
    if "added_tokens_decoder" not in settings:
        settings |= read_json(folder / "special_tokens_map.json", missing={})
    if asked := [name for name in ("add_prefix_space", "split_special_tokens") if settings.get(name)]:
        raise ValueError(f"{config} sets {asked[0]}, which is not supported: set it to false, or take another model")
    text = jinja.read_text(encoding="utf-8") if jinja.is_file() else settings.get("chat_template")
    if isinstance(text, list):  # several, by their names
        text = {template.get("name"): template.get("template") for template in text}.get("default")
    return settings | {"chat_template": str(text or "") if config.is_file() or jinja.is_file() else None}


def add_listed_tokens(folder: Path, settings: dict, library: tokenizers.Tokenizer) -> None:
    """Add the tokens that only a file beside tokenizer.json lists, and take the flags that it gives to those in both.
    ValueError for one that can't have its number, or is named without one: transformers would give it a new one."""
    listed = settings.get("added_tokens_decoder")
    if listed is None:  # an older file has names alone, and tokenizer.json goes before it
        known = {token.content for token in library.get_added_tokens_decoder().values()}
        older = read_json(folder / "added_tokens.json", missing={})
        listed = {i: {"content": name} for name, i in older.items() if name not in known}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    try:
        tokens = {int(i): AddedToken(**fields) for i, fields in listed.items()}
        library.add_tokens([tokens[i] for i in sorted(tokens)])
        for i, token in tokens.items():
            require(library.token_to_id(token.content) == i, f"{token.content!r} can't be token {i} there")
        for name in map(name_of, (settings.get("bos_token"), *(extra.values() if isinstance(extra, dict) else extra))):
            require(name is None or library.token_to_id(name) is not None, f"it lacks {name!r}")
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"the special tokens that {folder} lists don't fit its tokenizer.json: {error}") from None


def first_tokens(settings: dict, library: tokenizers.Tokenizer, written: str, chat: bool) -> list[int]:
    """What begins every prompt, such as Llama 3's BOS: in a chat what the folder's template wrote there, else what
    tokenizer.json says, or add_bos_token, which version 4 of transformers obeys for Llama's class of tokenizers."""
    bos = name_of(settings.get("bos_token"))
    asked = bool(bos) and bos != CHATML and written.lstrip().startswith(bos)
    if not (chat and written):
        whole = library.encode("a")
        if first := whole.ids[: [*whole.special_tokens_mask, 0].index(0)]:
            return first
        asked |= settings.get("add_bos_token") is True and "Llama" in str(settings.get("tokenizer_class"))
    return [library.token_to_id(bos)] if bos and asked else []


def find_end_tokens(folder: Path, library: tokenizers.Tokenizer) -> list[int]:
    """The tokens that end a response: END_TOKENS, and those that a model folder names. ValueError where there is none,
    or a file names something else: a Llama config of transformers has the id 2 by default, whatever that token is."""
    found = [library.token_to_id(name) for name in END_TOKENS]
    for name, key in NAMED_IN.items():
        value = read_json(folder / name, missing={}).get(key)
        for end in map(name_of, value if isinstance(value, list) else [value]):
            token = library.token_to_id(end) if isinstance(end, str) else end
            if end is not None and (type(token) is not int or token not in library.get_added_tokens_decoder()):
                raise ValueError(f"{folder / name} names {end!r:.50} as the end token ({key}), which is no special "
                                 "token of tokenizer.json: correct the one that is wrong")
            found.append(token)
    if not (ends := dict.fromkeys(token for token in found if token is not None)):
        raise ValueError(f"{folder / 'tokenizer.json'} has neither <|im_end|> nor <|endoftext|>, and no file beside it "
                         "names an end token: set eos_token_id in generation_config.json, or no response could end")
    return list(ends)
