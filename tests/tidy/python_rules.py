"""What Python files may call, read and weigh. Every rule takes a tree and returns what breaks it, one line each."""

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from source_tree import Tree, select

FILE_LINES = 600
FUNCTION_LINES = 70
EXAMPLE_LINES = 80
LIBRARY = "torch_offload/"
TERMINAL = ("torch_offload/system/terminal.py", "torch_offload/system/tables.py")
PROGRESS = ("torch_offload/reporting/progress.py", "torch_offload/reporting/status_line.py")  # bars and a row
SPEAKS_FOR_SCRIPTS = "torch_offload/launch/runner.py"  # what a script ends with, as Python says it
MAY_SHOW = (*TERMINAL, *PROGRESS)
SHOWING_CALLS = ("print", "echo", "secho", "Console", "Text", "Table", "from_markup", "render_str")
# TMPDIR, as tempfile reads it; what other programs and child processes are told.
SITE_HOOK = "torch_offload/launch/_site/sitecustomize.py"  # imported by the child processes of a launcher
MAY_READ_ENVIRONMENT = ("torch_offload/system/resources.py", "torch_offload/system/environment.py", SITE_HOOK)
MAY_WRITE_FILES = "torch_offload/system/atomic_files.py"
GENERATED = ("_C", "_build_info")
ALL_PYTHON = (LIBRARY, "tests/", "examples/", "benchmarks/", "setup.py")
DEMO = "examples/demo"  # the demo measures and reports besides training
DEMO_LINES = 200


def _python(tree: Tree, *folders: str) -> Tree:
    return select(tree, *(folders or (LIBRARY,)), suffixes=(".py",))


def _nodes(tree: Tree, *folders: str) -> Iterator[tuple[str, ast.AST]]:
    for path, text in _python(tree, *folders).items():
        for node in ast.walk(ast.parse(text, path)):
            yield path, node


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` for a name or attribute chain, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def file_sizes(tree: Tree) -> list[str]:
    """A module fits on a few screens, an example on one and a half."""
    broken = []
    for path, text in _python(tree, *ALL_PYTHON).items():
        limit = FILE_LINES
        if path.startswith("examples/"):
            limit = DEMO_LINES if path.startswith(DEMO) else EXAMPLE_LINES
        lines = len(text.splitlines())
        if lines > limit:
            broken.append(f"{path}: {lines} lines, at most {limit}")
    return broken


def function_lengths(tree: Tree) -> list[str]:
    """A function fits on a screen."""
    broken = []
    for path, node in _nodes(tree, *ALL_PYTHON):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION_LINES:
                broken.append(f"{path}:{node.lineno}: {node.name} has {lines} lines, at most {FUNCTION_LINES}")
    return broken


def banned_calls(tree: Tree) -> list[str]:
    """Library code raises typed errors."""
    broken = []
    for path, node in _nodes(tree):
        if isinstance(node, ast.Assert):
            broken.append(f"{path}:{node.lineno}: assert vanishes under -O: raise a typed error")
    return broken


def terminal_output(tree: Tree) -> list[str]:
    """Library code logs. What a command says passes by one module, which spells out what terminals would obey."""
    broken = []
    for path, node in _nodes(tree):
        if path in MAY_SHOW or not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        is_stream = (
            name.startswith(("sys.stdout.write", "sys.stderr.write", "sys.__std")) and path != SPEAKS_FOR_SCRIPTS
        )
        is_ours = name == "echo"  # of the terminal module, under its own name
        if is_stream or (name.rpartition(".")[2] in SHOWING_CALLS and not is_ours):
            broken.append(f"{path}:{node.lineno}: {name}: show it with torch_offload.system.terminal")
        if is_ours and "from torch_offload.system.terminal import" not in tree[path]:
            broken.append(f"{path}:{node.lineno}: {name}: import it from torch_offload.system.terminal")
    return broken


def environment_reads(tree: Tree) -> list[str]:
    """There is one way to read configuration."""
    broken = []
    for path, node in _nodes(tree):
        names = {"os.environ", "os.getenv", "os.environb"}
        imported = (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {a.name for a in node.names}
            & {
                "environ",
                "getenv",
                "environb",
            }
        )
        if (imported or dotted(node) in names) and path not in MAY_READ_ENVIRONMENT:
            line = getattr(node, "lineno", 0)
            broken.append(f"{path}:{line}: environment variables are read in {', '.join(MAY_READ_ENVIRONMENT)} only")
    return broken


def module_name(path: str) -> str:
    name = path.removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def _imported_modules(path: str, node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()
    base = node.module or ""
    if node.level:
        parts = [*PurePosixPath(path).parent.parts]
        parts = parts[: len(parts) - (node.level - 1)]
        base = ".".join([*parts, *([base] if base else [])])
    return {base} | {f"{base}.{alias.name}" for alias in node.names}


def dead_modules(tree: Tree) -> list[str]:
    """Every module of the library is imported by another one, run by one as a process, or is an entry point."""
    used: set[str] = set()
    for path, node in _nodes(tree):
        used |= {name for name in _imported_modules(path, node) if name != module_name(path)}
    scripts = re.findall(r'=\s*"(torch_offload[\w.]*):\w+"', tree.get("pyproject.toml", ""))
    scripts += re.findall(r'"-m", "(torch_offload[\w.]*)"', "\n".join(tree[path] for path in _python(tree)))
    entries = {"torch_offload", "torch_offload.__main__", module_name(SITE_HOOK), *scripts}
    return [
        f"{path}: no other module imports it"
        for path in _python(tree)
        if module_name(path) not in used | entries and PurePosixPath(path).stem not in (*GENERATED, "__init__")
    ]


def _is_skip_without_reason(node: ast.AST) -> bool:
    target = node.func if isinstance(node, ast.Call) else node
    name = dotted(target)
    keywords = {keyword.arg for keyword in node.keywords} if isinstance(node, ast.Call) else set()
    positional = len(node.args) if isinstance(node, ast.Call) else 0
    if name in ("pytest.mark.skip", "unittest.skip", "pytest.skip", "pytest.xfail"):
        return isinstance(node, ast.Call) and not (positional or "reason" in keywords)
    if name in ("pytest.mark.skipif", "pytest.mark.xfail"):
        return isinstance(node, ast.Call) and "reason" not in keywords
    return False


def skipped_tests(tree: Tree) -> list[str]:
    """A Python test that does not run, or may fail, says why."""
    broken = []
    for path, text in _python(tree, "tests/", "benchmarks/").items():
        syntax = ast.parse(text, path)
        called = {id(node.func) for node in ast.walk(syntax) if isinstance(node, ast.Call)}
        for node in ast.walk(syntax):
            is_bare_mark = dotted(node) in ("pytest.mark.skip", "pytest.mark.xfail") and id(node) not in called
            if is_bare_mark or _is_skip_without_reason(node):
                line = getattr(node, "lineno", 0)
                broken.append(f"{path}:{line}: a test that is skipped or may fail gives a reason")
    return broken


def loose_equality(tree: Tree) -> list[str]:
    """Tests compare bits: for `torch.equal` zeros of both signs are equal, for `allclose` far more is."""
    broken = []
    for path, node in _nodes(tree, "tests/python/", "tests/gpu/", "tests/wheel/"):
        if isinstance(node, ast.Attribute) and dotted(node) in ("torch.equal", "torch.allclose"):  # what it forbids
            broken.append(f"{path}:{node.lineno}: {dotted(node)}: use same_bits, same_values or assert_close")
    return broken


def file_writes(tree: Tree) -> list[str]:
    """One module of the package makes files appear; no other writes to one that it opens by its name."""
    broken = []
    for path, node in _nodes(tree):
        if path == MAY_WRITE_FILES or not isinstance(node, ast.Call):
            continue
        name = dotted(node.func).rpartition(".")[2] or getattr(node.func, "attr", "")
        modes = [argument.value for argument in _mode_arguments(node) if isinstance(argument, ast.Constant)]
        is_open = name in ("open", "fdopen") and any(
            isinstance(mode, str) and set(mode) & set("wax+") for mode in modes
        )
        if name in ("write_text", "write_bytes") or is_open:
            broken.append(f"{path}:{node.lineno}: {name}: write files with torch_offload.system.atomic_files")
    return broken


def _mode_arguments(call: ast.Call) -> list[ast.expr]:
    """Return what may be the mode of ``open(path, mode)`` or ``path.open(mode)``."""
    is_method = isinstance(call.func, ast.Attribute) and dotted(call.func.value) not in ("os", "io", "gzip")
    named = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    return [*call.args[0 if is_method else 1 :][:1], *named]


RULES = (
    file_sizes,
    function_lengths,
    banned_calls,
    environment_reads,
    dead_modules,
    skipped_tests,
    loose_equality,
    file_writes,
    terminal_output,
)
