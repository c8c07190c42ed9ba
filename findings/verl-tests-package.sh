#!/usr/bin/env bash
# in short (trainers): verl installs a package `tests`, which hides a project's own folder tests/ without __init__.py.
# guessed: beside verl a project's own folder tests/ is its own
# seen: verl installs a package `tests` of 154 files with an __init__.py, its queue 60 more. A folder without that file
# comes second wherever it stands, so the project's tests.helpers is not found from its own root, and
# pytest's `-p tests.helpers` ends with an error. With an __init__.py of its own it is the project's again
# with: verl 0.9.1, TransferQueue 0.1.11
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
export PIP_NO_DEPS=1  # nothing of them is imported but the package in question
venv/bin/pip install -q verl==0.9.1 TransferQueue==0.1.11
mkdir -p project/tests
echo "WHERE = 'the project'" > project/tests/helpers.py
cd project
find() { ../venv/bin/python -c "print(__import__('tests.helpers').helpers.WHERE)" 2>&1 | tail -1; }
before=$(find)
touch tests/__init__.py
after=$(find)
installed=$(../venv/bin/python - <<'END'
from importlib.metadata import files

own = {name: {str(file) for file in files(name) if str(file).startswith("tests/")} for name in ("verl", "TransferQueue")}
print(*(len(found) for found in own.values()), len(own["verl"] & own["TransferQueue"]))
END
)
printf '%s\n' "files in tests/ of verl, of TransferQueue, of both: $installed" "before: $before" "after: $after"
test "$installed" = "154 60 0"
test "$before" = "ModuleNotFoundError: No module named 'tests.helpers'"
test "$after" = "the project"
