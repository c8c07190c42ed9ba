#!/usr/bin/env bash
# in short (trainers): Its GRPO loss pads between prompt and completion, so log-probs of shorter texts are wrong. No
# end token is trained on.
# guessed: the log-probs in the GRPO loss of Gensyn's GenRL are the model's for prompt and completion, whatever else is
# in the batch, and where a completion was finished, its end token is one of them
# seen: completions are kept as texts without special tokens and tokenized again, padded on the left as prompts are. So
# what is shorter than the longest of the batch has its padding between prompt and completion: its first token is
# predicted from a padding token, and the others at positions that are shifted. Here the log-prob of a first token is
# -0.09 at the longest, as it is alone, and -2.3 to -3.7 at the shorter ones. No end token is in the loss, so nothing in
# it is about when to stop
# with: gensyn-genrl 0.3.0, transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q transformers==5.23.0 torch==2.13.0 datasets==5.2.0 wandb==0.31.0 tensorboard==2.21.0
PIP_NO_DEPS=1 venv/bin/pip install -q gensyn-genrl==0.3.0 transformers==5.23.0 torch==2.13.0
venv/bin/python -W ignore - 2>errors.txt <<'EOF' || { cat errors.txt; exit 1; }
import torch
from genrl.trainer.grpo_trainer import GRPOLanguageTrainerModule, GRPOTrainerConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = "<pad> <end> <unk> question answer one two three four so it is".split()
base = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, pad_token="<pad>", eos_token="<end>", padding_side="left")
tokenizer.chat_template = "{{ messages[0]['content'] }} answer"
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                     num_attention_heads=2, initializer_range=0.5, pad_token_id=0, eos_token_id=1))


class Trainer(GRPOLanguageTrainerModule):
    def _get_per_token_logps(self, model, input_ids, attention_mask, length):
        found = super()._get_per_token_logps(model, input_ids, attention_mask, length)
        self.seen = input_ids, [row[mask[-length:] == 1] for row, mask in zip(found.detach(), attention_mask)]
        return found


class Game:  # one prompt and its completions
    get_stage_state = lambda self, stage: [{"prompt": [{"role": "user", "content": "question one"}]}]
    prepare_input = lambda self, state, stage: (state, {0: ("agent", 0, 0)})
    get_stage_actions = lambda self, stage: {"agent": {0: {0: self.texts}}}


settings = GRPOTrainerConfig(learning_rate=0, num_generations=6, minibatch_size=6, enable_gradient_checkpointing=False)
trainer, game = Trainer([model], settings, processing_class=tokenizer, log_with="none"), Game()
[game.texts], [ids] = trainer.generate(game.get_stage_state(0), return_completion_ids=True)
trainer.step(0, game, game, [{"agent": {0: {0: [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]}}}], 0)
rows, found = trainer.seen
print(f"of 6 completions with an end token: {sum(int(row[-1]) == 1 for row in ids)}, in the loss: {(rows == 1).sum()}")
assert any(row[-1] == 1 for row in ids) and (rows != 1).all() and (rows == 0).any()
for row, own in zip(rows, found):
    alone = row[row != 0]  # without the padding
    right = model(alone[None]).logits.log_softmax(-1)[0, 2:-1].gather(1, alone[3:, None])[:, 0].detach()
    print(f"{tokenizer.decode(row)} | in the loss {own[:3].tolist()} | alone {right[:3].tolist()}")
    wrong = (own - right).abs().max()
    assert wrong > 0.1 if (row == 0).any() else wrong < 1e-4
EOF
