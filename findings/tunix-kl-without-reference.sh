#!/usr/bin/env bash
# in short (trainers): At GRPOLearner's defaults the KL penalty has no pull towards the reference: its gradient is
# noise. "low_var_kl" has.
# guessed: at the defaults of GRPOLearner, beta 0.04, the KL penalty pulls the policy towards the reference model
# seen: the default kl_loss_mode is "kl", log p - log p_ref of the sampled tokens, and it is a term of the loss. The
# reference is a constant there, so any reference gives the same gradient: beta times the mean gradient of log p, whose
# expectation is 0, so noise. The logged kl is right. With "low_var_kl" the reference counts
# with: google-tunix 0.1.7, jax 0.10.2, flax 0.12.8
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q google-tunix==0.1.7 jax==0.10.2 flax==0.12.8
JAX_PLATFORMS=cpu venv/bin/python -W ignore - <<'EOF'
import jax
import jax.numpy as jnp
from flax import nnx
from tunix.rl import algo_core, common
from tunix.rl.grpo.grpo_learner import GRPOConfig

PROMPT, ANSWER = jnp.array([[5, 6], [5, 6]]), jnp.array([[1, 2, 3], [2, 1, 3]])


class Model(nnx.Module):
    """A model without context: one row of logits for seven tokens."""

    def __init__(self):
        self.logits = nnx.Param(jnp.array([0.0, 1.0, 2.0, 0.5, 0.0, -1.0, -1.0]))

    def __call__(self, tokens, positions=None, cache=None, attention_mask=None):
        return jnp.broadcast_to(self.logits[...], (*tokens.shape, 7)), None


def gradient(distance, **config):
    """The gradient of the loss, and the logged KL, with a reference that is this far below the policy's log-probs."""
    model = Model()
    logprob = jax.nn.log_softmax(model.logits[...])[ANSWER]
    example = common.TrainExample(
        prompt_ids=PROMPT, prompt_mask=PROMPT > 0, completion_ids=ANSWER, completion_mask=ANSWER > 0,
        advantages=jnp.array([1.0, -1.0]), old_per_token_logps=None, ref_per_token_logps=logprob - distance)
    settings = GRPOConfig(**config)
    settings.temperature = 1.0  # GRPOLearner takes it from the rollout's config

    def loss(model):
        return algo_core.grpo_loss_fn(model, example, settings, pad_id=0, eos_id=3)

    grads, aux = nnx.grad(loss, has_aux=True)(model)
    return grads["logits"][...], float(aux["kl"])


none, _ = gradient(jnp.zeros((2, 3)), beta=0.0)
far = jnp.array([[3.0, -2.0, 1.0], [4.0, 0.5, -1.0]])
for mode in ({}, {"kl_loss_mode": "low_var_kl"}):
    (at, kl), (away, far_kl) = gradient(jnp.zeros((2, 3)), **mode), gradient(far, **mode)
    print(f"{mode or 'defaults'}: logged kl {kl:.4f} at the reference, {far_kl:.4f} away from it; "
          f"the gradients differ by {jnp.abs(at - away).max():.6f}, from that without a penalty by "
          f"{jnp.abs(at - none).max():.6f} at the reference")
    if not mode:
        assert GRPOConfig().beta == 0.04 and GRPOConfig().kl_loss_mode == "kl"
        assert abs(far_kl - float(far.mean())) < 1e-5 and (at == away).all()
        p = jax.nn.softmax(Model().logits[...])
        score = (jax.nn.one_hot(ANSWER, 7) - p).mean((0, 1))  # the mean gradient of log p
        assert jnp.allclose(at - none, 0.04 * score, atol=1e-6)
    else:
        assert jnp.abs(at - away).max() > 0.01 and jnp.allclose(at, none, atol=1e-6)
EOF
