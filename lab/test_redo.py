"""A room that is redone by its commit, in a small repository of its own; and that nothing frozen was edited."""
import hashlib
import itertools
import shutil
import subprocess

import numpy as np
import pytest
from matplotlib.image import imsave

from lab import redo

MAKER = """from pathlib import Path
Path("table.md").write_text("".join(f"{2 * int(x)}\\n" for x in Path("rows.csv").read_text().split()))
Path("picture.png").write_bytes(Path("drawn").read_bytes())
"""
PIXELS = np.resize([1.0, 2.0], (20, 20))


def digest(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A repository with a room whose maker was taken out after its commit, and rows that have changed since."""
    def git(*words):
        return subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *words], cwd=tmp_path, check=True,
                              capture_output=True, text=True).stdout.strip()

    (tmp_path / "rows.csv").write_text("1\n2\n")
    (tmp_path / "make.py").write_text(MAKER)
    (tmp_path / "table.md").write_text("2\n4\n")
    imsave(tmp_path / "picture.png", PIXELS, vmin=0, vmax=4)
    shutil.copy(tmp_path / "picture.png", tmp_path / "drawn")
    git("init")
    git("add", ".")
    git("commit", "-m", "Freeze")
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "frozen.csv").write_text("room,commit,command,file,sha256\n" + "".join(
        f"toy,{git('rev-parse', 'HEAD')},python make.py,{name},{digest(tmp_path / name)}\n"
        for name in ("table.md", "picture.png")))
    (tmp_path / "make.py").unlink()
    (tmp_path / "rows.csv").write_text("7\n")
    monkeypatch.setattr(redo, "ROOT", tmp_path)
    return tmp_path


def rewrite(room, old, new):
    """Change the list of what is frozen."""
    file = room / "lab" / "frozen.csv"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def test_a_room_comes_out_again_and_what_differs_is_named(room, run_program, refusal, capsys):
    """Guards against today's rows, a maker of today's tree, and a published file that is compared with itself; a file
    that was edited, one that nothing makes, a picture of something else taken for other fonts, a maker that fails in
    silence, and a traceback in an unpacked archive or a shallow clone."""
    for words, said in ((["toy"], "table.md: equal\npicture.png: equal\n"), ([], "toy: python make.py\n")):
        run_program(redo, *words)
        assert capsys.readouterr().out == said
    (room / "table.md").write_text("2\n5\n")
    assert "not all of toy came out again" in refusal(redo, "toy")
    assert "table.md: differs\npicture.png: equal\n" in capsys.readouterr().out
    rewrite(room, "table.md", "other.md")
    for changed, said in ((1, "equal but for 0.25% of its pixels"), (30, "differs")):
        pixels = PIXELS.copy()
        pixels.flat[:changed] = 4 - 4 * (pixels.flat[:changed] > 1)
        imsave(room / "picture.png", pixels, vmin=0, vmax=4)
        assert "not all" in refusal(redo, "toy")
        assert f"other.md: is not made\npicture.png: {said}\n" in capsys.readouterr().out
    rewrite(room, "python make.py", "python -c pass")
    assert "not all" in refusal(redo, "toy") and "picture.png: is not made\n" in capsys.readouterr().out
    rewrite(room, "python -c pass", "python nothing.py")
    assert "python nothing.py failed: " in refusal(redo, "toy")
    rewrite(room, ",python nothing.py,", "0,python nothing.py,")
    assert "is not here: clone the repository with its whole history" in refusal(redo, "toy")
    shutil.rmtree(room / ".git")
    assert "is not here" in refusal(redo, "toy")


def test_what_is_frozen_is_as_it_was_published():
    """Guards against a figure that was edited by hand once its program was gone."""
    for row in itertools.chain(*redo.rooms().values()):
        assert digest(redo.ROOT / row["file"]) == row["sha256"], row["file"]
