"""No room of the laboratory draws with another room's pictures, and what all share knows no room."""
import ast
from pathlib import Path

LAB = Path(__file__).parent
SHARED = [LAB / f"{name}.py" for name in ("statistics", "estimates", "updates", "heads")]


def test_what_a_file_imports_from_a_room():
    """Guards against a picture of another room's, and a helper of all that depends on one of them."""
    for file in (*LAB.glob("*/*.py"), *SHARED):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("lab.") and node.module.count(".") > 1:
                own = node.module.startswith(f"lab.{file.parent.name}.")
                assert own or not any(alias.name.startswith("draw") for alias in node.names), file
                assert file not in SHARED, file
