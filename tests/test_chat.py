"""Messages by a folder's chat template, against transformers."""
import itertools
import json
import re
import sys

import pytest
from jinja2 import TemplateError
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from plumbing.chat import chat_tokens, compiler
from plumbing.tokenizer import Tokenizer
from tests.test_tokenizer import CHATML as TURNS
from tests.test_tokenizer import ENDS, build

CHATML = TURNS + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
SYSTEM = "{% set first = messages[0].content if messages[0].role == 'system' else '' %}"
REST = "{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}"
TEMPLATES = {  # in short what these families' do
    "chatml": CHATML,
    "llama": SYSTEM + "{{ bos_token }}{% if not date_string is defined %}"
        "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ '[H]system[/H]\n\n' }}"
        "{% if tools is not none %}{{ 'Tools: ' + tools | tojson }}{% endif %}"
        "{{ 'Today: ' + date_string + '\n\n' + first | trim + '<|eot|>' }}" + REST +
        "{{ '[H]' + m.role + '[/H]\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[H]assistant[/H]\n\n' }}{% endif %}",
    "qwen2.5": "{% if tools %}{{ tools | tojson }}{% elif messages[0].role != 'system' %}"
        "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}" + CHATML,
    "qwen3": """{% set ns = namespace(last=0) %}
        {%- for m in messages %}
            {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
        {% endfor %}
        {% for m in messages %}
            {%- set said = m.content.split('</think>')[-1].lstrip('\n') if loop.index0 < ns.last else m.content %}
            {{- '<|im_start|>' + m.role + '\n' + said + '<|im_end|>\n' }}
        {%- endfor %}
        {% if add_generation_prompt %}
<|im_start|>assistant
        {% endif %}""",
    "phi": CHATML.replace("<|im_end|>\n", "<|im_end|>").replace("\n", "<|im_sep|>"),
    "gemma": SYSTEM + "{{ bos_token }}" + REST +
        "{% if (m.role == 'user') != loop.index0 is even %}{{ raise_exception('Roles must\nalternate') }}{% endif %}"
        "{{ '[H]' + m.role.replace('assistant', 'model') + '\n' + (first + '\n\n' if loop.first and first else '') }}"
        "{{ m.content | trim + '<|eot|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '[H]model\n' }}{% endif %}",
    "mistral": SYSTEM + "{{ bos_token }}" + REST +
        "{% if m.role == 'user' %}{{ '[H]' + (first ~ '\n\n' if loop.last and first else '') + m.content + '[/H]' }}"
        "{% else %}{{ ' ' + m.content.strip() + eos_token }}{% endif %}{% endfor %}",
    "rounds": "{% if messages[0].role != 'system' %}{{ raise_exception('System first') }}{% endif %}{{ bos_token + "
        "pad_token + voice_token + turn_token }}{{ documents | tojson if documents is not none }}"
        "{% for m in messages %}{{ m | tojson(ensure_ascii=true, indent=1) + m | tojson }}"
        "{% if m.role != 'assistant' %}{% continue %}{% endif %}"
        "{%- generation %} {{ m.content }}<|eot|>{% endgeneration %}{% endfor %}"}
NAMED = {"bos_token": "<s>", "eos_token": "<|eot|>", "pad_token": "[H]", "voice_token": "[/H]",
         "extra_special_tokens": {"turn_token": "</s>"}}


def folder(path, template):
    """A model folder with this template: its tokenizer for transformers and ours."""
    end = AddedToken("<|eot|>", normalized=False, special=True, rstrip=True)  # as Phi-3's
    tags = [AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")]
    special = (*ENDS, "<|im_start|>", "<|im_sep|>", "<s>", "</s>", "[H]", "[/H]")
    build(path, special, lambda library: library.add_tokens([end, *tags]))
    (path / "tokenizer_config.json").write_text(json.dumps(
        NAMED | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}))
    return PreTrainedTokenizerFast.from_pretrained(path), Tokenizer(path)


def said(role, content):
    return {"role": role, "content": content}


ASKED = said("user", ' \n"2 + 3?"\t{{ bos_token }} é\u2028\n ')
BRIEF, TOLD = said("system", " Be brief: é.\n"), said("assistant", "<think>\n2 + 3\n</think>\n\n5 ")
TALKS = [[ASKED], [BRIEF, ASKED], [said("system", ""), ASKED, TOLD, said("user", "?")],
         [BRIEF, ASKED, TOLD, ASKED, TOLD, ASKED], [BRIEF, ASKED, ASKED]]


@pytest.mark.parametrize("name", [*TEMPLATES, "no template"])
def test_prompts_are_those_of_transformers(name, tmp_path):
    """Guards against what a template does with content and is lost, and variables that are undefined."""
    hf, ours = folder(tmp_path, TEMPLATES.get(name, CHATML))
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
    _, ours = folder(tmp_path, TEMPLATES["llama"])
    for wrong in ([], ["hello"], [{"role": "user"}], [said(1, "x")], [said("user", None)], [ASKED | {"name": "x"}]):
        with pytest.raises(ValueError, match="^the task's messages must each be a role and a content, both text, not"):
            chat_tokens(ours, wrong)
    with pytest.raises(ValueError, match="must not be the assistant's$"):
        chat_tokens(ours, [ASKED, TOLD])
    for name, forged in itertools.product(ours.special, ("a{}b", "{}")):
        for wrong in ([said("user", forged.format(name)), ASKED], [BRIEF, said(forged.format(name), "x")]):
            with pytest.raises(ValueError, match=f"contains {re.escape(name)}, a special token: take it out$"):
                chat_tokens(ours, wrong)
    for template, problem in ((None, "has no chat template"), ("{{ x.y.z }}", "refuses"), ("{% if %}", "refuses"),
                              ("{{ 1 + messages[0].content }}", "refuses .* unsupported"), ("{{ 1 / 0 }}", "by zero$")):
        ours.template = template
        with pytest.raises(ValueError, match=problem):
            chat_tokens(ours, [ASKED])
    ours.template = CHATML
    compiler.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    for action in (lambda: chat_tokens(ours, [ASKED]), lambda: Tokenizer(tmp_path)):
        with pytest.raises(ValueError, match="needs Jinja: pip install jinja2$"):
            action()
