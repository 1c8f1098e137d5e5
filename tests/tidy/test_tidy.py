"""The project keeps its own rules, and every rule can fail."""

import cpp_rules
import pytest
import python_rules
import structure_rules
import text_rules
import word_rules
from source_tree import Tree, functions, load_tree

RULES = [*cpp_rules.RULES, *python_rules.RULES, *structure_rules.RULES, *text_rules.RULES, *word_rules.RULES]


@pytest.fixture(scope="module")
def project() -> Tree:
    return load_tree()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.__module__}.{rule.__name__}")
def test_project_keeps_the_rule(rule, project):
    """Method: the rule reads every file that git would offer to track."""
    broken = rule(project)
    if broken:
        pytest.fail("\n  ".join([rule.__doc__, *broken]), pytrace=False)


def header(body: str = "", *, first: str = "// What it is. Layer base.") -> str:
    return f"{first}\n#pragma once\n{body}\n"


LONG_FUNCTION = "void f() {\n" + "    g();\n" * 80 + "}\n"
LONG_CONSTRUCTOR = (
    "A::A(int a)\n    : B(a), first_{a}, second_{std::max(a, 1)} {\n" + "    if (a) { g(); }\n" * 80 + "}\n"
)
LONG_PYTHON = "def f():\n" + "    g()\n" * 80
LIBRARY_INIT = {"torch_offload/__init__.py": "from torch_offload.engine import wrap\n", "torch_offload/engine.py": ""}

CLI = "torch_offload.cli.app"
COMMAND = {"torch_offload/cli/app.py": ""}
CYCLE = {
    "torch_offload/cli/a.py": "from torch_offload.cli import b",
    "torch_offload/cli/b.py": "def f():\n    from torch_offload.cli.a import g",
}

# (rule, a tree that breaks it, what the message must name)
BAD = [
    (cpp_rules.layering, {"csrc/base/a.h": '#include "pager/pager.h"'}, "base must not include pager/pager.h"),
    (cpp_rules.layering, {"csrc/device/a.h": '#include "storage/io.h"'}, "device must not include storage/io.h"),
    (cpp_rules.layering, {"csrc/autograd/a.cpp": '#include "optim/adamw.h"'}, "autograd must not include"),
    (cpp_rules.layering, {"csrc/pager/a.cpp": '#include "bindings/b.h"'}, "pager must not include"),
    (cpp_rules.layering, {"csrc/pager/a.cpp": '#include "arena.h"'}, 'write #include "layer/file.h"'),
    (cpp_rules.layering, {"csrc/extras/a.cpp": ""}, "csrc/extras/ is not a layer"),
    (cpp_rules.torch_headers, {"csrc/pager/a.cpp": "#include <ATen/ATen.h>"}, "csrc/pager/a.cpp:1"),
    (cpp_rules.torch_headers, {"csrc/codec/a.cpp": "#include <torch/extension.h>"}, "csrc/codec/a.cpp:1"),
    (cpp_rules.torch_headers, {"tests/cpp/base/a_test.cpp": "\n#include <Python.h>"}, "a_test.cpp:2"),
    (cpp_rules.dangerous_things, {"csrc/pager/a.cpp": "int r = ::mprotect(p, n, 0);"}, "csrc/device/address_space"),
    (cpp_rules.dangerous_things, {"csrc/pager/a.cpp": "sigaction(SIGSEGV, &a, nullptr);"}, "csrc/pager/a.cpp:1"),
    (cpp_rules.dangerous_things, {"csrc/storage/a.h": "#include <liburing.h>"}, "liburing belongs in"),
    (cpp_rules.dangerous_things, {"csrc/storage/a.cpp": "io_uring_submit(&ring);"}, "liburing belongs in"),
    (cpp_rules.dangerous_things, {"csrc/pager/a.cpp": "#include <cuda_runtime.h>"}, "the CUDA runtime"),
    (cpp_rules.dangerous_things, {"csrc/optim/a.cpp": "cudaMemcpyAsync(a, b);"}, "the CUDA runtime"),
    (cpp_rules.dangerous_things, {"csrc/pager/a.cu": "cudaMalloc(&a, b);"}, "the CUDA runtime"),
    (cpp_rules.dangerous_things, {"csrc/pager/a.cpp": "functions.cuMemUnmap(a, b);"}, "the CUDA runtime"),
    (cpp_rules.dangerous_things, {"csrc/autograd/hook.cpp": "x->key_set_ = y;"}, "key-set and storage surgery"),
    (cpp_rules.dangerous_things, {"csrc/optim/a.cpp": "s->set_data_ptr_noswap(p);"}, "key-set and storage surgery"),
    (cpp_rules.dangerous_things, {"csrc/optim/a.cpp": "TORCH_LIBRARY_IMPL(_, K, m) {}"}, "registering kernels"),
    (cpp_rules.banned_calls, {"csrc/base/a.cpp": 'printf("x");'}, "printf is banned"),
    (cpp_rules.banned_calls, {"csrc/base/a.cpp": "std::cout << 1;"}, "standard streams"),
    (cpp_rules.banned_calls, {"csrc/pager/a.cpp": "std::abort();"}, "ending the process"),
    (cpp_rules.banned_calls, {"csrc/pager/a.cpp": 'std::getenv("HOME");'}, "the environment"),
    (cpp_rules.file_sizes, {"csrc/base/a.h": "\n" * 251}, "251 lines, at most 250"),
    (cpp_rules.file_sizes, {"csrc/base/a.cpp": "\n" * 601}, "601 lines, at most 600"),
    (cpp_rules.function_lengths, {"csrc/base/a.cpp": LONG_FUNCTION}, "f has 82 lines"),
    (cpp_rules.function_lengths, {"csrc/base/a.cpp": LONG_CONSTRUCTOR}, "has 83 lines"),
    (cpp_rules.function_lengths, {"tests/cpp/base/a_test.cpp": LONG_FUNCTION}, "f has 82 lines"),
    (cpp_rules.header_openings, {"csrc/base/a.h": "#pragma once\n"}, "says what the file is"),
    (cpp_rules.header_openings, {"csrc/base/a.h": "// A thing.\n"}, "#pragma once is missing"),
    (cpp_rules.header_openings, {"csrc/optim/a.cuh": "// A thing.\n"}, "#pragma once is missing"),
    (cpp_rules.dead_headers, {"csrc/base/a.h": header(), "csrc/base/a.cpp": '#include "base/a.h"'}, "no other file"),
    (
        cpp_rules.dead_headers,
        {"csrc/base/a.h": "", "tests/cpp/base/a_test.cpp": '#include "base/a.h"'},
        "no other file",
    ),
    (cpp_rules.dead_headers, {"tests/cpp/support/fake.h": header()}, "tests/cpp/support/fake.h"),
    (cpp_rules.skipped_tests, {"tests/cpp/base/a_test.cpp": "TEST(A, B) { GTEST_SKIP(); }"}, "gives a reason"),
    (cpp_rules.skipped_tests, {"tests/cpp/base/a_test.cpp": "TEST(A, DISABLED_B) {}"}, "gives a reason"),
    (python_rules.file_sizes, {"torch_offload/a.py": "\n" * 601}, "601 lines, at most 600"),
    (python_rules.file_sizes, {"examples/a.py": "\n" * 81}, "81 lines, at most 80"),
    (python_rules.function_lengths, {"torch_offload/a.py": LONG_PYTHON}, "f has 81 lines"),
    (python_rules.banned_calls, {"torch_offload/a.py": "assert x"}, "assert vanishes"),
    (python_rules.environment_reads, {"torch_offload/a.py": "import os\nos.environ.get('A')"}, "torch_offload/a.py:2"),
    (python_rules.environment_reads, {"torch_offload/a.py": "from os import getenv"}, "torch_offload/a.py:1"),
    (python_rules.dead_modules, {"torch_offload/a.py": "import torch_offload.a"}, "no other module imports it"),
    (python_rules.skipped_tests, {"tests/python/test_a.py": "@pytest.mark.skip\ndef test(): ..."}, "test_a.py:1"),
    (python_rules.skipped_tests, {"tests/python/test_a.py": "pytest.mark.skipif(no_gpu)"}, "gives a reason"),
    (python_rules.skipped_tests, {"tests/python/test_a.py": "def test():\n    pytest.skip()"}, "test_a.py:2"),
    (python_rules.loose_equality, {"tests/python/test_a.py": "assert torch.equal(a, b)"}, "use same_bits"),
    (python_rules.loose_equality, {"tests/gpu/test_a.py": "x = torch.allclose"}, "test_a.py:1"),
    (python_rules.file_writes, {"torch_offload/a.py": "path.write_text('x')"}, "write files with"),
    (python_rules.file_writes, {"torch_offload/a.py": "with open(path, 'w') as file: ..."}, "a.py:1: open"),
    (python_rules.file_writes, {"torch_offload/a.py": "path.open(mode='ab')"}, "a.py:1: open"),
    (python_rules.terminal_output, {"torch_offload/a.py": "print(1)"}, "a.py:1: print: show it with"),
    (python_rules.terminal_output, {"torch_offload/a.py": "typer.echo(x)"}, "a.py:1: typer.echo"),
    (python_rules.terminal_output, {"torch_offload/a.py": "from typer import echo\necho(x)"}, "import it from"),
    (python_rules.terminal_output, {"torch_offload/a.py": "Console().print(x)"}, "a.py:1: Console"),
    (python_rules.terminal_output, {"torch_offload/a.py": "rich.text.Text.from_markup(x)"}, "from_markup"),
    (python_rules.terminal_output, {"torch_offload/a.py": "sys.stderr.write(x)"}, "a.py:1: sys.stderr.write"),
    (structure_rules.layering, {"torch_offload/hooks/a.py": f"import {CLI}", **COMMAND}, "hooks must not import"),
    (structure_rules.layering, {"torch_offload/system/a.py": f"def f():\n    import {CLI}", **COMMAND}, "a.py:2"),
    (structure_rules.layering, {"torch_offload/moe/a.py": "from torch_offload import wrap"}, "name the module"),
    (structure_rules.layering, {"torch_offload/extras/a.py": ""}, "extras is no package"),
    (structure_rules.layering, {"torch_offload/config.py": f"import {CLI}", **COMMAND}, "config must not import"),
    (structure_rules.import_cycles, CYCLE, "torch_offload.cli.a -> torch_offload.cli.b -> torch_offload.cli.a"),
    (structure_rules.process_state, {"torch_offload/a.py": "ENGINES = WeakSet()"}, "ENGINES is state of a module"),
    (structure_rules.process_state, {"torch_offload/a.py": "OPEN = []\ndef f():\n    OPEN.append(1)"}, "a.py:1"),
    (structure_rules.process_state, {"torch_offload/a.py": "class Slot: ...\nSlot.session = 1"}, "Slot is changed"),
    (structure_rules.process_state, {"torch_offload/a.py": "def f():\n    global x"}, "global x"),
    (structure_rules.process_state, {"torch_offload/a.py": "@functools.cache\ndef f(): ..."}, "f keeps results"),
    (structure_rules.foreign_assignments, {"torch_offload/a.py": "import torch\ntorch.save = f"}, "torch.save is"),
    (
        structure_rules.process_state,
        {"torch_offload/a.py": "OPEN = {}", "torch_offload/b.py": "from torch_offload.a import OPEN\nOPEN['x'] = 1"},
        "b.py: torch_offload.a.OPEN is changed from another module",
    ),
    (
        structure_rules.process_state,
        {"torch_offload/a.py": "OPEN = {}", "torch_offload/b.py": "from torch_offload import a\na.OPEN.update(x=1)"},
        "b.py: torch_offload.a.OPEN is changed from another module",
    ),
    (
        structure_rules.process_state,
        {"torch_offload/a.py": "class A:\n    seen = []\n    def f(self):\n        self.seen.append(1)"},
        "a.py:2: A.seen is state of a class",
    ),
    (structure_rules.foreign_assignments, {"torch_offload/a.py": "setattr(a, 'b', 1)"}, "a.py:1: setattr"),
    (
        structure_rules.foreign_assignments,
        {"torch_offload/a.py": "import sys\nm = sys.modules['torch']\nm.save = f"},
        "a.py:3: m.save is replaced",
    ),
    (
        structure_rules.foreign_assignments,
        {"torch_offload/a.py": "import torch\nT = torch.Tensor\nT.numpy = f"},
        "a.py:3: T.numpy is replaced",
    ),
    (
        structure_rules.foreign_containers,
        {"torch_offload/a.py": "from b import CALLBACKS\nCALLBACKS.append(1)"},
        "a.py: CALLBACKS is changed",
    ),
    (
        structure_rules.foreign_containers,
        {"torch_offload/a.py": "import b\ndef f():\n    known = b.KNOWN\n    known['x'] = 1"},
        "a.py: b.KNOWN is changed",
    ),
    (structure_rules.foreign_containers, {"torch_offload/a.py": "import sys\nsys.meta_path.insert(0, 1)"}, "meta_path"),
    (text_rules.library_names, {**LIBRARY_INIT, "README.md": "Call `torch_offload.warp(model)`."}, "warp"),
    (text_rules.library_names, {**LIBRARY_INIT, "README.md": "```python\nfrom torch_offload import rap\n```"}, "rap"),
    (text_rules.library_names, {**LIBRARY_INIT, "README.md": "`torch_offload.engine.Missing`"}, "engine.Missing"),
    (text_rules.identifiers, {"docs/design.md": "The `PageTable` knows."}, "`PageTable`"),
    (text_rules.identifiers, {"docs/design.md": "It calls `Pager::pin()`.", "csrc/pager/a.h": "class Pager;"}, "pin"),
    (text_rules.identifiers, {"csrc/storage/FORMAT.md": "see `page_id`"}, "`page_id`"),
    (text_rules.paths, {"README.md": "in `csrc/pager/gone.h`", "csrc/pager/a.h": ""}, "csrc/pager/gone.h"),
    (text_rules.paths, {"README.md": "in `gone.py`"}, "gone.py"),
    (text_rules.paths, {"README.md": "[design](docs/gone.md)"}, "leads nowhere"),
    (text_rules.make_targets, {"README.md": "run `make tset`", "Makefile": "test:\n"}, "make tset"),
    (text_rules.make_targets, {".ci/run": "section make tset", "Makefile": "test:\n"}, "make tset"),
    (text_rules.open_ends, {"csrc/base/a.h": "// TODO later"}, "csrc/base/a.h:1"),
    (word_rules.retired_words, {"csrc/pager/a.h": "find_counterpart();"}, "a.h:1: counterpart; write backing segment"),
    (word_rules.retired_words, {"torch_offload/a.py": "PURPOSE_COLOURS = 1"}, "write color"),
    (word_rules.constants, {"torch_offload/a.py": "_MOST_PAGES = 4"}, "a.py:1: _MOST_PAGES"),
    (word_rules.constants, {"csrc/pager/a.h": "constexpr int kMostPages = 4;"}, "a.h:1: kMostPages"),
    (word_rules.glossary_words, {"docs/concepts/glossary.md": "| **page latch** | A hold. |"}, "page latch does not"),
]


@pytest.mark.parametrize(("rule", "tree", "expected"), BAD, ids=lambda value: getattr(value, "__name__", None))
def test_rule_can_fail(rule, tree, expected):
    """Method: a tree of one or two files that breaks the rule, and what its message must name."""
    broken = rule(tree)
    assert broken
    assert any(expected in line for line in broken), broken


def test_every_rule_has_a_bad_example():
    assert {rule for rule, _, _ in BAD} == set(RULES)


GOOD = {
    "csrc/base/check.h": header("void check();"),
    "csrc/device/address_space.cpp": '#include "base/check.h"\nvoid f() { mmap(a, b); std::abort(); }',
    "csrc/pager/pager.h": header('#include "base/check.h"\nclass Pager { void pin(); };  // not printf("x")'),
    "csrc/pager/pager.cpp": '#include "pager/pager.h"\nauto s = "std::cout << mmap(1)"; int n = 1\'000\'000;',
    "csrc/optim/adamw_cuda.cu": "#include <cuda_runtime.h>\nvoid f() { cudaGetLastError(); }",
    "csrc/autograd/paged_storage.cpp": '#include <ATen/ATen.h>\n#include "pager/pager.h"\nauto k = t.key_set_;',
    "csrc/bindings/module.cpp": '#include <torch/extension.h>\n#include "base/check.h"\nTORCH_LIBRARY(a, m) {}',
    "tests/cpp/pager/pager_test.cpp": 'TEST(A, B) { GTEST_SKIP() << "no io_uring here"; }',
    "torch_offload/__init__.py": "from torch_offload.runtime.engine import wrap\n",
    "torch_offload/runtime/engine.py": "UNITS = {'kB': 1000}\ndef wrap(model):\n    raise E\n# TODO(#12): stripes",
    "tests/python/test_a.py": "@pytest.mark.skipif(no_gpu, reason='no GPU')\ndef test():\n    print(1)\n    assert 1",
    "Makefile": "test: build\n\nbuild:\n",
    "README.md": "`torch_offload.wrap`, `Pager::pin()`, `pager.h`, `csrc/pager/`, `make test`, `torch.optim.AdamW`, "
    "`O_DIRECT`, `loss` and [the pager](csrc/pager/pager.h)",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.__module__}.{rule.__name__}")
def test_rule_passes_what_is_in_order(rule):
    assert rule(GOOD) == []


def test_functions_are_found_where_they_are():
    """Method: shapes that brace counting gets wrong easily, with the lines each function spans."""
    text = """
namespace a {
struct sigaction ours() noexcept {
    return {};
}
class B : public C<decltype(f())> {
public:
    B(int a) : x_{a}, y_(a) {
    }
    int get() const { return '}'; }  // }
    static constexpr int kTable[] = {1, 2};
    enum class D : int { e };
};
template <typename T>
auto run(T t) -> std::vector<T> {
    auto inner = [&] { return R"(}})"; };
    if (t) {
        inner();
    }
    return {t};
}
}  // namespace a
"""
    assert [(function.name, function.line_count) for function in functions(text)] == [
        ("ours", 3),
        ("B", 2),
        ("get", 1),
        ("run", 8),
    ]
