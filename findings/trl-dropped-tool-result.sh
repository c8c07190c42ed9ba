#!/usr/bin/env bash
# in short (trl): A completion whose tool result didn't fit counts as finished: mask_truncated_completions trains on
# it.
# guessed: a completion that calls a tool whose result does not fit into max_completion_length counts as cut off: in
# completions/clipped_ratio, and so that mask_truncated_completions leaves it out of the loss
# seen: the tool runs, its result is dropped, and the completion ends with its call; since that ends with an end token,
# it counts as finished: clipped_ratio is 0, and with mask_truncated_completions it is trained on with its reward
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

ran = []


def weather(place: str) -> str:
    """Says the weather.

    Args:
        place: where
    """
    ran.append(place)
    return "sunny"


# A tokenizer of bytes, in which each of two calls is one token, with the chat template of Qwen2.5.
library = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<|im_end|>", pad_token="<|endoftext|>")
calls = ['<tool_call>\n{"name": "weather", "arguments": {"place": "%s"}}\n</tool_call>' % x for x in ("Rome", "Oslo")]
tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
tokenizer.add_tokens(calls)
tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates/qwen2_5.jinja").read_text()
V, end = len(tokenizer), tokenizer.eos_token_id
D = V + V % 2
rome, oslo = tokenizer.convert_tokens_to_ids(calls)
[line] = tokenizer("\n").input_ids

for limit in (1, 40, 400):  # tokens: no room for the end of the turn; none for the result; room for both
    torch.manual_seed(0)
    ran.clear()
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=V, hidden_size=D, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=False, eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None))
    with torch.no_grad():  # the next token depends on the last one alone: a line break, a call, the end of the turn
        for weight in model.model.layers[0].parameters():
            weight.mul_(0 if weight.dim() == 2 else 1)
        model.model.embed_tokens.weight.copy_(torch.eye(V, D))
        model.lm_head.weight.zero_()
        model.lm_head.weight[[rome, oslo, end, end], [line, line, rome, oslo]] = 20 / D**0.5
    before = [p.clone() for p in model.parameters()]
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, tools=[weather],
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "Go!"}]]}),
        reward_funcs=lambda completion_ids, **_: [float(ids[0] == rome) for ids in completion_ids],
        args=GRPOConfig(output_dir="out", per_device_train_batch_size=8, num_generations=8, max_steps=1,
                        max_completion_length=limit, max_tool_calling_iterations=1, mask_truncated_completions=True,
                        logging_steps=1, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
                        save_strategy="no", learning_rate=0.01))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters()))
    [row] = [row for row in trainer.state.log_history if "grad_norm" in row]
    print(f"room for {limit} tokens: {len(ran)} tools ran, of the model are {row['completions/mean_length']:.0f} tokens, "
          f"clipped_ratio {row['completions/clipped_ratio']:.0f}, weights moved {moved}")
    assert len(ran) == 8
    assert (row["completions/mean_length"], row["completions/clipped_ratio"], moved) == {
        1: (1, 1, False), 40: (2, 0, True), 400: (4, 0, True)}[limit]
EOF
