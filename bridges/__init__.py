"""The credit functions inside other trainers, for models that one machine does not train: trl.py, verl.py; and those
trainers' rollouts, recorded (recorder.py) and read here (rollouts.py). docs/trl.md tells how.

The modules of this clone have short names, such as grpo and rollout. A script that trains with TRL is often called so,
too. Here each finds his own.
"""
import sys
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Iterator

HERE = Path(__file__).parent
ROOT = HERE / "book" if (HERE / "book").is_dir() else HERE.parent  # installed by pip, or in a clone
NAMES = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir() and any(path.glob("*.py"))}
hidden: dict[str, ModuleType] = {}  # the clone's modules whose names are somebody else's outside own_modules


def find_own(name: str, *_: Any) -> ModuleSpec | None:
    """The clone's own module, wherever else there is one of the same name; None for a name that it does not have."""
    spec = PathFinder.find_spec(name, [str(ROOT)]) if name in NAMES else None
    if spec and spec.submodule_search_locations:
        spec.submodule_search_locations = [str(ROOT / name)]  # a folder without __init__.py would look in sys.path
    return spec


def is_own(spec: ModuleSpec | None) -> bool:
    """Whether a module is the clone's, or nobody's."""
    places = [spec.origin] if spec and spec.has_location else spec and spec.submodule_search_locations or []
    return all(ROOT in Path(place).resolve().parents for place in places)


@contextmanager
def own_modules() -> Iterator[None]:
    """Inside, this clone's modules have their names. Afterwards a name that a module of somebody else has, or would
    have, is his again."""
    finder = SimpleNamespace(find_spec=find_own)
    others = {name: sys.modules.pop(name) for name, module in [*sys.modules.items()]
              if name.partition(".")[0] in NAMES and not is_own(getattr(module, "__spec__", None))}
    sys.modules.update(hidden)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        taken = {name for name in NAMES - {"bridges"} if name in others or not is_own(PathFinder.find_spec(name))}
        hidden.update({name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in taken})
        sys.modules.update(others)


from bridges.arrays import credit  # noqa: E402, F401  it asks for own_modules
