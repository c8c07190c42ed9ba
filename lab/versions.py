"""Do the newest releases of the packages work? Tries them in an environment of their own, which it removes.

    python -m lab.versions                              the newest ones that pip finds, and the fast tests
    python -m lab.versions --python python3.12 -- bridges        another Python, and these tests

What passes may be pinned in requirements.txt and tests/requirements.txt.
"""
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from plumbing.flags import new_parser
from plumbing.terminal import fail, one_sentence

ROOT = Path(__file__).parents[1]
FILES = "requirements.txt", "tests/requirements.txt", "lab/real/requirements.txt"


def names() -> list[str]:
    """The packages of all requirements, without their versions."""
    lines = [line for file in FILES for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    return [re.match(r"[\w.-]+", line)[0] for line in lines if re.match(r"\w", line)]


@one_sentence()
def main() -> None:
    """Install, test, and say what was tried."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the new environment")
    parser.add_argument("tests", nargs="*", help="arguments of pytest (default: -m 'not slow')")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        subprocess.run([given.python, "-m", "venv", folder], check=True)
        python = Path(folder, "bin", "python")
        print("installing", *names(), flush=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *names()], check=True)
        listed = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
        print(subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout,
              *[line for line in listed.splitlines() if line.partition("==")[0].lower() in names()], sep="\n", flush=True)
        words = given.tests or ["-m", "not slow"]
        if subprocess.run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words], cwd=ROOT).returncode:
            fail("these versions don't pass")


if __name__ == "__main__":
    main()
