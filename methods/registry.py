"""All credit functions, by name: those of mitigations.py, and of methods/ a file for each family."""
import mitigations  # noqa: F401  registers its own
from methods import (calculations, controls, groups, ktae, oracle, tokens, turns, values,  # noqa: F401  each its own
                     variants)
from methods.credit_function import CREDIT_FUNCTIONS

ORDER = ("none", "entropy_ratio", "learned_importance", "attention_credit", "reward_decomposition", "regrade_ablation",
         "outcome_conditional", "inverse_logprob", "entropy_masking", "entropy_weighted", "token_type", "curious",
         "advantage_reweighting", "prefix_tree", "tempo", "optimal_baseline", "gtpo", "ktae", "first_error",
         "causal_ablation", "vineppo", "dpo", "ppo", "value_change", "process_reward", "ppo_process",
         "turn_mean", "turn_vine", "turn_baseline",
         "random", "inverted", "shuffled", "share", "positives", "expert_iteration", "oracle")  # in --help; an unlisted one is last
for name in (*ORDER, *[own for own in CREDIT_FUNCTIONS if own not in ORDER]):
    CREDIT_FUNCTIONS[name] = CREDIT_FUNCTIONS.pop(name)  # moves it to the end
