"""What C++ files may include, call and weigh. Every rule takes a tree and returns what breaks it, one line each."""

import re
from fnmatch import fnmatch
from pathlib import PurePosixPath

from source_tree import HEADERS, Tree, blank, cpp_files, functions, includes

BELOW_TORCH = ("base", "device", "storage", "codec", "net", "pager")
WITH_TORCH = ("autograd", "optim")
# What each layer may include of this project; siblings never include each other.
MAY_INCLUDE = {
    "base": {"base"},
    "device": {"base", "device"},
    "storage": {"base", "storage"},
    "codec": {"base", "codec"},
    "net": {"base", "storage", "net"},
    "pager": {*BELOW_TORCH},
    **{layer: {*BELOW_TORCH, layer} for layer in WITH_TORCH},
    "bindings": {*BELOW_TORCH, *WITH_TORCH, "bindings"},
}
TORCH_HEADER = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h$")
TORCH_LAYERS = ("csrc/autograd/", "csrc/optim/", "csrc/bindings/", "tests/cpp/fake_gpu/")

# One file per dangerous thing: (what, how it is recognised in code, where it may be). Kernels are launched where they
# are written, in .cu files, which the build without CUDA leaves out.
ONLY_IN = (
    (
        "the CUDA runtime",
        re.compile(r"#\s*include\s*<cuda|\b(cuda|cu)[A-Z]\w*\s*\("),
        ("csrc/device/cuda", "csrc/base/*.cu", "csrc/codec/*.cu", "csrc/optim/*.cu"),
    ),
    ("liburing", re.compile(r"#\s*include\s*[<\"]liburing|\bio_uring_\w+\s*\("), ("csrc/storage/uring_engine",)),
    (
        "sockets",
        re.compile(r"(?<![\w.>])(socket|bind|listen|accept4?|connect|recv|sendmsg|[gs]etsockopt|getaddrinfo)\s*\("),
        ("csrc/net/socket", "csrc/net/channel"),
    ),
    (
        "mapping memory and handling signals",
        re.compile(r"(?<![\w.>])(mmap|munmap|mremap|mprotect|madvise|sigaction|signal)\s*\("),
        ("csrc/device/address_space",),
    ),
    (
        "key-set and storage surgery",
        re.compile(r"\bkey_set_\b|\bset_data_ptr\w*\s*\(|\bswap_data_ptr\w*\s*\("),
        ("csrc/autograd/paged_storage",),
    ),
    ("registering kernels", re.compile(r"\bTORCH_LIBRARY\w*\s*\("), ("csrc/autograd/dispatch_pager", "csrc/bindings/")),
)
BANNED = (
    ("printf", re.compile(r"(?<![\w.>])(printf|fprintf|puts|fputs|putchar)\s*\("), "use OFFLOAD_LOG"),
    ("standard streams", re.compile(r"\bstd::(cout|cerr|clog)\b"), "use OFFLOAD_LOG"),
    ("ending the process", re.compile(r"(?<![\w.>])(std::)?(abort|exit|_exit|terminate)\s*\("), "throw a typed error"),
    ("the environment", re.compile(r"\b(secure_)?getenv\s*\("), "settings come through Config"),
)
MAY_END_THE_PROCESS = (
    "csrc/device/address_space",  # a fault that belongs to nobody ends as it would without us
    "csrc/bindings/unraised_errors",  # the status of a program that has ended is changed
)

HEADER_LINES = 250
SOURCE_LINES = 600
FUNCTION_LINES = 70


def layer_of(path: str) -> str:
    return PurePosixPath(path).parts[1]


def _matches(tree: Tree, pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """Return (path, path:line) of every match outside comments and strings; includes count as code."""
    found = []
    for path, text in tree.items():
        code = re.sub(r'(#\s*include\s*)"([^"]*)"', r"\1<\2>", text)
        for number, line in enumerate(blank(code).splitlines(), start=1):
            if pattern.search(line):
                found.append((path, f"{path}:{number}"))
    return found


def layering(tree: Tree) -> list[str]:
    """Layers include downwards only, and by a path from csrc/."""
    broken = []
    for path, text in cpp_files(tree).items():
        layer = layer_of(path)
        if layer not in MAY_INCLUDE:
            broken.append(f"{path}: csrc/{layer}/ is not a layer; the layers are {', '.join(MAY_INCLUDE)}")
            continue
        for line, header, quoted in includes(text):
            if TORCH_HEADER.match(header) or not quoted:
                continue
            target = header.split("/")[0]
            if "/" not in header or target not in MAY_INCLUDE:
                broken.append(f'{path}:{line}: write #include "layer/file.h", not "{header}"')
            elif target not in MAY_INCLUDE[layer]:
                broken.append(f"{path}:{line}: {layer} must not include {header}")
    return broken


def torch_headers(tree: Tree) -> list[str]:
    """Only autograd, optim and bindings include torch; everything below builds and tests without it."""
    return [
        f"{path}:{line}: torch and Python headers belong in {', '.join(TORCH_LAYERS)}, not <{header}>"
        for path, text in cpp_files(tree, "csrc/", "tests/cpp/").items()
        for line, header, _ in includes(text)
        if TORCH_HEADER.match(header) and not path.startswith(TORCH_LAYERS)
    ]


def dangerous_things(tree: Tree) -> list[str]:
    """Each dangerous thing happens in one file."""
    return [
        f"{where}: {what} belongs in {' or '.join(allowed)}*"
        for what, pattern, allowed in ONLY_IN
        for path, where in _matches(cpp_files(tree), pattern)
        if not any(fnmatch(path, f"{place}*") for place in allowed)
    ]


def banned_calls(tree: Tree) -> list[str]:
    """Library code logs and throws; it does not print, exit or read the environment."""
    return [
        f"{where}: {what} is banned: {instead}"
        for what, pattern, instead in BANNED
        for path, where in _matches(cpp_files(tree), pattern)
        if not (what == "ending the process" and path.startswith(MAY_END_THE_PROCESS))
    ]


def file_sizes(tree: Tree) -> list[str]:
    """A header fits in the head, a source on a few screens."""
    broken = []
    for path, text in cpp_files(tree, "csrc/", "tests/cpp/").items():
        is_interface = path.endswith(HEADERS) and path.startswith("csrc/")
        limit = HEADER_LINES if is_interface else SOURCE_LINES
        lines = len(text.splitlines())
        if lines > limit:
            broken.append(f"{path}: {lines} lines, at most {limit}")
    return broken


def function_lengths(tree: Tree) -> list[str]:
    """A function fits on a screen."""
    return [
        f"{path}:{function.first_line}: {function.name} has {function.line_count} lines, at most {FUNCTION_LINES}"
        for path, text in cpp_files(tree, "csrc/", "tests/cpp/").items()
        for function in functions(text)
        if function.line_count > FUNCTION_LINES
    ]


def header_openings(tree: Tree) -> list[str]:
    """A header opens with what it is, then guards against being included twice."""
    broken = []
    for path, text in cpp_files(tree).items():
        if not path.endswith(HEADERS):
            continue
        if not text.startswith("// "):
            broken.append(f"{path}: the first line says what the file is")
        if "#pragma once" not in text:
            broken.append(f"{path}: #pragma once is missing")
    return broken


def dead_headers(tree: Tree) -> list[str]:
    """Every header is used by something else than its own source and its own test."""
    users: dict[str, set[str]] = {}
    for path, text in cpp_files(tree, "csrc/", "tests/cpp/").items():
        for _, header, quoted in includes(text):
            if quoted:
                users.setdefault(header, set()).add(path)
    broken = []
    for path in cpp_files(tree, "csrc/", "tests/cpp/"):
        if not path.endswith(HEADERS):
            continue
        name = path.removeprefix("csrc/").removeprefix("tests/cpp/")
        stem = PurePosixPath(path).stem
        base = path.removesuffix(PurePosixPath(path).suffix)
        own = {base + ".cpp", base + ".cu"}
        is_own_test = f"tests/cpp/{PurePosixPath(name).parent}/{stem}_test.cpp"
        if not users.get(name, set()) - own - ({is_own_test} if path.startswith("csrc/") else set()):
            broken.append(f"{path}: no other file includes it")
    return broken


def skipped_tests(tree: Tree) -> list[str]:
    """A C++ test that does not run says why."""
    broken = []
    for path, text in cpp_files(tree, "tests/cpp/").items():
        code = blank(text, keep_strings=True)
        for match in re.finditer(r"\bGTEST_SKIP\s*\(\s*\)(?!\s*<<\s*\S)|\b(?:TEST\w*)\s*\([^)]*\bDISABLED_", code):
            line = code.count("\n", 0, match.start()) + 1
            broken.append(f"{path}:{line}: a test that is skipped gives a reason: GTEST_SKIP() << why")
    return broken


RULES = (
    layering,
    torch_headers,
    dangerous_things,
    banned_calls,
    file_sizes,
    function_lengths,
    header_openings,
    dead_headers,
    skipped_tests,
)
