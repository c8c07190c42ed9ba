#!/usr/bin/env bash
# in short (rollouts): With GPT-2 and a list of prompts, attributions and probabilities are right for the longest
# prompt alone. One prompt a call is right.
# guessed: inseq's attribute gives each prompt of a list what it gives that prompt alone, also where they differ in
# length, and its step score probability is the model's for the token that it generated
# seen: with GPT-2, the model of inseq's own examples, only the longest prompt is right. The others are padded on the
# left; generate counts their positions from the first real token, so the texts are right, but the pass that is
# attributed counts them from the padding. So probabilities and attributions are those of a text that begins further on,
# silently: greedy tokens of 0.72, 0.44 and 0.40 get 0.005, 0.013 and 0.006, and the saliency for the first of them is
# 13 to 42 times too small. With one prompt a call all is right, and with Llama, which knows distances only, in a list
# with: inseq 0.7.1, transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q inseq==0.7.1 transformers==5.23.0 torch==2.13.0
venv/bin/python -W ignore - 2>errors.txt <<'EOF' || { cat errors.txt; exit 1; }
import inseq
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = "<pad> <end> <unk> <s> a b c d e f g h i j k l".split()
base = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<end>", bos_token="<s>", pad_token="<pad>",
                                    unk_token="<unk>", padding_side="left")
common = dict(vocab_size=len(words), initializer_range=0.4, pad_token_id=0, eos_token_id=1, bos_token_id=3)
prompts = ["a b c", "d e f g h a"]
settings = dict(step_scores=["probability"], show_progress=False, generation_args={
    "max_new_tokens": 3, "do_sample": False, "suppress_tokens": [0, 1, 2, 3]})


def show(name, output):
    tokens, probabilities = [token.token for token in output.target], output.step_scores["probability"]
    saliency = output.target_attributions.norm(dim=-1).nan_to_num()  # of each token, for each token that was generated
    print(f"  {name:12} {tokens}, probability {[round(p, 3) for p in probabilities.tolist()]}, saliency for the first "
          f"{[round(s, 3) for s in saliency[:-3, 0].tolist()]}")
    return tokens, probabilities, saliency


found = {}
for kind, model in {
        "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **common)),
        "Llama": lambda: LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                                                      num_attention_heads=2, **common))}.items():
    torch.manual_seed(0)
    model = model().eval()
    attributed = inseq.load_model(model, "saliency", tokenizer=tokenizer, device="cpu")
    together = attributed.attribute(prompts, **settings)
    for number, prompt in enumerate(prompts):
        print(f'{kind}, "{prompt}"')
        alone = show("alone", attributed.attribute(prompt, **settings)[0])
        found[kind, number] = alone, show("in a list", together[number])
        ids = torch.tensor([tokenizer.convert_tokens_to_ids(alone[0])])
        with torch.no_grad():
            real = model(ids).logits.softmax(-1)[0, -4:-1].gather(1, ids[0, -3:, None])[:, 0]
        print(f"  {'by the model':12} {[round(p, 3) for p in real.tolist()]}")
        assert torch.allclose(alone[1], real, atol=1e-5)
for (kind, number), (alone, listed) in found.items():
    assert alone[0] == listed[0]  # the same text
    same = torch.allclose(alone[1], listed[1], atol=1e-4) and torch.allclose(alone[2], listed[2], rtol=1e-3, atol=1e-4)
    assert same == ((kind, number) != ("GPT-2", 0))
alone, listed = found["GPT-2", 0]
assert alone[1].min() > 0.4 and listed[1].max() < 0.02 and (alone[2] > 5 * listed[2]).any()
EOF
