#!/usr/bin/env bash
# in short (trainers): dspy.GRPO trains on prompts and answers that it makes anew from parsed fields, not on those
# that were asked and written.
# guessed: dspy.GRPO gives its trainer, for each rollout, the prompt that the model was asked, the text that it wrote,
# and the metric's score, or format_failure_score where that text could not be parsed
# seen: both texts are made anew from the parsed fields. Where no adapter is set, rollouts ask in the layout of
# ChatAdapter, and training is on that of XMLAdapter: prompts that nobody asked and answers that nobody wrote, silently.
# With ChatAdapter for both, what the model wrote around the fields is still lost, and "07" is trained as 7, so right
# answers that differ become copies. A text that can't be parsed is asked for again in JSON; where that is right, the
# first prompt is paid 1 for an answer in the layout that the model had failed
# with: dspy 3.4.1
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q dspy==3.4.1
DSPY_CACHEDIR="$work/cache" venv/bin/python -W ignore - 2>errors.txt <<'EOF' || { cat errors.txt; exit 1; }
from contextlib import redirect_stdout

import dspy
from dspy.clients.provider import Provider, ReinforceJob
from dspy.teleprompt.grpo import GRPO


class Recorder(ReinforceJob):  # a trainer that only keeps what it is given
    initialize = terminate = lambda self: None
    get_status = lambda self: {"pending_batch_ids": [0]}
    def step(self, train_data, train_data_format): self.lm.given += train_data[0]["group"]


class Model(dspy.LM):  # a model whose texts are known beforehand, one for each call
    def __init__(self, texts):
        provider = Provider()
        provider.reinforceable, provider.ReinforceJob = True, Recorder
        super().__init__("openai/none", provider=provider)
        self.texts, self.asked, self.given = texts, [], []

    def __call__(self, prompt=None, messages=None, **settings):
        self.asked.append(messages)
        return [self.texts[len(self.asked) - 1]]


chat = "[[ ## thought ## ]]\nadd\n\n[[ ## answer ## ]]\n{}\n\n[[ ## completed ## ]]\n".format
for adapter in (None, dspy.ChatAdapter()):
    dspy.configure(adapter=adapter)  # four rollouts; the last one's first text can't be parsed, its second one is JSON
    model = Model(["Easy!\n\n" + chat("7"), chat("07"), chat("8"), "It is 7.", '{"thought": "add", "answer": 7}'])
    program = dspy.Predict("question -> thought, answer: int")
    program.set_lm(model)
    grpo = GRPO(metric=lambda example, made, trace=None: float(made.answer == 7), exclude_demos=True, num_threads=1,
                num_train_steps=1, num_rollouts_per_grpo_step=4)
    with open("progress.txt", "w") as bars, redirect_stdout(bars):
        grpo.compile(program, trainset=[dspy.Example(question="What is 3 + 4?").with_inputs("question")])
    texts = [row["completion"]["content"] for row in model.given]
    known = [(row["messages"] in model.asked, text in model.texts) for row, text in zip(model.given, texts)]
    for row, text, (asked, wrote) in zip(model.given, texts, known):
        print(f"{adapter and 'ChatAdapter'}: asked {asked}, written {wrote}, reward {row['reward']}, {text!r}")
    assert "JSON" in str(model.asked[4]) and "JSON" not in str(model.asked[:4]) and len(model.asked) == 5
    assert known == ([(True, False), (True, False), (True, True), (True, False)] if adapter else [(False, False)] * 4)
    assert [row["reward"] for row in model.given] == [1, 1, 0, 1] and texts[0] == texts[1] == texts[3] != texts[2]
EOF
