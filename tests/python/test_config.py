"""Settings are read exactly or refused in words that say what to write instead."""

import contextlib
import copy
import pickle
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_offload import Config, ConfigError, OffloadError
from torch_offload.config import format_size, parse_size

BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS = {"": 1, "B": 1} | BINARY | DECIMAL


@given(count=st.integers(0, 10**6), unit=st.sampled_from(sorted(UNITS)), gap=st.sampled_from(["", " ", "  "]))
def test_whole_sizes_mean_count_times_unit(count, unit, gap):
    """Every unit, with and without a space, in any case."""
    for text in (f"{count}{gap}{unit}", f" {count}{gap}{unit.lower()} ", f"{count}{gap}{unit.upper()}"):
        assert parse_size(text) == count * UNITS[unit]


@given(count=st.decimals(0, 4096, places=3), unit=st.sampled_from(sorted(UNITS)))
def test_fractions_are_exact_down_to_the_byte(count, unit):
    """No rounding through binary floating point."""
    assert parse_size(f"{count}{unit}") == int(Decimal(count) * UNITS[unit])


@given(size=st.integers(0, 2**62))
def test_numbers_are_bytes(size):
    """A number needs no unit."""
    assert parse_size(size) == size
    assert parse_size(str(size)) == size


@given(text=st.text(max_size=12))
def test_any_text_is_a_size_or_a_config_error(text):
    """No other exception, no silent guess."""
    with contextlib.suppress(ConfigError):
        assert parse_size(text) >= 0


@pytest.mark.parametrize(
    "size", ["24G", "GiB", "", "1,5GiB", "1e9", "-3GiB", "0x10", "12 parsecs", "١GiB", 1.5, True, None, []]
)
def test_a_size_that_does_not_parse_names_the_accepted_forms(size):
    """The message can be acted on without the manual."""
    with pytest.raises(ConfigError, match=r"accepted: a whole number of bytes, or a string such as '24GiB'"):
        parse_size(size)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (3 << 40, "3 TiB")]
)
def test_sizes_are_written_in_the_largest_unit(size, text):
    """What messages show."""
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ramm": "1GiB"}, "unknown setting 'ramm'; did you mean 'ram'?"),
        ({"min_page_bytes": 0}, "did you mean 'min_paged_bytes'?"),
        ({"io": "auto"}, "did you mean 'io_engine'?"),
        (
            {"zzz": 1},
            "there are: ram, ssd, stripe_over, min_paged_bytes, page_elements, queue_depth, io_engine, report, live, "
            "device, device_kind, device_unpaged, activations, update_on, emulated_link, emulated_ssd, trace",
        ),
        ({"ram": 0}, "ram: Input should be greater than 0, got 0"),
        ({"ram": -1}, "ram: a size cannot be negative, got -1"),
        ({"ram": "24G"}, "ram: cannot read '24G' as a size"),
        ({"page_elements": 1000}, "page_elements: Input should be a multiple of 4096, got 1000"),
        ({"page_elements": 0}, "page_elements: Input should be greater than 0"),
        ({"queue_depth": 0}, "queue_depth: Input should be greater than or equal to 1, got 0"),
        ({"queue_depth": "8"}, "queue_depth: Input should be a valid integer, got '8'"),
        ({"io_engine": "aio"}, "io_engine: Input should be 'auto', 'uring_fixed', 'uring' or 'threads', got 'aio'"),
        ({"device": "cuda"}, "device: cannot read 'cuda' as a size"),
        ({"device_kind": "tpu"}, "device_kind: Input should be 'cuda' or 'emulated', got 'tpu'"),
        ({"ssd": 7}, "ssd: Input is not a valid path"),
        ({"trace": 7}, "trace.bool: Input should be a valid boolean, got 7"),
    ],
)
def test_bad_settings_are_config_errors(settings, message):
    """Unknown names come with the nearest one, bad values with what was expected and got."""
    with pytest.raises(ConfigError) as caught:
        Config(**settings)
    assert message in str(caught.value)
    assert isinstance(caught.value, OffloadError)
    assert isinstance(caught.value, ValueError)


def test_every_bad_setting_is_named_at_once():
    """One run shows all mistakes."""
    with pytest.raises(ConfigError) as caught:
        Config(ramm=1, queue_depth=0, io_engine="x")
    assert all(word in str(caught.value) for word in ("'ramm'", "queue_depth", "io_engine"))


def test_mappings_are_checked_like_arguments():
    """A Config read from a file obeys the same rules."""
    assert Config.model_validate({"ram": "2GiB"}) == Config(ram=2 << 30)
    with pytest.raises(ConfigError, match="did you mean 'ram'"):
        Config.model_validate({"rm": 1})


def test_a_config_does_not_change():
    """A changed copy is checked like a new one, and the original stays."""
    config = Config(ram="1GiB", ssd="~/scratch")
    with pytest.raises(ConfigError, match=r"replace\(ram=\.\.\.\)"):
        config.ram = 3
    assert config.replace(queue_depth=4) == Config(ram=1 << 30, ssd=Path.home() / "scratch", queue_depth=4)
    with pytest.raises(ConfigError, match="queue_depth"):
        config.replace(queue_depth=0)
    assert config.queue_depth == 16


def test_a_config_can_be_copied_and_pickled():
    """It travels to worker processes."""
    config = Config(ram="1.5GiB", min_paged_bytes="1MiB", io_engine="threads")
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
