#!/usr/bin/env bash
# in short (graders): load_dataset("json") turns a column of texts that are all dates into timestamps, so every right
# answer is graded as wrong.
# guessed: a string in a .jsonl or .json file is that string in load_dataset("json"), so a gold answer in quotes is
# compared as it was written
# seen: where every string of a column is a date, as 1998-05-12 is, it becomes a column of timestamps: a grader gets a
# datetime, which equals no text, so each right answer is graded as wrong, silently. features= with a string comes too
# late and makes 1998-05-12 00:00:00 of it. One row that is no date keeps all as text, so a split or a filter decides.
# Dataset.from_list never guesses
# with: datasets 5.2.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q datasets==5.2.0
HF_HOME="$work/cache" HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 venv/bin/python -W ignore - <<'EOF'
import json

from datasets import Dataset, Features, Value, load_dataset

rows = [{"prompt": "A week after 5 May 1998?", "answer": "1998-05-12"},
        {"prompt": "The last day of January 2001?", "answer": "2001-01-31"}]
mixed = [*rows, {"prompt": "Which day is a week after a Monday?", "answer": "Monday"}]


def read(rows, **options):
    """The answers of a data set that was read from a file of these rows."""
    with open("rows.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return load_dataset("json", data_files="rows.jsonl", split="train", **options)["answer"][:]


text = Features({"prompt": Value("string"), "answer": Value("string")})
found = {"dates": read(rows), "with a day of the week": read(mixed), "with features": read(rows, features=text),
         "from_list": Dataset.from_list(rows)["answer"][:]}
for name, answers in found.items():
    print(f"{name}: {[str(answer) for answer in answers]}")
assert [str(answer) for answer in found["dates"]] == ["1998-05-12 00:00:00", "2001-01-31 00:00:00"]
assert not any(answer in ("1998-05-12", "2001-01-31") for answer in found["dates"])
assert found["with a day of the week"] == [row["answer"] for row in mixed]
assert found["with features"] == ["1998-05-12 00:00:00", "2001-01-31 00:00:00"]
assert found["from_list"] == ["1998-05-12", "2001-01-31"]
EOF
