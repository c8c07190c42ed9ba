#!/usr/bin/env bash
# in short (rollouts): output_span=(i, i) scores the token after token i, and the default method ignores output_span.
# guessed: FlashTrace(...).trace(prompt=..., target=..., output_span=(i, i)) ranks the prompt's tokens by what they did
# for token i of the target, as its page says: for the answer, use output_span around the final answer tokens
# seen: it takes the information at token i's own position, which is read behind it, for the token after it; token i
# was predicted one position before. So every score is of the next token, and the prompt token that decides the first
# token of an answer gets none: here "Paris", without which the log-prob falls by 8.4. And the default method takes all
# of the target, whatever output_span is: its scores are the same to the bit for each span and for none. With
# reasoning_span, too, it takes both as one span. method="ifr-span" does follow the span, one token late
# with: flashtrace 0.1.1, transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q flashtrace==0.1.1 transformers==5.23.0 torch==2.13.0
venv/bin/python -W ignore - 2>errors.txt <<'EOF' || { cat errors.txt; exit 1; }
import torch
from flashtrace import FlashTrace
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = "<end> the capital is Paris and sea near question answer Rome old".split()
reads = {"answer": "Paris", "Paris": "near", "near": "old"}  # each word looks at its partner and copies it as the next
base = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "the"))
base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<end>")
n, every = len(words), torch.arange(len(words))
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=n, hidden_size=2 * n, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1, head_dim=64,
    num_key_value_heads=1, rope_parameters={"rope_type": "default", "rope_theta": 1e20}, eos_token_id=0,
    bos_token_id=None, attn_implementation="eager")).eval()
with torch.no_grad():  # a layer of attention whose weights are set by hand, and no MLP
    for weight in model.parameters():
        weight.fill_(1 if weight.dim() == 1 else 0)
    attention = model.model.layers[0].self_attn
    model.model.embed_tokens.weight[every, every] = attention.v_proj.weight[every, every] = 1
    attention.o_proj.weight[n + every, every] = 1
    model.lm_head.weight[every, n + every] = 3
    for channel, (query, key) in enumerate(reads.items(), 20):
        attention.q_proj.weight[channel, words.index(query)] = attention.k_proj.weight[channel, words.index(key)] = 3
prompt = "the capital is Paris and the sea is near and Rome is old question the capital answer"
target = "Paris near old"


def log_probs(prompt):
    ids = torch.tensor([tokenizer(f"{prompt} {target}")["input_ids"]])
    with torch.no_grad():
        return model(ids).logits.log_softmax(-1)[0, -4:-1].gather(1, ids[0, -3:, None])[:, 0]


lost = {word: log_probs(prompt) - log_probs(prompt.replace(word, "the")) for word in ("Paris", "near", "old")}
for word, losses in lost.items():
    print(f'without "{word}" the log-probs of "{target}" fall by {[round(loss, 1) + 0.0 for loss in losses.tolist()]}')
tracer = FlashTrace(model, tokenizer)
found = {}
for method in ("flashtrace", "ifr-span"):
    for span in ((0, 0), (1, 1), (2, 2), None):
        trace = tracer.trace(prompt=prompt, target=target, output_span=span, method=method)
        found[method, span] = dict(zip(trace.prompt_tokens, trace.scores))
        print(method, span, [(score.token, round(score.score, 3)) for score in trace.topk_inputs(3)])
    assert trace.generation_tokens == ["Paris", "near", "old", "<end>"]
for number, word in enumerate(lost):  # each is what decides its own token of the target
    assert lost[word][number] > 7 and abs(lost[word]).sum() - lost[word][number] < 0.01
for span, late, right in (((0, 0), "near", "Paris"), ((1, 1), "old", "near")):
    scores = found["ifr-span", span]
    assert max(scores, key=scores.get) == late and scores[late] > 0.8 and scores[right] < 0.001
assert max(found["ifr-span", (2, 2)].values()) < 0.05  # nothing was read for the end token
assert all(found["flashtrace", span] == found["flashtrace", None] for span in ((0, 0), (1, 1), (2, 2)))
assert max(found["flashtrace", (0, 0)], key=found["flashtrace", (0, 0)].get) != "Paris"
both = [tracer.trace(prompt=prompt, target=target, output_span=output, reasoning_span=reasoning).scores
        for output, reasoning in (((2, 2), (0, 1)), ((0, 0), (1, 2)))]
assert both[0] == both[1] == tracer.trace(prompt=prompt, target=target).scores
EOF
