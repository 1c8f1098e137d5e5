"""What documents may name and no file may hold. Every rule takes a tree and returns what breaks it, one line each."""

import ast
import fnmatch
import posixpath
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from source_tree import Tree, select

CODE_FOLDERS = ("csrc/", "torch_offload/", "tests/", "examples/", "benchmarks/", "tools/")
BUILD_FILES = ("setup.py", "pyproject.toml", "Makefile", "CMakeLists.txt", ".ci/run", ".clang-format", ".gitignore")
OWN_FILE = re.compile(r"[\w-]+\.(h|cpp|cu|py|md|sh)$")
GENERATED = ("_build_info.py",)


def _is_code(path: str) -> bool:
    return (path.startswith(CODE_FOLDERS) and not path.endswith(".md")) or path in BUILD_FILES


def _is_self_test(path: str) -> bool:
    return path.startswith("tests/tidy/")  # its bad examples are full of names that must not exist


def words(tree: Tree) -> set[str]:
    """Return every identifier that occurs in code."""
    found: set[str] = set()
    for path, text in tree.items():
        if _is_code(path) and not _is_self_test(path):
            found.update(re.findall(r"[A-Za-z_]\w*", text))
    return found


def documents(tree: Tree) -> Tree:
    return {path: text for path, text in tree.items() if path.endswith(".md")}


def quoted_names(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of everything in single backticks outside fenced blocks."""
    is_fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        elif not is_fenced:
            for name in re.findall(r"(?<!`)`([^`]+)`(?!`)", line):
                yield number, name.strip()


def public_names(tree: Tree) -> set[str]:
    """Return what `torch_offload.` can be followed by: names bound in the package, its modules and subpackages."""
    found = {
        path.split("/")[1].split(".")[0]
        for path in select(tree, "torch_offload/", suffixes=(".py", ".pyi"))
        if not path.endswith("torch_offload/__init__.py")
    }
    for node in ast.walk(ast.parse(tree.get("torch_offload/__init__.py", ""))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)
    return found


def library_names(tree: Tree) -> list[str]:
    """Every `torch_offload.name` in a document, code examples included, exists."""
    public = public_names(tree)
    known = words(tree)
    broken = []
    for path, text in documents(tree).items():
        for number, line in enumerate(text.splitlines(), start=1):
            dotted = re.findall(r"(?<!torch\.ops\.)\btorch_offload((?:\.\w+)+)", line)
            imported = re.findall(r"\bfrom torch_offload import ([\w, ]+)", line)
            chains = [chain.strip(".").split(".") for chain in dotted]
            chains += [[name.strip()] for names in imported for name in names.split(",")]
            for first, *rest in chains:
                if first not in public or any(name not in known for name in rest):
                    broken.append(f"{path}:{number}: torch_offload.{'.'.join([first, *rest])} does not exist")
    return broken


def _looks_like_own_identifier(name: str) -> bool:
    """Whether a name can only be meant as an identifier: several humps, an underscore, `::` or `()`."""
    if not re.fullmatch(r"[A-Za-z_]\w*((::|\.)\w+)*(\(\))?", name) or name.isupper() or OWN_FILE.fullmatch(name):
        return False
    root = name.split(".")[0]
    if "." in name and not re.match(r"[A-Z]", root):
        return False  # a module of somebody else, such as torch.optim.AdamW, or a setting
    return bool(re.search(r"::|\(\)|_|[a-z][A-Z]|[A-Z][a-z]+\.", name.strip("_")))


def identifiers(tree: Tree) -> list[str]:
    """Every identifier in backticks in a document occurs in code; names of others are written with their module."""
    known = words(tree)
    broken = []
    for path, text in documents(tree).items():
        for number, name in quoted_names(text):
            is_ours = _looks_like_own_identifier(name) and not name.startswith("torch_offload")
            if is_ours and not set(re.findall(r"\w+", name)) <= known:
                broken.append(f"{path}:{number}: `{name}` does not occur in code")
    return broken


def _exists(tree: Tree, pattern: str) -> bool:
    """Whether a file, a folder, or a header and source named without their endings are there."""
    pattern = pattern.rstrip("/")
    return any(fnmatch.fnmatch(path, pattern) or path.startswith((pattern + "/", pattern + ".")) for path in tree)


def paths(tree: Tree) -> list[str]:
    """Every file or folder of this project that a document names exists; so does every target of a relative link."""
    names = {PurePosixPath(path).name for path in tree}
    folders = {path.split("/")[0] for path in tree if "/" in path}
    broken = []
    for path, text in documents(tree).items():
        for number, name in quoted_names(text):
            is_path = re.fullmatch(r"[\w.*-]+(/[\w.*-]*)+", name) is not None and name.split("/")[0] in folders
            is_missing_file = OWN_FILE.fullmatch(name) and name not in names and name not in GENERATED
            if is_missing_file or (is_path and not _exists(tree, name)):
                broken.append(f"{path}:{number}: `{name}` does not exist")
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            resolved = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
            if "://" not in target and not _exists(tree, resolved) and resolved not in tree:
                broken.append(f"{path}: the link to {target} leads nowhere")
    return broken


def make_targets(tree: Tree) -> list[str]:
    """Every `make target` that a document or script names is in the Makefile."""
    targets = set(re.findall(r"^([\w.-]+):(?!=)", tree.get("Makefile", ""), flags=re.MULTILINE))
    broken = []
    for path, text in tree.items():
        if path.endswith(".md"):
            calls = [(number, name) for number, name in quoted_names(text) if name.startswith("make ")]
        elif path == ".ci/run":
            calls = [
                (number, line.strip().removeprefix("section ")) for number, line in enumerate(text.splitlines(), 1)
            ]
        else:
            continue
        for number, call in calls:
            match = re.match(r"make ([a-z][\w-]*)$", call)
            if match and match[1] not in targets:
                broken.append(f"{path}:{number}: make {match[1]} is not a target of the Makefile")
    return broken


def open_ends(tree: Tree) -> list[str]:
    """Work left for later has an issue: TODO(#12)."""
    return [
        f"{path}:{number}: name the issue: TODO(#number)"
        for path, text in tree.items()
        if _is_code(path) and not _is_self_test(path)
        for number, line in enumerate(text.splitlines(), start=1)
        if re.search(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))", line)
    ]


RULES = (
    library_names,
    identifiers,
    paths,
    make_targets,
    open_ends,
)
