#!/usr/bin/env bash
# in short (trainers): PPO and REINFORCE give every token the whole reward, and returns add it up: a long right answer
# is worth more than a short one.
# guessed: in AgileRL's PPO and REINFORCE for language models a response of one turn is one action, as their pages say,
# so all its tokens share its reward, whatever its length
# seen: every token gets the whole reward. In a batch of single turns, at the default granularity, returns add up: a
# right answer of 12 tokens is worth 12, and one of 4 tokens 4. REINFORCE then compares tokens: the long right answer
# begins with an advantage of 2.46, the short one with 0.33, and both end with -0.47, so a right answer is taught not to
# end. With advantage_granularity="turn" all tokens of right answers have the same
# with: agilerl 2.58.0, transformers 5.14.1, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0 tensordict==0.13.0 transformers==5.14.1 peft==0.21.0 accelerate==1.15.0 \
    datasets==5.0.1 gymnasium==1.4.0 pettingzoo==1.26.1 lazy-loader==0.6 pydantic==2.14.4 omegaconf==2.3.1 \
    packaging==26.4 termcolor==3.3.0 dill==0.4.1 tqdm==4.70.1 rich==15.0.0 tabulate==0.10.0 pillow==13.0.0 \
    fastrand==3.1.0 wandb==0.31.0
venv/bin/python -c "import triton" 2>/dev/null || PIP_NO_DEPS=1 venv/bin/pip install -q triton==3.9.0
PIP_NO_DEPS=1 venv/bin/pip install -q agilerl-arena==1.29.0 liger-kernel==0.8.2 bitsandbytes==0.49.2 openenv==0.4.1
PIP_NO_DEPS=1 venv/bin/pip install -q agilerl==2.58.0 transformers==5.14.1 torch==2.13.0
venv/bin/python -W ignore - 2>errors.txt <<'EOF' || { cat errors.txt; exit 1; }
import torch
from agilerl.algorithms.ppo_llm import PPO
from agilerl.algorithms.reinforce_llm import REINFORCE
from peft import LoraConfig
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

LENGTHS, REWARDS = [4, 12, 4, 12], [1.0, 1.0, 0.0, 0.0]  # four responses of one turn; the first two are right
PROMPT = 2

GPTNeoXForCausalLM(GPTNeoXConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    max_position_embeddings=64)).save_pretrained("model")


def learn(method, function, **settings):
    """One call of learn, and what its function for returns and advantages gave: first and last token of each."""
    agent = method(
        model_name="model", pad_token_id=0, pad_token="<pad>", batch_size=4, max_model_len=64, max_output_tokens=32,
        lora_config=LoraConfig(r=2, target_modules=["query_key_value"]), device="cpu", use_liger_loss=False,
        gradient_checkpointing=False, wrap=False, **settings)
    inner, seen = getattr(agent, function), []

    def watched(*arguments):
        found = inner(*arguments)
        seen.append(found[0] if isinstance(found, tuple) else found)
        return found

    setattr(agent, function, watched)
    torch.manual_seed(0)
    agent.learn((
        [torch.randint(1, 64, (1, PROMPT + n)) for n in LENGTHS],
        [torch.arange(PROMPT + n - 1)[None] >= PROMPT - 1 for n in LENGTHS],  # of each next token: is it the response's
        torch.tensor(REWARDS)))
    [table] = seen
    return [[round(table[row, PROMPT - 1 + at].item(), 2) for at in (0, n - 1)] for row, n in enumerate(LENGTHS)]


returns = learn(PPO, "_compute_gae_returns_token", gae_lambda=1.0)
tokens = learn(REINFORCE, "_compute_rebn_advantages_token")
turns = learn(REINFORCE, "_compute_rebn_advantages", advantage_granularity="turn")
print(f"responses of {LENGTHS} tokens, rewards {REWARDS}; first and last token of each:")
print(f"PPO's returns, lambda 1: {returns}\nREINFORCE's advantages: {tokens}\nwith turn granularity: {turns}")
assert returns == [[4, 1], [12, 1], [0, 0], [0, 0]]
assert tokens[1][0] > 2 > 0.5 > tokens[0][0] > 0 > tokens[0][1] == tokens[1][1]
assert turns[0] == turns[1] == [turns[0][0]] * 2 and turns[0][0] > 0
EOF
