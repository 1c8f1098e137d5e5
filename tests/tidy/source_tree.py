"""The project's text as a mapping from path to contents, and how to read C++ without a compiler."""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TEXT_SUFFIXES = {".h", ".cuh", ".cpp", ".cu", ".py", ".pyi", ".md", ".toml", ".txt", ".sh", ".json"}
HEADERS = (".h", ".cuh")
IMAGE_SUFFIXES = {".png", ".svg"}
TEXT_NAMES = {"Makefile", "CMakeLists.txt", "LICENSE", "run"}

# Paths relative to the root, as in "csrc/base/check.h".
Tree = dict[str, str]


class Function(NamedTuple):
    name: str
    first_line: int
    line_count: int


def load_tree() -> Tree:
    """Read every file that git tracks or would offer to track; of images, that they are there."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    tree = {}
    for path in sorted(set(listing.stdout.splitlines())):
        file = ROOT / path
        if file.is_file() and (file.suffix in TEXT_SUFFIXES or file.name in TEXT_NAMES):
            tree[path] = file.read_text(encoding="utf-8")
        elif file.is_file() and file.suffix in IMAGE_SUFFIXES:
            tree[path] = ""
    return tree


def select(tree: Tree, *folders: str, suffixes: tuple[str, ...]) -> Tree:
    """Return the part of the tree in these folders (each ends with a slash) with these endings."""
    return {path: text for path, text in tree.items() if path.startswith(folders) and path.endswith(suffixes)}


def cpp_files(tree: Tree, *folders: str) -> Tree:
    return select(tree, *(folders or ("csrc/",)), suffixes=(*HEADERS, ".cpp", ".cu"))


def includes(text: str) -> list[tuple[int, str, bool]]:
    """Return (line, path, whether in quotes) of every #include."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        match = re.match(r'\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', line)
        if match:
            found.append((number, match[1] or match[2], match[1] is not None))
    return found


_NOT_CODE = re.compile(
    r"""
    //(?:\\\n|[^\n])*                         # line comment
    | /\*.*?\*/                               # block comment
    | R"(?P<fence>[^()\\\s]{0,16})\(.*?\)(?P=fence)"  # raw string
    | "(?:\\.|[^"\\\n])*"                     # string
    | (?<![0-9A-Za-z_])'(?:\\.|[^'\\\n])+'    # character; not the separator in 1'000
    """,
    re.VERBOSE | re.DOTALL,
)


def blank(text: str, *, keep_strings: bool = False) -> str:
    """Replace comments and strings by spaces so that lines and columns stay."""

    def spaces(match: re.Match[str]) -> str:
        if keep_strings and not match[0].startswith("/"):
            return match[0]
        return re.sub(r"[^\n]", " ", match[0])

    return _NOT_CODE.sub(spaces, text)


def _without_directives(code: str) -> str:
    return re.sub(r"^[ \t]*#(?:\\\n|[^\n])*", lambda match: re.sub(r"[^\n]", " ", match[0]), code, flags=re.MULTILINE)


_SCOPE = re.compile(
    r"\b(namespace|class|struct|union|enum|extern)\b(?!.*\)\s*(const|noexcept|override|->|$))", re.DOTALL
)
_INITIALISER = re.compile(r"\)[^{};]*[^:]:(?!:)(?:.*,)?\s*[\w:<>]+\s*$", re.DOTALL)


def _opens_initialiser(header: str) -> bool:
    """Whether a brace after `header` starts a member's initial value: Type(int a) : first_{1}, second_{a} {...}."""
    return bool(_INITIALISER.search(header))


def functions(text: str) -> list[Function]:
    """Return the functions with a body, outermost only: what is inside one counts as its lines."""
    code = _without_directives(blank(text))
    found: list[Function] = []
    stack: list[str] = []
    header = ""
    start = 0
    for position, character in enumerate(code):
        inside = "function" in stack
        if character == "{":
            if inside:
                stack.append("block")
            elif _opens_initialiser(header):
                stack.append("initialiser")
            elif "(" in header and not _SCOPE.search(header) and not header.rstrip().endswith("="):
                stack.append("function")
            else:
                stack.append("scope")
                header = ""
        elif character == "}" and stack:
            closed = stack.pop()
            if closed == "function":
                first = code.count("\n", 0, start) + 1
                name = re.search(r"([\w:~]+(?:\s*operator\s*\S+?)?)\s*\(", header)
                found.append(Function(name[1] if name else "?", first, code.count("\n", start, position) + 1))
            if closed == "initialiser":
                header += "()"  # like a member initialised with parentheses
            elif not inside or closed == "function":
                header = ""
        elif not inside and "initialiser" not in stack:
            if character == ";" or (character == ":" and header.strip() in ("public", "protected", "private")):
                header = ""
            elif header or not character.isspace():
                if not header:
                    start = position
                header += character
    return found
