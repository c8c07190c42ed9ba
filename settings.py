"""The settings of a run, which are flags of train.py: the default and the meaning of each.

plumbing/flags.py makes the flags of this class. A field's type is that of its default, and the
comment at the end of its line is the flag's text in --help. A credit function adds its own keyword
arguments to these flags.

Run it:  python train.py --help
"""
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What a run is told, but for its credit function's flags. --resume has it from config.json."""

    # What is trained, on what:
    mitigation: str = "none"  # credit function, see the end of --help; none: GRPO, all tokens alike
    model: str = ""  # a Hugging Face folder, Qwen2, Qwen3 or Llama; empty: the task's small one
    task: str = "countdown"  # the NAME of NAME_task.py, here or in tasks/, or a path ending in .py
    data: str = ""  # a file of puzzles, such as .jsonl or .parquet; empty: the task makes its own
    eval_data: str = ""  # a file of held-out puzzles; empty: a tenth of --data, or the task's own
    out: str = ""  # run folder, new or empty; unset: runs/<mitigation>[-<changed flags>]-seed<seed>
    lora_rank: int = 0  # of adapters to train, see extras/lora.py; 0: train the whole model
    lora_alpha: float = 32.0  # what adapters add is multiplied by this / rank
    adapter: str = ""  # a folder of PEFT to start from, of that rank and alpha; empty: new adapters
    seed: int = 0  # of the order of the puzzles, and of sampling
    # The algorithm:
    steps: int = 100  # 0 only evaluates
    questions: int = 12  # Q, puzzles per step
    responses: int = 8  # G, to each puzzle: its group
    max_new_tokens: int = 140  # a longer response is cut off
    temperature: float = 1.0  # policy: softmax(logits / this), in sampling, training and evaluation
    reward: str = "graded"  # random: a coin toss instead of the grade, while training; a control
    reward_weights: str = ""  # change the weights in the task's PARTS, such as answer=1,format=0
    shaping: str = "none"  # taken off the compared reward: length (overlong), KL to the start (kl)
    shaping_beta: float = 0.1  # weight of --shaping
    advantage: str = "grpo"  # how a reward is compared with its group's, those to the same puzzle
    normalize: str = "response"  # a method's weights average 1 per response or step, or stay (none)
    loss: str = "ppo"  # ppo: its clip; cispo: a clipped, constant ratio; gspo: a ratio per response
    loss_norm: str = "token"  # token: mean over the step's tokens; sequence, constant: see grpo.py
    clip_low: float = 0.2  # where the ratio is < 1 - this, credit < 0 has no gradient (not cispo)
    clip_high: float = 0.2  # where it is > 1 + this, credit > 0 has none (not cispo; DAPO: 0.28)
    updates_per_batch: int = 1  # optimizer steps on each batch
    old_logprob: str = "sampler"  # pi_old: that of the sampler, or recomputed by the first update
    kl: float = 0.0  # weight of the KL penalty to the start model, the reference
    kl_gradient: str = "k3"  # --kl's gradient: that of k3, or (unbiased) of KL(policy || reference)
    skip_unfinished: bool = False  # no credit for a response that is cut off; --kl still acts on it
    # The optimizer:
    lr: float = 2e-4  # AdamW's learning rate
    warmup_steps: int = 0  # n: step k of the first n has lr * k / n
    linear_decay: bool = False  # after the warm-up lr falls in equal steps, to nearly 0 in the last
    beta1: float = 0.9  # decay of AdamW's mean gradient
    beta2: float = 0.999  # decay of AdamW's mean squared gradient
    weight_decay: float = 0.0  # of AdamW
    max_grad_norm: float = 1.0  # the gradient is clipped to this norm
    # What is measured and kept:
    eval_every: int = 25  # steps between measurements of held-out success; 0: at start and end only
    eval_problems: int = 512  # held-out puzzles, one response each
    eval_greedy: bool = False  # that response takes the most probable tokens and is not sampled
    pass_at: int = 16  # k: final share of up to 128 held-out puzzles solved within k samples; 0: no
    checkpoint_every: int = 0  # steps between checkpoints/step-...; 0: only the last
    state_every: int = 10  # steps between writing what --resume continues from; 0: only at the end
    # The machine:
    micro_batch: int = 24  # responses in a pass, whole groups or parts of one; more need more memory
    checkpoint_activations: bool = False  # less memory, more time: backward recomputes each layer
    device: str = "cpu"  # any torch device that has float64, such as cuda or cuda:1
    dtype: str = "float32"  # of the model's weights; the optimizer's are float32 in any case
    arithmetic: str = ""  # dtype of products; empty: --dtype, but float32 where bfloat16 is slow
    optimizer_device: str = ""  # cpu: it holds master weights, gradients, moments; empty: --device
