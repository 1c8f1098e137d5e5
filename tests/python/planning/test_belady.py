"""A replay moves what furthest-next-use replacement has to move, no more and no less.

Method: lists of uses so short that they can be followed by hand, lists at random against another replacement, and the
figures that the design gives for a whole model.
"""

import sys
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_offload.planning.belady import Memory, Pages, PageUse, Use

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
import optimum

pytestmark = pytest.mark.any_torch

USES = {"r": Use.read, "u": Use.update, "c": Use.create, "d": Use.drop, "s": Use.sink}


def pages_of(count: int, size_bytes: int = 1) -> Pages:
    pages = Pages()
    for _ in range(count):
        pages.add("parameter", size_bytes)
    return pages


def events_of(text: str) -> list[PageUse]:
    """`r0 u1` reads page 0 and updates page 1, each use by itself."""
    words = enumerate(text.split(), start=1)
    return [*(PageUse(USES[word[0]], int(word[1:]), group=group) for group, word in words), PageUse(Use.mark)]


def moved(text: str, limit_bytes: int, *, stored: bool = True) -> tuple[int, int]:
    events = events_of(text)
    memory = Memory(pages_of(10), limit_bytes, stored=range(10) if stored else ())
    [total] = memory.replay(events)
    return total.read_bytes, total.written_bytes


@pytest.mark.parametrize(
    ("uses", "limit_bytes", "expected"),
    [
        ("r0 r1 r0 r1", 2, (2, 0)),  # all stays
        ("r0 r1 r2 r0 r1", 2, (4, 0)),  # 2 replaces the later of 0 and 1
        ("u0 r1 u0", 1, (3, 1)),  # a dirty page is written and read again
        ("c0 r1 r0", 1, (2, 1)),  # what is created is not read first
        ("u0 d0 r1", 1, (2, 0)),  # what is dropped is not written
        ("c0 r1 d0", 1, (1, 0)),  # nor what will be dropped unread
        ("u0 s0 r0", 1, (2, 1)),  # the tier below gets it at once
        ("r0 s0 r0", 1, (2, 0)),  # unless it has it
    ],
)
def test_what_moves_is_what_a_hand_finds(uses, limit_bytes, expected):
    assert moved(uses, limit_bytes) == expected


def test_bytes_that_were_never_stored_are_not_read():
    """The first update of a state finds zeros."""
    assert moved("u0 r1 u0", 1, stored=False) == (1, 1)


def test_pages_of_a_group_are_not_evicted_for_each_other():
    """They go beyond the budget instead, and the replay says what would do; a subgroup ends before its group."""
    group = [PageUse(Use.read, page, group=1) for page in range(3)]
    memory = Memory(pages_of(3), 2, stored=range(3))
    list(memory.replay([*group, PageUse(Use.mark)]))
    assert (memory.needed_bytes, memory.peak_bytes) == (3, 3)
    subgroups = [PageUse(Use.read, page, group=1, subgroup=page) for page in range(3)]
    memory = Memory(pages_of(3), 2, stored=range(3))
    list(memory.replay([*subgroups, PageUse(Use.mark)]))
    assert (memory.needed_bytes, memory.peak_bytes) == (2, 2)


def test_temporaries_make_pages_leave():
    events = [PageUse(Use.update, 0, group=1), PageUse(Use.temporaries, other_bytes=2), PageUse(Use.mark)]
    memory = Memory(pages_of(1), 2, stored=[0])
    [total] = memory.replay(events)
    assert (total.written_bytes, memory.peak_bytes, memory.needed_bytes) == (1, 2, 2)


def test_a_memory_lists_what_the_one_below_has_to_do():
    """In order; what happens below takes no memory above."""
    below = PageUse(Use.update, 1, group=9, is_below=True)
    memory = Memory(pages_of(2), 1, stored=[0, 1])
    list(memory.replay([PageUse(Use.update, 0, group=1), below, PageUse(Use.sink, 0), PageUse(Use.mark)]))
    asked = [(event.use, event.page, event.is_below) for event in memory.asked]
    expected = [(Use.read, 0), (Use.update, 1), (Use.create, 0), (Use.mark, -1)]
    assert asked == [(use, page, False) for use, page in expected]


def least_recently_used(order: list[int], limit: int) -> int:
    """Reads under the other replacement that everybody knows."""
    memory: OrderedDict[int, None] = OrderedDict()
    reads = 0
    for page in order:
        if page not in memory:
            reads += 1
            if len(memory) == limit:
                memory.popitem(last=False)
        memory[page] = None
        memory.move_to_end(page)
    return reads


@given(order=st.lists(st.integers(0, 9), max_size=80), limit=st.integers(1, 8))
def test_no_replacement_reads_less(order, limit):
    """Nor does more memory ever cost reads, where pages have one size and are only read."""
    text = " ".join(f"r{page}" for page in order)
    reads, written = moved(text, limit)
    assert written == 0
    assert reads <= least_recently_used(order, limit)
    assert moved(text, limit + 1)[0] <= reads
    assert reads >= len(set(order))


@pytest.mark.parametrize(("share", "bytes_per_parameter"), [(0.25, 24.8), (0.5, 16.0), (0.7, 9.7), (1.0, 0.0)])
def test_a_whole_model_moves_what_was_found_before(share, bytes_per_parameter):
    """Twelve equal layers in fp32 under stock AdamW."""
    layers = [1 << 20] * 12
    total = sum(optimum.optimum(layers, share * 16 * sum(layers)))
    assert total / sum(layers) == pytest.approx(bytes_per_parameter, abs=0.1)


def test_an_activation_that_is_used_later_stays_before_a_clean_page():
    """It would be written and read, the page only read. Method: room for two of three pages, the activation's next use
    furthest, but not twice as far."""
    pages = Pages()
    activation, weight, other = (pages.add(kind, 10) for kind in ("activation", "parameter", "parameter"))
    uses = [PageUse(Use.create, activation, 1), PageUse(Use.read, weight, 2), PageUse(Use.read, other, 3)]
    uses += [PageUse(Use.read, weight, 4), PageUse(Use.read, activation, 5), PageUse(Use.mark)]
    (moved,) = Memory(pages, 20, stored=[weight, other]).replay(uses)
    assert (moved.read, moved.written) == ({"parameter": 30}, {})
