"""The other published credit functions, a file for each family. Importing this package completes MITIGATIONS."""
import mitigations  # noqa: F401  registers its own
from methods import calculations, controls, groups, ktae, oracle, tokens, turns  # noqa: F401  each its own
from plumbing.registry import MITIGATIONS

ORDER = ("none", "curious", "outcome_conditional", "token_type", "inverse_logprob", "advantage_reweighting",
         "entropy_weighted", "entropy_ratio", "entropy_masking", "prefix_tree", "tempo", "optimal_baseline", "gtpo",
         "ktae", "reward_decomposition", "regrade_ablation", "first_error", "attention_credit", "causal_ablation",
         "vineppo", "dpo", "ppo", "value_change", "process_reward", "ppo_process", "learned_importance",
         "turn_mean", "turn_vine", "turn_baseline",
         "random", "inverted", "shuffled", "share", "positives", "expert_iteration", "oracle")  # in --help; yours last
for name in (*ORDER, *[own for own in MITIGATIONS if own not in ORDER]):
    MITIGATIONS[name] = MITIGATIONS.pop(name)  # moves it to the end
