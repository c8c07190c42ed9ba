"""No room of the laboratory draws with another room's pictures."""
import ast
from pathlib import Path

LAB = Path(__file__).parent


def imports(file):
    """Module and name of everything that a file imports from somewhere."""
    return [(node.module, alias.name) for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) for alias in node.names]


def test_no_room_imports_anothers_drawing():
    for file in LAB.glob("*/*.py"):
        for module, name in imports(file):
            own = f"lab.{file.parent.name}."
            if module.startswith("lab.") and module.count(".") > 1 and not module.startswith(own):
                assert not name.startswith("draw"), f"{file} imports {name} of {module}"


def test_what_the_rooms_share_knows_no_room():
    for file in (LAB / f"{name}.py" for name in ("statistics", "estimates", "updates", "heads")):
        assert not [module for module, _ in imports(file) if module.startswith("lab.") and module.count(".") > 1], file
