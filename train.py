"""GRPO (group relative policy optimization): the loop and the evaluation.

    python train.py --mitigation none                               the bundled model, three minutes
    python train.py --mitigation entropy_ratio                      another way to assign credit
    python train.py --model path/to/Qwen2.5-0.5B-Instruct --lr 1e-6 a real checkpoint
    python train.py --task guess                                    another task, in several turns
    python train.py --steps 0                                       only evaluate
    python train.py --resume runs/none-seed0                        continue a run that was stopped
    python train.py --config runs/none-seed0/config.json --seed 1   the same settings, another seed
    python train.py --on_step tracking:tensorboard                  hands each row of metrics.csv to
                                                                    a function in your tracking.py

--mitigation names a credit function: how GRPO's credit for a response goes to its tokens. (The word
is the original work's, github.com/Ja-Crispy/GRPO-Zero.) GRPO's formulas are in grpo.py.

Shapes: Q puzzles a step, G responses to each puzzle (a group), B = Q G responses, T tokens of the
longest response.

A run folder receives config.json, metrics.csv, credit/, samples.txt, checkpoint/, state.pt (for
--resume) and final.json. Read it with `python analyze.py runs/none-seed0`.
"""
import shlex
import time
from dataclasses import replace

import numpy as np

from grpo import assign_credit, compare, instrument, shape_reward, update
from methods.queries import Queries
from plumbing.metrics import add_step_columns, heldout_text, line_of, standard_error
from plumbing.terminal import Progress, command_line, one_sentence, stoppable
from rollout import Policy, draw_puzzles, draw_uniforms, respond, rollout
from sampler import Rules, rows_that_fit
from settings import Settings
from start import Run, start

# ---------------------------------------------------------------------------------------- the loop


def train(run: Run) -> None:
    """GRPO from step run.done + 1 on."""
    s, policy, began = run.s, run.policy, time.perf_counter()
    for step in range(run.done + 1, s.steps + 1):
        step_began = time.perf_counter()
        run.optimizer.set_lr(learning_rate(s, step))  # the same in every step, by default
        puzzles = draw_puzzles(run.training, s, step)  # Q
        batch = rollout(policy, puzzles, s, step)  # B responses and their rewards
        # What credit functions, heads and KLs may ask, by running the model again, if asked.
        batch.ask = Queries(policy, batch, s, step)
        reward = shape_reward(batch, s)  # (B,) the graded one, unless --shaping changes it
        batch.advantage = compare(batch, s.advantage, reward)  # (B,) GRPO's (r - mean) / std
        credit = assign_credit(batch, run.credit_function, s)  # (B, T)
        run.writer.hold_signals()  # until the row is written: half a step can't be resumed
        row = update(policy, run.optimizer, batch, credit, s)  # columns of metrics.csv
        measured = instrument(batch, credit, s)  # (B, T) each: what every token received
        add_step_columns(row, step, batch, measured, step_began)
        if step == s.steps or (s.eval_every and step % s.eval_every == 0):
            row |= measure_heldout(policy, run.heldout, s)
        run.writer.step(step, batch, measured, row)
        seconds_left = (time.perf_counter() - began) / (step - run.done) * (s.steps - step)
        print(line_of(row, s.steps, seconds_left), flush=True)
        run.row = row  # `measure_end` wants the last one


def learning_rate(s: Settings, step: int) -> float:
    """AdamW's learning rate in a step, from 1 on: it rises over --warmup_steps to --lr, and stays.
    With --linear_decay it falls from there, and would be 0 one step after the last."""
    warmup = max(1, s.warmup_steps)
    left = (s.steps + 1 - step) / (s.steps + 1 - warmup) if s.linear_decay else 1.0
    return s.lr * min(1.0, step / warmup, left)


# -------------------------------------------------------------------------------------- evaluation


def evaluate(policy: Policy, puzzles: list, G: int, s: Settings) -> np.ndarray:
    """Success (Q, G) of G responses to each of Q puzzles, with the same random numbers every
    time."""
    limit = s.max_new_tokens
    uniforms = draw_uniforms(0, "evaluation", len(puzzles), G, limit)  # (B, limit)
    prompts = [policy.prompt(puzzle) for puzzle in puzzles]
    fitting = rows_that_fit(policy.model, max(map(len, prompts)) + limit)  # responses, in memory
    at_once = max(1, max(fitting, s.questions * s.responses) // G)  # puzzles; a step has B, too
    success, progress = [], Progress("evaluating", len(uniforms))
    for i in range(0, len(puzzles), at_once):
        part, numbers = slice(i, i + at_once), uniforms[i * G : (i + at_once) * G]
        watch = progress.part(done=len(success), size=len(numbers), limit=limit)  # prints an ETA
        rules = Rules(greedy=s.eval_greedy, watch=watch)
        graded = respond(policy, puzzles[part], prompts[part], numbers, rules)
        success += [grade["answer"] for grade in graded.grades]  # 1.0 where the answer is right
    return np.array(success).reshape(len(puzzles), G)


def measure_heldout(policy: Policy, heldout: list, s: Settings) -> dict[str, float]:
    """Held-out success, one response per puzzle, and its standard error."""
    success = evaluate(policy, heldout, 1, s)[:, 0]
    return {"heldout_success": float(success.mean()), "heldout_stderr": standard_error(success)}


def measure_pass(policy: Policy, heldout: list, s: Settings) -> dict[str, float]:
    """The share of held-out puzzles that at least one of --pass_at sampled responses solves, and
    its standard error."""
    k = s.pass_at
    if k == 0:
        return {}
    print(f"measuring pass@{k}: {k} responses to each of {len(heldout)} held-out puzzles",
          flush=True)
    success = evaluate(policy, heldout, k, replace(s, eval_greedy=False))  # (Q, k)
    solved = success.max(1)
    print(f"pass@{k} {solved.mean():.1%}", flush=True)
    return {f"pass@{k}": float(solved.mean()), f"pass@{k}_stderr": standard_error(solved),
            f"pass@{k}_problems": len(solved)}


def measure_end(run: Run) -> dict[str, float]:
    """What final.json has: held-out success of the last row of metrics.csv, and pass@k."""
    row, s = run.row, run.s
    if "heldout_success" not in row:  # a run resumed with fewer steps ends where none was due
        row = measure_heldout(run.policy, run.heldout, s)
    return {"step": s.steps, "heldout_success": row["heldout_success"],
            "heldout_stderr": row.get("heldout_stderr", np.nan),  # a single puzzle has no error
            "heldout_problems": len(run.heldout),
            **measure_pass(run.policy, run.heldout[:128], s)}  # more would take long


# --------------------------------------------------------------------------- from the command line


def main() -> None:
    """Train as the command line says. What can't work is refused in one sentence, before anything
    is written."""
    with one_sentence("interrupted before training began"):
        run = start(command_line()[1:], usage=__doc__)
    s, folder, name = run.s, run.writer.run, shlex.quote(str(run.writer.run))
    interrupted = f"interrupted; continue with: python train.py --resume {name}"
    with one_sentence(interrupted, folder), stoppable(run.writer, run.done):
        if run.done == 0:
            print(f"measuring the start model on {len(run.heldout)} held-out puzzles", flush=True)
            run.row = {"step": 0} | measure_heldout(run.policy, run.heldout, s)
            print(f"start{heldout_text(run.row)}", flush=True)
            run.writer.start(run.row)
        train(run)
        run.writer.finish(measure_end(run))
        print(f"wrote {folder}" + (f"; read it with: python analyze.py {name}" if s.steps else ""))


if __name__ == "__main__":
    main()
