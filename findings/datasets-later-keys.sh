#!/usr/bin/env bash
# in short (rollouts): Dataset.from_list drops keys that the first row lacks: where the first rollout has no "error"
# or "tool_calls", all lose them.
# guessed: Dataset.from_list keeps a key that only later rows have, with None in the others, as pandas.DataFrame does
# seen: the first row decides which columns there are: what only later rows have is dropped, without a word. Rollouts
# whose first response has no "error" or "tool_calls" lose them all, and the order of the rows changes the data
# with: datasets 5.2.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q datasets==5.2.0
HF_HOME="$work/cache" HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 venv/bin/python -W ignore - <<'EOF'
import pandas
from datasets import Dataset

rollouts = [{"text": "a", "reward": 1.0}, {"text": "b", "reward": 0.0, "error": "cut off"}]
found = {
    "from_list": Dataset.from_list(rollouts),
    "from_list, backwards": Dataset.from_list(rollouts[::-1]),
    "from_pandas": Dataset.from_pandas(pandas.DataFrame(rollouts)),
}
for name, rows in found.items():
    print(f"{name}: {rows[:]}")
assert found["from_list"].column_names == ["text", "reward"]
assert found["from_list, backwards"]["error"][:] == ["cut off", None]
assert found["from_pandas"]["error"][:] == [None, "cut off"]
EOF
