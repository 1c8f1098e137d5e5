"""The command line in this process."""

import sys

import pytest

from torch_offload.cli import app


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["torch-offload", *arguments])
    with pytest.raises(SystemExit) as ended:
        app.main()
    return ended.value.code
