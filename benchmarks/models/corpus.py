"""English that is on every machine that can run this: docstrings of installed packages, those held out by package."""

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.cached_files import kept

TRAINING = ("torch", "sympy", "numpy", "mpmath", "huggingface_hub", "datasets", "setuptools", "pip", "mypy")
HELD_OUT = ("networkx", "pandas")
SHORTEST = 200  # characters; below, there is little but signatures


def docstrings(package: str) -> Iterator[str]:
    """Docstrings of all modules, classes and functions of a package, each text once."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the package {package}, whose texts are used, is not installed")
    seen: set[str] = set()
    for path in sorted(Path(spec.submodule_search_locations[0]).rglob("*.py")):
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= SHORTEST and text not in seen:
                    seen.add(text)
                    yield text


def _parsed(path: Path) -> ast.AST:
    """Files that are no Python of this version, such as templates, say nothing."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return ast.Module(body=[], type_ignores=[])


def write_texts(path: Path, packages: Sequence[str]) -> None:
    """Write the docstrings of packages to one file, which appears only when it is complete; a finished one stays."""

    def write(unfinished: Path) -> None:
        text = "\n\n".join(text for package in packages for text in docstrings(package))
        unfinished.write_text(text, encoding="utf-8")

    kept(path, write)
