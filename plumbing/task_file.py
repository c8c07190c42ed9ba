"""Finds the file of a task: a name, or a path to somebody's own file."""
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
REQUIRED = ("load", "check", "prompt", "grade", "roles", "show")  # what countdown_task.py says a task has


def load_task(name: str) -> ModuleType:
    """The module of a task: NAME_task.py beside train.py or in tasks/, or a file, where `name` ends in .py.

    ValueError where there is no such file, or where it lacks a function that every task has.
    """
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise FileNotFoundError(f"there is no task file {name}")
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        places = {ROOT / f"{name}_task.py": f"{name}_task", ROOT / "tasks" / f"{name}_task.py": f"tasks.{name}_task"}
        found = [dotted for file, dotted in places.items() if file.is_file()]
        if not found:
            raise ValueError(f"there is no task {name}: --task takes the NAME of a file tasks/NAME_task.py, or a path "
                             "that ends in .py")
        module = importlib.import_module(found[0])
    if missing := [function for function in REQUIRED if not hasattr(module, function)]:
        raise ValueError(f"the task {name} has no function {missing[0]}, which every task has")
    return module
