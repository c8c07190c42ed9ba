"""A byte-level tokenizer.json: text to tokens, and tokens back to text with the span of each.

The spans are computed here because the tokenizers library gives offsets for text that it encodes, but not for tokens
that it decodes.
"""
import codecs
import itertools
import re
from pathlib import Path
from typing import Iterable

import tokenizers

from plumbing.files import read_json

END_TOKENS = ("<|im_end|>", "<|endoftext|>")  # each ends a response, and so does what these files name:
NAMED_IN = {"tokenizer_config.json": "eos_token", "special_tokens_map.json": "eos_token",
            "generation_config.json": "eos_token_id", "config.json": "eos_token_id"}
CHATML = "<|im_start|>"


class Tokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: AutoTokenizer of transformers can write it, with "
                                    "save_pretrained")
        try:
            self.library = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8-sig"))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"{path} is not a tokenizer: {error}") from None
        self.library.no_truncation()
        self.library.no_padding()
        # Beyond the highest id, which may exceed the number of tokens, a model's vocabulary may be padded.
        self.size = max(self.library.get_vocab().values(), default=-1) + 1
        self.chat = self.library.token_to_id(CHATML) is not None and writes_chatml(folder)
        self.end_tokens = find_end_tokens(folder, self.library)
        self.bytes = self.token_bytes()
        control = [*map(self.library.id_to_token, self.end_tokens), *[CHATML] * self.chat]
        self.library.add_special_tokens(control)  # which they are already, but not marked as such in every file
        names = {token.content for token in self.library.get_added_tokens_decoder().values() if token.special}
        longest_first = sorted(names, key=len, reverse=True)
        self.special = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self.library.encode_special_tokens = True  # a special token's name stays characters; `parts` finds those meant
        whole = self.library.encode("a")  # with what begins every text of the model, such as Llama 3's first token
        self.start = [token for token, _ in zip(whole.ids, itertools.takewhile(bool, whole.special_tokens_mask))]

    def encode(self, *pieces: str) -> list[int]:
        """The tokens of a text. `<|im_start|>` and the like in it become special tokens.

        It may be cut in pieces: then every second one is somebody's own text, in which these stay characters.
        """
        tokens = []
        for i, part in enumerate(self.parts(pieces)):
            special = [self.library.token_to_id(part)] if i % 2 else []
            tokens += special or self.library.encode(part, add_special_tokens=False).ids
        return tokens

    def parts(self, pieces: tuple[str, ...]) -> list[str]:
        """The pieces joined, and cut anew: text, a special token's name, text, ..., text.

        The text between two special tokens stays whole, since a cut in it could change its tokens.
        """
        found = [""]
        for i, piece in enumerate(pieces):
            first, *others = self.special.split(piece) if i % 2 == 0 else [piece]
            found[-1] += first
            found += others
        return found

    def decode(self, tokens: Iterable[int]) -> tuple[str, list[tuple[int, int]]]:
        """The text of the tokens, and the span (start, stop) of each in it; an end token's is empty, after the text.

        Tokens that share a character both have it in their span. Bytes that are not UTF-8 become U+FFFD.
        """
        decoder, text, spans = codecs.getincrementaldecoder("utf-8")("replace"), "", []
        for token in tokens:
            letters, characters = self.bytes[token], []  # for each byte, the index of its character
            if letters.isascii() and not decoder.getstate()[0]:  # as nearly always; twice as fast as byte by byte
                characters = range(len(text), len(text) + len(letters))
                text, letters = text + letters.decode(), b""
            for byte in letters:
                text += decoder.decode(bytes([byte]))
                incomplete = decoder.getstate()[0] != b""  # then the character is yet to be appended to the text
                characters.append(len(text) if incomplete else len(text) - 1)
            spans.append((characters[0], characters[-1] + 1) if characters else None)
        text += decoder.decode(b"", final=True)
        return text, [span or (len(text), len(text)) for span in spans]

    def token_bytes(self) -> list[bytes]:
        """The bytes of every token. An end token has none: it is not part of the text.

        Byte-level BPE writes a printable byte as the Unicode character of that number, any other as one from 256 up.
        """
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        letters = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
        added = self.library.get_added_tokens_decoder()
        names = [self.library.id_to_token(i) or "" for i in range(self.size)]
        try:
            table = [name.encode() if i in added else bytes(letters[c] for c in name) for i, name in enumerate(names)]
        except KeyError as error:
            raise ValueError(f"the tokenizer is not a byte-level one: a token contains {error}") from None
        for token in self.end_tokens:
            table[token] = b""
        return table


def find_end_tokens(folder: Path, library: tokenizers.Tokenizer) -> list[int]:
    """The tokens that end a response: END_TOKENS, and those that the files of a model folder name.

    ValueError where there is none, or where a file names something else: a Llama config of transformers has the id 2 by
    default, whatever that token is.
    """
    found, added = [library.token_to_id(name) for name in END_TOKENS], library.get_added_tokens_decoder()
    for name, key in NAMED_IN.items():
        value = read_json(folder / name).get(key) if (folder / name).is_file() else None
        for end in value if isinstance(value, list) else [value]:
            end = end.get("content") if isinstance(end, dict) else end
            token = library.token_to_id(end) if isinstance(end, str) else end
            if end is not None and (type(token) is not int or token not in added):
                raise ValueError(f"{folder / name} names {end!r:.50} as the end token ({key}), which is no special "
                                 "token of tokenizer.json: correct the one that is wrong")
            found.append(token)
    if not any(token is not None for token in found):
        raise ValueError(f"{folder / 'tokenizer.json'} has neither <|im_end|> nor <|endoftext|>, and no file beside it "
                         "names an end token: set eos_token_id in generation_config.json, or no response could end")
    return list(dict.fromkeys(token for token in found if token is not None))


def writes_chatml(folder: Path) -> bool:
    """Whether the chat template of a folder is ChatML; true where the folder says nothing about its tokenizer.

    That doesn't tell a chat model from a base one: Qwen2.5's base models come with the same template.
    """
    texts = [file.read_text(encoding="utf-8") for file in folder.glob("chat_template.jinja")]
    for file in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        texts += [str(read_json(file).get("chat_template"))] if file.is_file() else []
    return not texts or any(CHATML in text for text in texts)
