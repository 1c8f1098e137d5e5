"""Writes the generated parts of docs/reference: public names, settings, options, replaced functions.

    python tools/reference.py            writes them
    python tools/reference.py --check    exits with status 1 where a file differs

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

import torch_offload
from torch_offload.cli.app import app
from torch_offload.config import Emulation, setting_fields
from torch_offload.hooks.replaced_functions import markdown_table

ROLE = re.compile(r":\w+:(?=`)")
REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
PART = re.compile(r"(<!-- generated: ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def settings(model: Any = None) -> str:
    """Return a table of the settings of a model."""
    rows = ["| setting | values | default | meaning |", "|---|---|---|---|"]
    for field in setting_fields(model) if model else setting_fields():
        values = ", ".join(f"`{choice}`" for choice in field.choices) or field.kind
        description = field.description.replace("``", "`")
        rows.append(f"| `{field.name}` | {values} | {f'`{field.default}`' if field.default else ''} | {description} |")
    return "\n".join(rows) + "\n"


def options(command: str) -> str:
    """Return a table of the options of a command."""
    parsed = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    rows = ["| option | meaning |", "|---|---|"]
    for option in parsed.params:
        if getattr(option, "hidden", False) or option.param_type_name == "argument":
            continue
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        metavar = "" if option.is_flag else f" `{option.metavar or 'VALUE'}`".replace("|", r"\|")
        rows.append(f"| {names}{metavar} | {(option.help or '').replace('``', '`')} |")
    return "\n".join(rows) + "\n"


def public_names() -> str:
    """Return a table of the names of the package: what each is, and whether it may still change."""
    rows = ["| name | | stability |", "|---|---|---|"]
    for name in sorted(torch_offload.__all__, key=str.lower):
        if name == "__version__":
            continue
        said = inspect.getdoc(getattr(torch_offload, name)) or ""
        summary = said.split("\n\n")[0].replace("\n", " ").replace("``", "`")
        stability = "experimental" if "Experimental:" in said else "stable"
        rows.append(f"| `torch_offload.{name}` | {ROLE.sub('', summary)} | {stability} |")
    return "\n".join(rows) + "\n"


PARTS: dict[str, Callable[[], str]] = {
    "public names": public_names,
    "settings": settings,
    "emulation": lambda: settings(Emulation),
    "replaced functions": markdown_table,
    **{
        f"options of {name}": lambda name=name: options(name)  # type: ignore[misc]
        for name in typer.main.get_command(app).commands  # type: ignore[attr-defined]
    },
}


def generated(text: str) -> str:
    """Return a document with its generated parts made anew.

    Raises:
        KeyError: If a part has an unknown name.
    """
    return PART.sub(lambda part: f"{part[1]}{PARTS[part[2]]()}{part[3]}", text)


def main() -> int:
    """Write or check every document."""
    is_check, stale = "--check" in sys.argv[1:], []
    for path in sorted(REFERENCE.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if generated(text) != text:
            stale.append(path.name)
            if not is_check:
                path.write_text(generated(text), encoding="utf-8")
    for name in stale:
        sys.stdout.write(
            f"docs/reference/{name} {'is not current: run python tools/reference.py' if is_check else 'written'}\n"
        )
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
