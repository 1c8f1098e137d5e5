"""Which Python package may import which, and where state of the process may be.

Every rule takes a tree and returns what breaks it, one line each. Imports inside of functions count as well, and so do
those for type checkers.
"""

import ast
import graphlib
from collections.abc import Iterator

from python_rules import dotted, module_name
from source_tree import Tree, select

PACKAGE = "torch_offload"
# Each package may import those in the rows above its own; packages in one row know nothing of each other.
LAYERS = (
    ("hooks", "system", "optim"),
    ("activations",),
    ("reporting",),
    ("runtime",),
    ("moe",),
    ("integrations", "diagnostics"),
    ("planning", "compression"),
    ("launch",),
    ("cli",),
)
FOR_EVERYBODY = ("errors", "places", "config", "_C", "_compat", "_build_info")
SITE_HOOK = "torch_offload/launch/_site/"  # no part of the package: the interpreter finds it

HOLDER = "torch_offload/runtime/process.py"  # of all state that a process has once
PATCHES = "torch_offload/hooks/patches.py"  # assigns to attributes of other packages
LAUNCHER = "torch_offload/launch/runner.py"  # makes the process the script's: sys.argv, sys.path
REGISTRATIONS = {  # change containers of other packages: see docs/reference/replaced-functions.md
    "torch_offload/hooks/import_watcher.py",
    "torch_offload/integrations/quantizer_hook.py",
    "torch_offload/integrations/trainer.py",
    "torch_offload/system/environment.py",
    LAUNCHER,
}
INTERPRETER_CONTAINERS = {"sys.meta_path", "sys.path", "sys.path_hooks", "sys.modules", "os.environ"}
CONSTANT_CALLS = {
    "frozenset", "tuple", "re.compile", "logging.getLogger", "TypeVar", "Path", "functools.partial", "typer.Typer",
    "struct.Struct", "dataclasses.make_dataclass", "MappingProxyType", "TypeAdapter", "_compat.package_version", "cast",
}  # fmt: skip
MUTATORS = {"append", "add", "update", "pop", "clear", "extend", "insert", "remove", "setdefault", "discard"}


def _modules(tree: Tree) -> dict[str, tuple[str, ast.Module]]:
    """Return path and syntax of every module of the package, by its dotted name."""
    return {
        module_name(path): (path, ast.parse(text, path))
        for path, text in select(tree, f"{PACKAGE}/", suffixes=(".py",)).items()
        if not path.startswith(SITE_HOOK)
    }


def _imports(syntax: ast.Module, known: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and name of every module of the package that is imported; a symbol counts as its module."""
    for node in ast.walk(syntax):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full if full in known or alias.name in FOR_EVERYBODY else str(node.module)


def _package(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def layering(tree: Tree) -> list[str]:
    """A package imports only packages below it: see LAYERS."""
    rank = {package: number for number, row in enumerate(LAYERS) for package in row}
    modules = _modules(tree)
    broken = []
    for name, (path, syntax) in modules.items():
        own = _package(name)
        if own and own not in rank and own not in FOR_EVERYBODY and own != "__main__":
            broken.append(f"{path}: {own} is no package of LAYERS")
        for line, imported in _imports(syntax, set(modules)):
            other = _package(imported)
            if own not in (*rank, *FOR_EVERYBODY) or other in (own, *FOR_EVERYBODY):
                continue
            if other == "" and own != "cli":
                broken.append(f"{path}:{line}: imports from {PACKAGE} itself; name the module")
            elif other in rank and rank[other] >= rank.get(own, -1):
                broken.append(f"{path}:{line}: {own} must not import {imported}")
    return broken


def import_cycles(tree: Tree) -> list[str]:
    """No module imports itself by way of others."""
    modules = _modules(tree)
    graph = {
        name: {other for _, other in _imports(syntax, set(modules)) if other in modules and other != name}
        for name, (_, syntax) in modules.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [f"{' -> '.join(reversed(error.args[1]))}"]
    return []


def _module_values(syntax: ast.Module) -> Iterator[tuple[int, str, ast.expr]]:
    for node in syntax.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.lineno, node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.lineno, node.target.id, node.value


def _frozen_classes(modules: dict[str, tuple[str, ast.Module]]) -> set[str]:
    return {
        node.name
        for _, syntax in modules.values()
        for node in ast.walk(syntax)
        if isinstance(node, ast.ClassDef) and any("frozen=True" in ast.unparse(mark) for mark in node.decorator_list)
    }


def _is_stored(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store | ast.Del)


def _changed_names(syntax: ast.Module) -> set[str]:
    """Return names of containers that the module changes, and of classes whose attributes it assigns."""
    changed = set()
    for node in ast.walk(syntax):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            changed.add(dotted(node.func.value))
        elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            changed.add(dotted(node.value))
    return changed


def _imported_values(syntax: ast.Module, modules: dict[str, tuple[str, ast.Module]]) -> dict[str, str]:
    """Return the full name of every value of another module of the package, by the name it has in this one."""
    names = {}
    for node in ast.walk(syntax):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                own = alias.asname or alias.name
                if full in modules:
                    names |= {f"{own}.{name}": f"{full}.{name}" for _, name, _ in _module_values(modules[full][1])}
                elif node.module in modules:
                    names[own] = full
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in modules:
                    values = _module_values(modules[alias.name][1])
                    names |= {f"{alias.asname or alias.name}.{name}": f"{alias.name}.{name}" for _, name, _ in values}
    return names


def _class_containers(syntax: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield line, class and name of every container that is an attribute of a class and that a method changes.

    Annotations without a value, and attributes that a method of the class assigns on ``self``, are of each object.
    """
    for node in ast.walk(syntax):
        if isinstance(node, ast.ClassDef):
            own = {dotted(each) for each in ast.walk(node) if isinstance(each, ast.Attribute) and _is_stored(each)}
            changed = _changed_names(ast.Module([node], []))
            for line, name, value in _module_values(ast.Module(node.body, [])):
                is_field = isinstance(value, ast.Call) and dotted(value.func).lower() in ("field", "dataclasses.field")
                is_container = isinstance(value, ast.Dict | ast.List | ast.Set | ast.Call) and not is_field
                is_changed = f"self.{name}" in changed or f"cls.{name}" in changed
                if is_container and is_changed and f"self.{name}" not in own:
                    yield line, node.name, name


def process_state(tree: Tree) -> list[str]:
    """State of the process is in the one object of its holder; modules and classes hold constants.

    The rule goes by names: it does not see a container that is changed under another name (an alias, an argument, a
    return value), nor one that C++ or a library changes.
    """
    modules = _modules(tree)
    constant_calls = CONSTANT_CALLS | _frozen_classes(modules)
    broken = []
    for path, syntax in modules.values():
        imported = _imported_values(syntax, modules)
        for name in sorted(_changed_names(syntax) & set(imported)):
            if imported[name] != f"{module_name(HOLDER)}.PROCESS":
                broken.append(f"{path}: {imported[name]} is changed from another module; it belongs into {HOLDER}")
        broken += [
            f"{path}:{line}: {owner}.{name} is state of a class; make it in __init__"
            for line, owner, name in _class_containers(syntax)
        ]
        changed = _changed_names(syntax)
        classes = {node.name for node in ast.walk(syntax) if isinstance(node, ast.ClassDef)}
        for line, name, value in _module_values(syntax):
            is_made = isinstance(value, ast.Call) and dotted(value.func) not in constant_calls
            if (is_made and (path, name) != (HOLDER, "PROCESS")) or name in changed:
                broken.append(f"{path}:{line}: {name} is state of a module; it belongs into {HOLDER}")
        broken += [f"{path}: {name} is changed as a whole class; make an object" for name in sorted(classes & changed)]
        for node in ast.walk(syntax):
            if isinstance(node, ast.Global):
                broken.append(f"{path}:{node.lineno}: global {', '.join(node.names)}; it belongs into {HOLDER}")
            if isinstance(node, ast.FunctionDef) and any("cache" in ast.unparse(mark) for mark in node.decorator_list):
                broken.append(f"{path}:{node.lineno}: {node.name} keeps results for the whole process; keep an object")
    return broken


def _foreign_names(syntax: ast.Module) -> set[str]:
    """Return names of imported things of other packages, and of what is assigned from them or from sys.modules."""
    foreign = {"sys.modules"}
    for node in ast.walk(syntax):
        if isinstance(node, ast.Import):
            foreign |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != PACKAGE:
            foreign |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(syntax):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_alias(node.value, foreign):
            foreign.add(node.targets[0].id)
    return foreign


def _is_alias(value: ast.expr, foreign: set[str]) -> bool:
    """Whether a value is a module of another package, or an attribute of one: not what a call of it returns."""
    text = ast.unparse(value)
    if text.startswith(("sys.modules[", "sys.modules.get(", "importlib.import_module(", "import_module(")):
        return True
    return isinstance(value, ast.Name | ast.Attribute) and dotted(value).split(".")[0] in foreign


def foreign_assignments(tree: Tree) -> list[str]:
    """Only the patches of hooks/ assign to attributes of other packages.

    The rule goes by names inside of one module: it does not see what is reached by an argument, a call or a loop
    (`for module in modules: module.save = f`), nor attributes that are set on objects.
    """
    broken = []
    for path, syntax in _modules(tree).values():
        if path in (PATCHES, LAUNCHER):
            continue
        foreign = _foreign_names(syntax)
        for node in ast.walk(syntax):
            if isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "delattr"):
                broken.append(f"{path}:{node.lineno}: {dotted(node.func)}; functions are replaced by {PATCHES}")
            is_stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
            if is_stored and dotted(node).split(".")[0] in foreign:
                broken.append(f"{path}:{node.lineno}: {dotted(node)} is replaced; that belongs into {PATCHES}")
    return broken


def foreign_containers(tree: Tree) -> list[str]:
    """Containers of other packages are changed in the modules of REGISTRATIONS only.

    A container is a name in capitals, or one of `sys` and `os`. The rule does not see other names, and none that is
    reached by an argument or a call.
    """
    broken = []
    for path, syntax in _modules(tree).values():
        if path in REGISTRATIONS:
            continue
        foreign = _foreign_names(syntax)
        aliases = {
            target.id: dotted(node.value)
            for node in ast.walk(syntax)
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name) and dotted(node.value)
        }
        changed = {aliases.get(name, name) for name in _changed_names(syntax)}
        broken += [
            f"{path}: {name} is changed; that belongs into one of REGISTRATIONS"
            for name in sorted(changed)
            if name.split(".")[0] in foreign and (name.split(".")[-1].isupper() or name in INTERPRETER_CONTAINERS)
        ]
    return broken


RULES = (layering, import_cycles, process_state, foreign_assignments, foreign_containers)
