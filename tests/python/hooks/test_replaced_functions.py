"""Functions of other packages: replaced only as listed, only where they have the expected signature, and put back."""

import copy
import dataclasses
import functools
import gc
import importlib
from pathlib import Path

import pytest
import torch
from support.coded_models import coded
from torch import nn

import torch_offload
from torch_offload import OffloadError
from torch_offload.hooks.patches import Patches, replaced
from torch_offload.hooks.replaced_functions import (
    MODULE_APPLY,
    REPLACED_FUNCTIONS,
    TENSOR_NUMPY,
    Until,
    markdown_table,
)
from torch_offload.integrations.trainer_optimizer import TrainerOptimizer
from torch_offload.launch.fit import Fit

ROOT = Path(__file__).resolve().parents[3]


def originals():
    """What lies under each listed name, by identity; classes are looked at without their bases."""
    importlib.import_module("peft.utils.hotswap")
    return {
        function.path: vars(owner).get(function.name)
        for function in REPLACED_FUNCTIONS
        for owner in [function.resolve_owner()]
    }


def names_of(until):
    return {function.path for function in REPLACED_FUNCTIONS if function.until is until}


@pytest.mark.parametrize("function", REPLACED_FUNCTIONS, ids=lambda function: function.path)
def test_every_listed_function_has_the_signature_that_its_replacement_expects(function):
    """With the installed versions; the newer torch runs the same test in an environment of its own."""
    function.check_signature()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": "_apply_all"}, "nothing by that name"),
        ({"parameters": ("self", "function")}, r"expected \(self, function, ...\), got \(self, fn, recurse\)"),
        ({"owner": "torch:Tensor", "name": "numpy"}, "a function without a signature"),
    ],
)
def test_another_signature_is_refused_before_anything_is_replaced(changes, expected):
    """Method: the same function described differently; the message names it, both signatures and the remedy."""
    before = nn.Module._apply
    patches = Patches()
    with pytest.raises(OffloadError, match=f"cannot replace .*{expected}.*install a version of torch"):
        patches.replace(dataclasses.replace(MODULE_APPLY, **changes), lambda original, *args: None)
    assert nn.Module._apply is before
    assert patches.functions == ()


def test_an_engine_replaces_what_is_listed_for_it_and_puts_everything_back(config):
    """Method: identity of what lies under every listed name, before, during and after an engine."""
    before = originals()
    model = torch_offload.wrap(nn.Linear(64, 64), config=config)
    during = originals()
    changed = {path for path in before if before[path] is not during[path]}
    assert changed == names_of(Until.ENGINE_CLOSES)
    torch_offload.unwrap(model)
    assert originals() == before


def test_one_function_is_replaced_for_one_call():
    with replaced(TENSOR_NUMPY, lambda original, tensor: "replaced"):
        assert torch.ones(1).numpy() == "replaced"
    assert torch.ones(1).numpy() == 1


def test_a_function_that_another_package_replaced_later_stays_theirs():
    """It was made from ours and still ends in the original."""
    patches = Patches()
    original = nn.Module._apply
    patches.replace(MODULE_APPLY, lambda inner, module, function: inner(module, function))
    ours = nn.Module._apply
    theirs = functools.partialmethod(lambda module, function: ours(module, function))
    nn.Module._apply = theirs
    patches.undo()
    try:
        assert vars(nn.Module)["_apply"] is theirs
        layer = nn.Linear(2, 2)
        assert layer._apply(lambda tensor: tensor) is layer
    finally:
        nn.Module._apply = original


def test_what_coded_experts_need_lasts_as_long_as_the_last_of_them():
    """Method: identity of what lies under every listed name; a copy of a model outlives the model."""
    before = originals()
    model = coded("mixtral")
    copy_of_it = copy.deepcopy(model)
    del model
    gc.collect()
    during = originals()
    assert {path for path in before if before[path] is not during[path]} == names_of(Until.NO_CODED_MODEL)
    del copy_of_it
    gc.collect()
    assert originals() == before


def test_what_a_report_callback_needs_lasts_as_long_as_it():
    before = originals()
    callback = torch_offload.ReportCallback()
    assert {path for path in before if before[path] is not originals()[path]} == names_of(Until.NO_REPORT_CALLBACK)
    del callback
    gc.collect()
    assert originals() == before


def test_what_a_launched_trainer_needs_is_put_back():
    """Its optimizer, and the split of its rows."""
    before = originals()
    chosen, fit = TrainerOptimizer("adamw"), Fit(torch_offload.Config())
    chosen.install()
    fit.install()
    assert {path for path in before if before[path] is not originals()[path]} == names_of(Until.PROCESS_ENDS)
    fit.uninstall()
    chosen.uninstall()
    assert originals() == before


def test_the_reference_lists_what_is_replaced():
    reference = (ROOT / "docs" / "reference" / "replaced-functions.md").read_text()
    assert markdown_table() in reference
