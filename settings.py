"""The settings of a run, which are flags of train.py: the default and the meaning of each.

plumbing/flags.py makes the flags of this class. A field's type is that of its default, and the
comment at the end of its line is the flag's text in --help. A credit function adds its own keyword
arguments to these flags.

Run it:  python train.py --help
"""
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """A run's settings, but for its credit function's flags. --resume has them from config.json."""

    # What is trained, on what:
    mitigation: str = "none"  # the credit function, by name: see the end of --help; none is GRPO
    model: str = ""  # a Hugging Face folder, Qwen2, Qwen3 or Llama; empty: the task's small one
    task: str = "countdown"  # the NAME of NAME_task.py, here or in tasks/, or a path ending in .py
    data: str = ""  # a file of puzzles, such as .jsonl or .parquet; empty: the task makes its own
    eval_data: str = ""  # a file of held-out puzzles; empty: a tenth of --data, or the task's own
    out: str = ""  # run folder, new or empty; unset: runs/<mitigation>[-<changed flags>]-seed<seed>
    lora_rank: int = 0  # of adapters to train, see extras/lora.py; 0: train the whole model
    lora_alpha: float = 32.0  # what adapters add is multiplied by this / rank
    adapter: str = ""  # a PEFT folder of the same rank and alpha to start from; empty: new adapters
    seed: int = 0  # of training: order of puzzles, sampling, adapters (evaluation draws by its own)
    # The algorithm:
    steps: int = 100  # 0 only evaluates
    questions: int = 12  # Q: puzzles per step
    responses: int = 8  # G: responses to each puzzle, its group
    max_new_tokens: int = 140  # a longer response is cut off
    temperature: float = 1.0  # policy: softmax(logits / this), in sampling, training and evaluation
    reward: str = "graded"  # or random: a coin toss replaces the grade in training, as a control
    reward_weights: str = ""  # change the weights in the task's PARTS, such as answer=1,format=0
    shaping: str = "none"  # or overlong, kl: subtracted from the reward, see methods/variants.py
    shaping_beta: float = 0.1  # weight of --shaping
    advantage: str = "grpo"  # or dr_grpo, rloo, maxrl, gdpo, step_mean: how rewards are compared
    normalize: str = "response"  # or step, none: where a reweighting's weights average 1
    loss: str = "ppo"  # or cispo: the clipped ratio is a constant; or gspo: a ratio per response
    loss_norm: str = "token"  # or sequence, constant, lambda: a token's share of the loss
    clip_low: float = 0.2  # no gradient for credit < 0 where the ratio is below 1 - clip_low
    clip_high: float = 0.2  # none for credit > 0 where it is above 1 + clip_high (DAPO: 0.28)
    updates_per_batch: int = 1  # optimizer steps on each batch
    old_logprob: str = "sampler"  # or update: whose log pi is pi_old in the ratio, see grpo.py
    kl: float = 0.0  # weight of the KL penalty to the start model, the reference
    kl_gradient: str = "k3"  # or unbiased: --kl's gradient: grpo.py, methods/variants.py
    skip_unfinished: bool = False  # no credit for a response that is cut off; --kl still acts on it
    # The optimizer:
    lr: float = 2e-4  # AdamW's learning rate
    warmup_steps: int = 0  # the first steps, in which the rate rises to lr
    linear_decay: bool = False  # after them the rate falls in equal steps, to nearly 0 at the end
    beta1: float = 0.9  # decay of AdamW's mean gradient
    beta2: float = 0.999  # decay of AdamW's mean squared gradient
    weight_decay: float = 0.0  # of AdamW
    max_grad_norm: float = 1.0  # the gradient is clipped to this norm
    # What is measured and kept:
    eval_every: int = 25  # steps between measurements of held-out success; 0: at start and end only
    eval_problems: int = 512  # held-out puzzles, one response each
    eval_greedy: bool = False  # that response takes the most probable tokens and is not sampled
    pass_at: int = 16  # k of pass@k, at the end, on at most 128 held-out puzzles; 0: not measured
    checkpoint_every: int = 0  # steps between checkpoints/step-...; 0: only the last
    state_every: int = 10  # steps between writing what --resume continues from; 0: at the end only
    # The machine:
    micro_batch: int = 32  # responses whose gradient is computed at once; fewer need less memory
    checkpoint_activations: bool = False  # less memory, more time: backward recomputes each layer
    device: str = "cpu"  # any torch device that has float64, such as cuda or cuda:1
    dtype: str = "float32"  # of the model's weights; the optimizer's are float32 in any case
    arithmetic: str = ""  # dtype of products; empty: --dtype, or float32 if the processor likes it
    optimizer_device: str = ""  # cpu: keeps master weights, gradients, moments there; else --device
