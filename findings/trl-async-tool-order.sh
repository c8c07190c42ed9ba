#!/usr/bin/env bash
# in short (trl): Results of async tools come after all others, so the model reads them in another order than its
# calls.
# guessed: a turn of a GRPOTrainer policy calls two tools, the first of which is async: the model reads the two results
# in the order of its calls
# seen: the results of async tools come after those of all others, whatever the order of the calls; Qwen2.5's template
# shows a result without the name of its tool, so the model reads the second result where the first belongs
# with: trl 1.16.0, transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q trl==1.16.0 transformers==5.23.0 torch==2.13.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python -W ignore - <<'EOF'
from pathlib import Path

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer


def weather() -> str:
    """Says the weather."""
    return "sunny"


async def async_weather() -> str:
    """Says the weather."""
    return "sunny"


def clock() -> str:
    """Says the time."""
    return "noon"


for first in (weather, async_weather):
    turn = "\n".join('<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>' % tool.__name__
                     for tool in (first, clock))
    # A tokenizer of bytes, in which this turn is one token, with the chat template of Qwen2.5.
    library = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.add_tokens([turn])
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates/qwen2_5.jinja").read_text()
    V, end, call = len(tokenizer), tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(turn)
    D, [line] = V + V % 2, tokenizer("\n").input_ids
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=V, hidden_size=D, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=False, eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None))
    with torch.no_grad():  # the next token depends on the last one alone: a line break, the calls, the end of the turn
        for weight in model.model.layers[0].parameters():
            weight.mul_(0 if weight.dim() == 2 else 1)
        model.model.embed_tokens.weight.copy_(torch.eye(V, D))
        model.lm_head.weight.zero_()
        model.lm_head.weight[[call, end], [line, call]] = 30 / D**0.5
    texts = []
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, tools=[first, clock],
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "Go!"}]]}),
        reward_funcs=lambda completion_ids, **_: texts.append(tokenizer.decode(completion_ids[0])) or [0.0, 1.0],
        args=GRPOConfig(output_dir="out", per_device_train_batch_size=2, num_generations=2, max_steps=1,
                        max_completion_length=400, max_tool_calling_iterations=1, report_to="none", use_cpu=True,
                        bf16=False, disable_tqdm=True, save_strategy="no"))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    [text] = texts
    read = text[text.index("<tool_response>") : text.rindex("</tool_response>")].replace("\n", " ")
    print(f"{first.__name__}, then clock; the model reads: {read}")
    assert (text.index("sunny") < text.index("noon")) == (first is weather)
EOF
