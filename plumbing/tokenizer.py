"""A byte-level tokenizer.json: text to tokens, and tokens back to text with the span of each.

The spans are computed here because the tokenizers library gives offsets for text that it encodes, but not for tokens
that it decodes.
"""
import codecs
import unicodedata
from pathlib import Path
from typing import Iterable

import tokenizers

END_TOKENS = ("<|im_end|>", "<|endoftext|>")  # either ends a response


class Tokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, folder: str | Path):
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing")
        try:
            self.library = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"{path} is not a tokenizer: {error}") from None
        self.library.no_truncation()
        self.library.no_padding()
        # Beyond the highest id, which may exceed the number of tokens, a model's vocabulary may be padded.
        self.size = max(self.library.get_vocab().values(), default=-1) + 1
        self.chat = self.library.token_to_id("<|im_start|>") is not None  # whether it belongs to a chat model
        candidates = (self.library.token_to_id(name) for name in END_TOKENS)
        self.end_tokens = [token for token in candidates if token is not None]
        if not self.end_tokens:
            raise ValueError(f"{path} has neither <|im_end|> nor <|endoftext|>: no response could end")
        self.bytes = self.token_bytes()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; `<|im_start|>` and the like in it become special tokens."""
        return self.library.encode(text, add_special_tokens=False).ids

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

    def visible(self, text: str) -> str:
        """What `decode` should return of a text's tokens: the text without end tokens, in the form of the library."""
        for token in self.end_tokens:
            text = text.replace(self.library.id_to_token(token), "")
        return unicodedata.normalize("NFC", text)  # as Qwen's tokenizers do

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
