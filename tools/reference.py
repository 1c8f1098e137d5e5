"""Writes the generated parts of docs/reference: public names, settings, options, replaced functions.

    python tools/reference.py            writes them
    python tools/reference.py --check    changes nothing; exits with 1 and a diff where they are not as written

A part that no function here writes is an error.
"""

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from generated_parts import Document, differences, names_of_parts, replace_parts, write

import torch_offload
from torch_offload.cli.app import app
from torch_offload.config import Emulation, setting_fields
from torch_offload.hooks.replaced_functions import markdown_table

ROLE = re.compile(r":\w+:(?=`)")
ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"


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


def documents() -> list[Document]:
    """Return each page of the reference, as it should be.

    Raises:
        KeyError: If a page has a generated part that is not known.
    """
    pages = []
    for path in sorted(REFERENCE.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        pages.append((path, replace_parts(text, {name: PARTS[name] for name in names_of_parts(text)})))
    return pages


def main() -> None:
    """Write or check every page."""
    if "--check" not in sys.argv[1:]:
        write(documents())
    elif differing := differences(documents(), ROOT):
        sys.exit(f"{differing}\nrun: python tools/reference.py")


if __name__ == "__main__":
    main()
