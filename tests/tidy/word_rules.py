"""One word, one meaning: the glossary and the code use the same ones, and retired words do not come back.

Every rule takes a tree and returns what breaks it, one line each.
"""

import re

from source_tree import Tree, select

GLOSSARY = "docs/concepts/glossary.md"
CODE = ("csrc/", "torch_offload/", "tests/cpp/", "tests/python/", "tests/gpu/", "benchmarks/", "examples/")
SUFFIXES = (".h", ".cuh", ".cpp", ".cu", ".py", ".pyi")
# Parts of identifiers and of prose, with the word to use.
RETIRED = {
    "counterpart": "backing segment",
    "open_use": "in_flight_use",
    "openuse": "InFlightUse",
    "lump": "quantum",
    "departure": "writeback",
    "depart_gradient": "write_back_gradient",
    "arrivals": "pending modules",
    "ambient": "autopage",
    "live_line": "status_line",
    "liveline": "StatusLine",
    "forecast": "predictor",
    "stripe_over": "ssd, several directories",
    "device_unpaged": "gpu_reserved",
    "update_on": "optimizer_device",
    "emulated_link": "emulation.link_rate",
    "raise_wall": "cap_memory",
    "awaited": "expected, outstanding",
    "has_room": "has_free_bytes",
    "make_room": "evict",
    "claim_budget": "reserve",
    "leaving_bytes": "evicting_bytes",
    "quality_arrived": "planes_resident",
    "announce_to": "on_routed",
    "choose_again": "refine",
    "quantis": "quantiz",
    "colour": "color",
    "initialis": "initializ",
    "normalis": "normaliz",
    "serialis": "serializ",
}

# Prefixes of constants that were given up for MIN_, MAX_ and DEFAULT_.
RETIRED_PREFIXES = re.compile(
    r"\b(?:_?(?:LEAST|MOST|FEWEST|USUAL)_[A-Z_]+|k(?:Least|Most|Fewest|Largest|Usual)[A-Z]\w*)"
)


def _code(tree: Tree) -> Tree:
    return select(tree, *CODE, suffixes=SUFFIXES)


def retired_words(tree: Tree) -> list[str]:
    """A word that was given up for another one is not used any more."""
    pattern = re.compile(f"(?:{'|'.join(RETIRED)})(?!-caps)", re.IGNORECASE)  # setpriv has --ambient-caps
    return [
        f"{path}:{number}: {match[0]}; write {RETIRED[match[0].lower()]}"
        for path, text in [*_code(tree).items(), *select(tree, "docs/", "README.md", suffixes=(".md",)).items()]
        for number, line in enumerate(text.splitlines(), start=1)
        for match in [pattern.search(line)]
        if match
    ]


def constants(tree: Tree) -> list[str]:
    """Constants are named MIN_, MAX_ and DEFAULT_, in C++ kMin, kMax and kDefault."""
    return [
        f"{path}:{number}: {name}"
        for path, text in select(tree, "torch_offload/", "csrc/", suffixes=SUFFIXES).items()
        for number, line in enumerate(text.splitlines(), start=1)
        for name in RETIRED_PREFIXES.findall(line)
    ]


def glossary_words(tree: Tree) -> list[str]:
    """Every word of the glossary stands in code: in an identifier, a comment or a message."""
    words = re.findall(r"^\| \*\*([^*]+)\*\* \|", tree.get(GLOSSARY, ""), flags=re.MULTILINE)
    code = re.sub(r"[_\-\s]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", " ".join(_code(tree).values()))).lower()
    return [
        f"{GLOSSARY}: {word} does not occur in code"
        for word in words
        if re.search(rf"\b{re.escape(re.sub(r'[-_ ]+', ' ', word.lower()))}(s|es)?\b", code) is None
    ]


RULES = (retired_words, constants, glossary_words)
