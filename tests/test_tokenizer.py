"""Text and messages to tokens against the tokenizers library and transformers, and back against Python."""
import itertools
import json
import re
import sys
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from plumbing.chat import chat_tokens, compiler
from plumbing.tokenizer import Tokenizer
from plumbing.launch import BUNDLED
from rollout import Policy

CALM = settings(deadline=None, database=None, phases=(Phase.explicit, Phase.generate, Phase.shrink),
                suppress_health_check=[HealthCheck.too_slow])  # a slow machine is not a bug
ENDS, EMOJI = ("<|im_end|>", "<|endoftext|>"), "\U0001f642"  # four bytes
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())  # a letter below 256 is its own byte; the others follow in order
PRINTABLE = [ord(letter) for letter in ALPHABET if ord(letter) < 256]
LETTERS = dict(zip(PRINTABLE + sorted(set(range(256)) - set(PRINTABLE)), ALPHABET))
WORDS = [b" -", b"</", b">\n", b" " + EMOJI.encode()[:1], EMOJI.encode()[:2], EMOJI.encode()[2:] + b"<"]
MERGES = dict.fromkeys((word[:i], word[i : i + 1]) for word in WORDS for i in range(1, len(word)))
TAG = "</\u00e9>"
TOKENS = [bytes([i]) for i in range(256)] + [a + b for a, b in MERGES]  # token i < 256 is byte i


def spell(data):
    """Bytes in the letters of byte-level BPE."""
    return "".join(LETTERS[byte] for byte in data)


def build(folder, special=(*ENDS, "<|im_start|>"), change=lambda library: None):
    """Save a byte-level BPE of TOKENS and special tokens, which follow them, and whatever `change` makes of it."""
    vocabulary = {spell(token): i for i, token in enumerate(TOKENS)}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[(spell(a), spell(b)) for a, b in MERGES]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    change(library)
    library.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A tokenizer with ChatML tokens and a tag that has no letters, as </think> of Qwen3. (An accent shows more.) Its
    file truncates and pads, as somebody may have saved it while preparing data."""
    def change(library):
        library.add_tokens([AddedToken(TAG, normalized=False)])
        library.enable_truncation(3)
        library.enable_padding(length=99)
    return Tokenizer(build(tmp_path_factory.mktemp("chat"), change=change))


@pytest.fixture(scope="module")
def library(chat):
    """Its copy, which finds special tokens by itself."""
    return tokenizers.Tokenizer.from_str(chat.library.to_str())


def test_special_tokens_say_what_ends_a_response_and_whether_it_is_a_chat_model(chat, tmp_path):
    """Guards against markers that are spelt out, a chat turn that ends in <|endoftext|> alone, an end token in the
    text, and refusing a model for the names of its tokens."""
    plain = Tokenizer(build(tmp_path, special=ENDS[1:]))
    ends = [len(TOKENS), len(TOKENS) + 1]
    assert (chat.chat, chat.size, chat.end_tokens, chat.start) == (True, len(TOKENS) + 4, ends, [])
    assert (plain.chat, plain.size, plain.end_tokens) == (False, len(TOKENS) + 1, [len(TOKENS)])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": len(TOKENS)}))
    named = Tokenizer(build(tmp_path, special=("<|eot_id|>", "<|eot_id|>s")))  # the first begins the second
    assert named.end_tokens == [len(TOKENS)] and named.decode([ord("a"), len(TOKENS)])[0] == "a"
    assert named.encode("<|eot_id|>s") == [len(TOKENS) + 1]


IM_END, ENDOFTEXT, IM_START = range(len(TOKENS), len(TOKENS) + 3)


# Line breaks, the assistant's name and its own end tell ChatML from what has its tokens alone, such as Phi-4's format.
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
NO_CHATML = [CHATML.replace(*change) for change in (
    ("'\n' + m['content']", "'<|im_sep|>' + m['content']"), ("<|im_end|>\n", "<|im_end|>"),
    ("m['role']", "('bot' if m['role'] == 'assistant' else m['role'])"))]
OTHER = "{# instead of <|im_start|> #}{% for m in messages %}[INST]{{ m['content'] }}{% endfor %}"
ENDED, CONFIG, JINJA = {"end_tokens": [IM_END, ENDOFTEXT, IM_START]}, "tokenizer_config.json", "chat_template.jinja"


@pytest.mark.parametrize("files, found", [
    ({"config.json": {"eos_token_id": IM_START}}, ENDED), ({CONFIG: {"eos_token": "<|im_start|>"}}, ENDED),
    ({"generation_config.json": {"eos_token_id": [IM_START, ENDOFTEXT]}, "config.json": {"eos_token_id": None}}, ENDED),
    ({"special_tokens_map.json": {"eos_token": {"content": "<|im_start|>", "lstrip": False}},
      "generation_config.json": {"eos_token_id": IM_END}}, ENDED),
    ({}, {"chat": True}), ({CONFIG: {"bos_token": "<|im_start|>"}}, {"chat": False}),
    ({CONFIG: {"chat_template": CHATML}}, {"chat": True}), ({JINJA: CHATML, CONFIG: {}}, {"chat": True}),
    ({CONFIG: {"chat_template": [{"name": "default", "template": CHATML}]}}, {"chat": True}),
    ({JINJA: OTHER}, {"chat": False}), ({CONFIG: {"chat_template": OTHER}}, {"chat": False}),
    ({JINJA: OTHER, CONFIG: {"chat_template": CHATML}}, {"chat": False}),
    *(({JINJA: template}, {"chat": False}) for template in NO_CHATML),
    *(({JINJA: f"{{{{ raise_exception('') if messages[0].role {sign} 'system' }}}}" + CHATML}, {"chat": True})
      for sign in ("!=", "=="))], ids=str)
def test_a_folder_says_what_ends_a_response_and_whether_it_is_a_chat_model(files, found, tmp_path):
    """Guards against a model that never ends, because its end token has another name than Qwen's, and a base model that
    is asked with tokens that it never saw, only because it has them."""
    for name, content in files.items():  # with a byte-order mark, as some editors write it
        text = content if name == JINJA else "\ufeff" + json.dumps(content)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert vars(Tokenizer(build(tmp_path))).items() >= found.items()


def added(name, **flags):
    """An entry of added_tokens_decoder."""
    return dict(content=name, lstrip=False, rstrip=False, single_word=False, normalized=False, special=False) | flags


NEW, STRIP = len(TOKENS) + 3, {"lstrip": True, "rstrip": True}
STRIPPED = [AddedToken("<|s|>", special=True, **STRIP), AddedToken("<t>", **STRIP)]


@pytest.mark.parametrize("files, tokens", [
    ({CONFIG: {"added_tokens_decoder": {str(NEW + 1): added("<t>"), str(NEW): added("<|s|>", special=True)}}}, []),
    ({CONFIG: {}, "added_tokens.json": {"<t>": NEW + 1, "<|s|>": NEW}}, []), ({}, STRIPPED),
    ({}, [AddedToken("<|s|>", special=True, single_word=True)]),
    ({CONFIG: {"added_tokens_decoder": {str(IM_END): added("<|im_end|>", special=True, **STRIP)}}}, STRIPPED),
    ({CONFIG: {"added_tokens_decoder": {str(NEW): added("<|s|>", special=True)}},
      "added_tokens.json": {"<t>": NEW + 1}}, STRIPPED)], ids=str)
def test_added_tokens_are_those_of_transformers(files, tokens, tmp_path):
    """Guards against <think> cut in three, since only a file beside tokenizer.json lists it, and white space kept that
    belongs to a token, and a token found within a word."""
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    hf = PreTrainedTokenizerFast.from_pretrained(build(tmp_path, change=lambda library: library.add_tokens(tokens)))
    ours = Tokenizer(tmp_path)
    for pieces in itertools.product((" <|s|>\n", "<t> ", "a <t>"), (" \nb \u3000",), ("\n<|im_end|> <t>", "a<|s|> c")):
        assert ours.encode(*pieces) == hf("".join(pieces))["input_ids"], pieces
    assert ours.size == len(hf)


LLAMA, TURN = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, "<|im_start|>user\nq<|im_end|>\n"


@pytest.mark.parametrize("settings, template, first", [
    ({"bos_token": "<|b|>"}, "{{bos_token}}" + CHATML, False), ({"bos_token": "<|b|>"}, "<|b|>" + CHATML, False),
    ({"bos_token": "<|b|>"}, CHATML, True), ({"bos_token": None}, "{{bos_token}}" + CHATML, False),
    (LLAMA | {"bos_token": added("<|b|>", __type="AddedToken")}, None, False), (LLAMA, None, False),
    ({"bos_token": "<|im_start|>"}, CHATML, False),
    (LLAMA | {"bos_token": "<|b|>", "add_bos_token": False}, None, False),
    (LLAMA | {"bos_token": "<|b|>", "tokenizer_class": "PreTrainedTokenizerFast"}, None, False),
    ({"bos_token": "<|b|>"}, None, True), ({}, None, True), ({"bos_token": "<|b|>"}, "{{ bos_token }}[INST]", False)],
    ids=str)
def test_prompts_begin_as_those_of_transformers(settings, template, first, tmp_path):
    """Guards against a model that is asked without its BOS, with two, or with an end token before the prompt. first:
    tokenizer.json begins texts with a BOS and ends them."""
    processor = processors.TemplateProcessing(single="<|b|> $A <|im_end|>" if first else "$A",
                                              special_tokens=[("<|b|>", NEW), ("<|im_end|>", IM_END)])
    build(tmp_path, (*ENDS, "<|im_start|>", "<|b|>"), lambda library: setattr(library, "post_processor", processor))
    if settings:  # without this file nothing says that the model is no chat model
        (tmp_path / CONFIG).write_text(json.dumps(settings | {"chat_template": template}))
    # Version 5 of transformers reads add_bos_token as an argument alone, version 4 in the file, too, of a Llama.
    obeyed = {"add_bos_token": settings.get("add_bos_token")} if "Llama" in settings.get("tokenizer_class", "") else {}
    hf, ours = PreTrainedTokenizerFast.from_pretrained(tmp_path, **obeyed), Tokenizer(tmp_path)
    text = "[INST]" if template and CHATML not in template else TURN
    expected = hf.apply_chat_template([{"role": "user", "content": "q"}]) if template else hf(text)
    ended = [IM_END] * (first and not template)  # which no prompt may be
    task = SimpleNamespace(prompt=lambda puzzle, chat: text)
    assert Policy(None, ours, task).prompt("q") + ended == expected["input_ids"]


END, LISTED = "{} names .* as the end token .{}., which is no special token", "lists don't fit its tokenizer.json: .*"
DECODER, SETS = "added_tokens_decoder", "{} sets {}, which is not supported"


@pytest.mark.parametrize("file, key, value, said", [
    ("config.json", "eos_token_id", 2, END), ("generation_config.json", "eos_token_id", [IM_END, [2]], END),
    (CONFIG, "eos_token", "</s>", END), (CONFIG, "eos_token", {"content": "a"}, END),
    (CONFIG, DECODER, {str(NEW + 1): added("<t>")}, f"token {NEW + 1}"),
    (CONFIG, DECODER, {str(IM_END): added("<t>")}, f"'<t>' can't be token {IM_END}"),
    (CONFIG, DECODER, {"x": added("<t>")}, LISTED), (CONFIG, DECODER, {str(NEW): "<t>"}, LISTED),
    (CONFIG, DECODER, [1], LISTED), (CONFIG, "bos_token", 5, LISTED),
    ("special_tokens_map.json", "bos_token", added("<s>"), LISTED + "lacks '<s>'"),
    (CONFIG, "additional_special_tokens", ["<t>"], LISTED + "lacks '<t>'"),
    (CONFIG, "extra_special_tokens", {"t": added("<t>")}, LISTED + "lacks '<t>'"),
    (CONFIG, "add_prefix_space", True, SETS), (CONFIG, "split_special_tokens", True, SETS)], ids=str)
def test_settings_that_are_wrong_or_not_supported_are_refused(file, key, value, said, tmp_path):
    """Guards against responses that end at a comma, because a Llama config of transformers has the id 2 by default, and
    against a token whose number depends on the version of transformers."""
    (tmp_path / file).write_text(json.dumps({key: value}))
    with pytest.raises(ValueError, match=said.format(file, key)):
        Tokenizer(build(tmp_path))


DIGITS = {"type": "Split", "pattern": {"Regex": "[0-9]"}, "behavior": "Removed", "invert": False}


@pytest.mark.parametrize("change, lost", [
    (lambda content: content["model"]["vocab"].pop("7"), "7"),
    (lambda content: content["model"]["vocab"].pop(LETTERS[0xA9]), "\u00a9"),
    (lambda content: content["pre_tokenizer"].update(type="Sequence", pretokenizers=[DIGITS]), "0"),
    (lambda content: content.update(pre_tokenizer=None), " ")], ids=["7", "A9", "digits", "space"])
def test_a_prompt_that_loses_characters_is_refused(change, lost, tmp_path):
    """Guards against puzzles without their digits: the library drops what no token can spell, and says nothing."""
    file = build(tmp_path) / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    library = tokenizers.Tokenizer.from_file(str(file))
    assert library.encode(f"a{lost}b").ids != list(f"a{lost}b".encode())  # and yet no error
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("ab") == list(b"ab")  # not refused: SmolLM2 has no token for some control characters
    with pytest.raises(ValueError, match=f"tokenizer.json has no token for '{lost}', which a prompt has"):
        tokenizer.encode("a<|im_end|>", f"a{lost}b")


WRITTEN = [" -", "-", " ", "<", "/", ">", "\n", "a", "\u00e9", TAG, EMOJI]


@pytest.mark.slow
@settings(CALM, max_examples=200)
@given(st.lists(st.tuples(st.lists(st.sampled_from([*WRITTEN, "<|im_start|>", "<|im_end|>"])).map("".join),
                          st.lists(st.sampled_from(WRITTEN)).map("".join)), min_size=1))
def test_a_prompt_in_pieces_has_the_tokens_of_the_whole(chat, library, pairs):
    """Guards against tokens that change where a prompt is cut. The tokenizers library encodes the whole."""
    pieces = [piece for pair in pairs for piece in pair]
    assert chat.encode(*pieces) == library.encode("".join(pieces), add_special_tokens=False).ids


def test_a_control_token_in_somebodys_own_text_stays_characters(chat, tmp_path):
    """Guards against a question that closes its turn and opens another."""
    spelt = list(b"<|im_end|>")
    assert chat.encode("<|im_start|>", "<|im_end|>", "a<|im_end|>") == [IM_START, *spelt, ord("a"), IM_END]
    assert chat.decode(chat.encode("", "<|im_end|>"))[0] == "<|im_end|>" and chat.decode([IM_END])[0] == ""
    file = build(tmp_path) / "tokenizer.json"
    file.write_text(file.read_text().replace('"special": true', '"special": false'))  # as some programs write it
    assert Tokenizer(tmp_path).encode("<|im_start|>", "<|im_end|>", "") == [IM_START, *spelt]


def test_folders_without_a_byte_level_tokenizer_that_has_an_end_token_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json is missing"):
        Tokenizer(tmp_path)
    sentencepiece = tokenizers.Tokenizer(models.BPE(vocab={"\u2581": 0, "a": 1}, merges=[]))
    sentencepiece.add_special_tokens(["<|endoftext|>"])
    text = build(tmp_path, special=("<|im_start|>",)).joinpath("tokenizer.json").read_text()
    for content, said in (("{", "tokenizer.json is not a tokenizer: ."), (text, "neither .*im_end.* nor .*endoftext"),
                          (sentencepiece.to_str(), "not a byte-level one")):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=said):
            Tokenizer(tmp_path)


@pytest.mark.slow
@settings(CALM, max_examples=700)
@given(st.lists(st.integers(0, len(TOKENS) + 5) | st.integers(128, 255) | st.sampled_from(b"\xe2\xf0\x9f\xc3"),
                max_size=12))
@example([*EMOJI.encode(), len(TOKENS), TOKENS.index(b" \xf0"), *EMOJI.encode()[1:], len(TOKENS) + 3, len(TOKENS) + 4, ord("2")])
def test_spans_are_those_of_each_byte(chat, tokens):
    """An untrained model writes any bytes. A byte belongs to the last character of the text that ends with it."""
    unknown = ["\ufffd".encode()] * 2  # beyond the tokenizer, in a padded vocabulary
    parts = [(TOKENS + [b"", b"", b"<|im_start|>", TAG.encode()] + unknown)[i] for i in tokens]  # an end token: no text
    data, stops = b"".join(parts), itertools.accumulate(map(len, parts))
    owner = [len(data[: i + 1].decode(errors="replace")) - 1 for i in range(len(data))]
    owners = [owner[stop - len(part) : stop] for part, stop in zip(parts, stops)]
    text, spans = chat.decode(tokens)
    assert text == data.decode(errors="replace")
    assert spans == [(o[0], o[-1] + 1) if o else (len(text), len(text)) for o in owners]


PROMPTED = CHATML + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
SYSTEM = "{% set first = messages[0].content if messages[0].role == 'system' else '' %}"
REST = "{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}"
TEMPLATES = {  # in short what these families' do
    "llama": SYSTEM + "{{ bos_token }}{% if not date_string is defined %}"
        "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ '[H]system[/H]\n\n' }}"
        "{% if tools is not none %}{{ 'Tools: ' + tools | tojson }}{% endif %}"
        "{{ 'Today: ' + date_string + '\n\n' + first | trim + '<|eot|>' }}" + REST +
        "{{ '[H]' + m.role + '[/H]\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[H]assistant[/H]\n\n' }}{% endif %}",
    "qwen2.5": "{% if tools %}{{ tools | tojson }}{% elif messages[0].role != 'system' %}"
        "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}" + PROMPTED,
    "qwen3": """
        {%- for m in messages %}
            {{- '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' }}
        {%- endfor %}
        {% if add_generation_prompt %}
<|im_start|>assistant
        {% endif %}""",
    "rounds": "{% if messages[0].role != 'system' %}{{ raise_exception('System\nfirst') }}{% endif %}{{ bos_token + "
        "pad_token + voice_token + turn_token }}{{ documents | tojson if documents is not none }}"
        "{% for m in messages %}{{ m | tojson(ensure_ascii=true, indent=1) + m | tojson }}"
        "{% if m.role != 'assistant' %}{% continue %}{% endif %}"
        "{%- generation %} {{ m.content }}<|eot|>{% endgeneration %}{% endfor %}"}
NAMED = {"bos_token": "<s>", "eos_token": "<|eot|>", "pad_token": "[H]", "voice_token": "[/H]",
         "extra_special_tokens": {"turn_token": "</s>"}}


def with_template(path, template):
    """A model folder with this template: its tokenizer for transformers and ours."""
    end = AddedToken("<|eot|>", normalized=False, special=True, rstrip=True)  # as Phi-3's
    tags = [AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")]
    special = (*ENDS, "<|im_start|>", "<s>", "</s>", "[H]", "[/H]")
    build(path, special, lambda library: library.add_tokens([end, *tags]))
    (path / "tokenizer_config.json").write_text(json.dumps(
        NAMED | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}))
    return PreTrainedTokenizerFast.from_pretrained(path), Tokenizer(path)


def says(role, content):
    return {"role": role, "content": content}


ASKED = says("user", ' \n"2 + 3?"\t{{ bos_token }} é\u2028\n ')
BRIEF, TOLD = says("system", " Be brief: é.\n"), says("assistant", "<think>\n2 + 3\n</think>\n\n5 ")
TALKS = [[ASKED], [BRIEF, ASKED], [says("system", ""), ASKED, TOLD, says("user", "?")],
         [BRIEF, ASKED, TOLD, ASKED, TOLD, ASKED], [BRIEF, ASKED, ASKED]]


@pytest.mark.parametrize("name", [*TEMPLATES, "no template"])
def test_prompts_are_those_of_transformers(name, tmp_path):
    """Guards against what a template does with content and is lost, and variables that are undefined."""
    hf, ours = with_template(tmp_path, TEMPLATES.get(name, PROMPTED))
    if name == "no template":  # then ours writes ChatML, behind what begins every prompt
        ours.template, ours.start = None, [5]
    for talk in TALKS:
        try:
            expected = ours.start * (name == "no template") + hf.apply_chat_template(
                talk, add_generation_prompt=True, date_string="26 Jul 2024", return_dict=False)
        except TemplateError as error:  # ours says it in one line
            with pytest.raises(ValueError, match=f"refuses the task's messages: {' '.join(str(error).split())}$"):
                chat_tokens(ours, talk)
        else:
            assert chat_tokens(ours, talk) == expected


def test_messages_that_nobody_can_render_are_one_sentence(tmp_path, monkeypatch):
    """Guards against a message that forges a turn: it may name no special token, in whatever place."""
    _, ours = with_template(tmp_path, TEMPLATES["llama"])
    for wrong in ([], ["hello"], [{"role": "user"}], [says(1, "x")], [says("user", None)], [ASKED | {"name": "x"}]):
        with pytest.raises(ValueError, match="^the task's messages must each be a role and a content, both text, not"):
            chat_tokens(ours, wrong)
    with pytest.raises(ValueError, match="must not be the assistant's$"):
        chat_tokens(ours, [ASKED, TOLD])
    for name, forged in itertools.product(ours.special, ("a{}b", "{}")):
        for wrong in ([says("user", forged.format(name)), ASKED], [BRIEF, says(forged.format(name), "x")]):
            with pytest.raises(ValueError, match=f"contains {re.escape(name)}, a special token: take it out$"):
                chat_tokens(ours, wrong)
    for template, problem in ((None, "has no chat template"), ("{{ x.y.z }}", "refuses"), ("{% if %}", "refuses"),
                              ("{{ 1 + messages[0].content }}", "refuses .* unsupported"), ("{{ 1 / 0 }}", "by zero$")):
        ours.template = template
        with pytest.raises(ValueError, match=problem):
            chat_tokens(ours, [ASKED])
    ours.template = PROMPTED
    compiler.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    for action in (lambda: chat_tokens(ours, [ASKED]), lambda: Tokenizer(tmp_path)):
        with pytest.raises(ValueError, match="needs Jinja: pip install jinja2$"):
            action()


def test_a_tokenizer_does_not_draw(tmp_path, capsys):
    """BPE's dropout, for training a tokenizer, gives a text other tokens each time: it is off, and told."""
    file = tmp_path / "tokenizer.json"
    content = json.loads((BUNDLED / "tokenizer.json").read_text(encoding="utf-8"))
    file.write_text(json.dumps(content | {"model": content["model"] | {"dropout": 0.5}}), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_bytes((BUNDLED / "tokenizer_config.json").read_bytes())
    text, whole = "Using the numbers, create an equation. 12 + 34 = 46", Tokenizer(BUNDLED)
    drawn = tokenizers.Tokenizer.from_file(str(file))
    assert len({tuple(drawn.encode(text).ids) for _ in range(20)}) > 1  # as the library reads it
    found = Tokenizer(tmp_path)
    assert all(found.encode(text) == whole.encode(text) for _ in range(20))
    assert "a dropout of 0.5 for training a tokenizer: it is off" in capsys.readouterr().out
