"""Writes names.json: the public names of `accelerate` and `accelerate.utils` 1.13. Run with an interpreter that has
accelerate==1.13.0:

    python write_reference.py

The names are read from the source, because some are imported only where another package is installed.
"""

import ast
import json
from importlib.util import find_spec
from pathlib import Path


def public_names(package):
    """What the package's __init__.py imports, under an `if` or not."""
    tree = ast.parse(Path(find_spec(package).origin).read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return sorted(name for name in names if not name.startswith("_"))


if __name__ == "__main__":
    names = {package: public_names(package) for package in ("accelerate", "accelerate.utils")}
    target = Path(__file__).parent / "names.json"
    target.write_text(json.dumps(names, indent=1) + "\n")
    print(f"wrote {target}")
