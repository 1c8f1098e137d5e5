"""An extension on the wrong torch says what to do instead of failing on a symbol.

Method: processes that lie about the torch they have.
"""

import subprocess
import sys
from importlib.metadata import requires, version

import pytest
import torch

import torch_offload
from torch_offload import _build_info, _compat


def import_error_after(preparation: str) -> str:
    """Import the package in a fresh process after `preparation`; return the message of the ImportError."""
    program = f"{preparation}\ntry:\n    import torch_offload\nexcept ImportError as error:\n    print(error)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_another_minor_version_is_refused_with_the_command_that_rebuilds():
    minor = _compat.parse_version(torch.__version__)[1]
    other = f"2.{minor - 1 if minor > _compat.OLDEST_TORCH[1] else minor + 1}.0"
    message = import_error_after(f"import torch\ntorch.__version__ = '{other}'")
    assert torch.__version__ in message
    assert other in message
    assert _compat.REBUILD_COMMAND in message


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0", "3.0.0"])
def test_a_torch_out_of_range_is_refused_with_the_range(version):
    message = import_error_after(f"import torch\ntorch.__version__ = '{version}'")
    assert _compat.supported_range() in message
    assert version in message


def test_a_missing_torch_is_named():
    message = import_error_after("import importlib.util\nimportlib.util.find_spec = lambda name: None")
    assert "needs torch" in message
    assert _compat.BUILD_COMMAND in message


def test_an_extension_that_was_not_built_is_named():
    message = import_error_after("import sys\nsys.modules['torch_offload._build_info'] = None")
    assert "not built" in message
    assert _compat.BUILD_COMMAND in message


def test_patch_releases_and_builds_of_one_minor_are_one():
    assert torch.__version__ == _build_info.BUILT_AGAINST_TORCH
    assert _compat.mismatch_reason(built_against="2.13.0+cpu", found="2.13.1+cu130") is None
    assert _compat.mismatch_reason(built_against="2.13.0+cpu", found="2.14.0a0+git1a2b3c4") is not None


@pytest.mark.parametrize("version", ["2", "two.point.one", ""])
def test_what_is_no_version_is_refused(version):
    with pytest.raises(ValueError, match="not a torch version"):
        _compat.parse_version(version)


def test_metadata_ask_for_the_versions_that_are_supported():
    (declared,) = [text for text in requires("torch-offload") if text.startswith("torch<")]
    assert set(declared.removeprefix("torch").split(",")) == set(_compat.requirement().removeprefix("torch").split(","))


def test_what_is_installed_asks_for_the_torch_it_was_built_against():
    pin = "torch=={}.{}.*".format(*_compat.parse_version(_build_info.BUILT_AGAINST_TORCH))
    assert pin in requires("torch-offload")
    assert version("torch-offload") == torch_offload.__version__


CALLS_OF_AN_IMPORT = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Record(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if isinstance(args[0], torch.Tensor):
            print(function.name(), args[0].numel(), args[0].dtype)
        return function(*args, **(kwargs or {}))

with Record():
    import torch_offload
"""


def test_an_import_calls_each_vector_function_before_several_threads_can():
    """Measured where it goes wrong: of 30 fresh processes whose first call of `cos` was made by two threads, 3 to 6 had
    other bits than their second call; of 110 after such calls none.
    """
    ended = subprocess.run([sys.executable, "-c", CALLS_OF_AN_IMPORT], capture_output=True, text=True, check=True)
    calls = set(ended.stdout.splitlines())
    for name in _compat.VECTOR_FUNCTIONS:
        assert {f"aten::{name} 1 torch.float32", f"aten::{name} 1 torch.float64"} <= calls
