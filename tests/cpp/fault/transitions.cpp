// The linker puts these functions before Page's own (--wrap): see CMakeLists.txt.
#include "fault/transitions.h"

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <new>
#include <stdexcept>

#include "base/check.h"
#include "pager/page_table.h"

namespace torch_offload::test {
namespace {

constexpr std::array<const char*, kPageStateCount> kNames = {"zero", "stored", "loading",  "loaded",
                                                             "busy", "mapped", "evicting", "failed"};

// From the row's state to the column's, in the order of PageState. A change of flags alone stays in its state.
constexpr bool kLegal[kPageStateCount][kPageStateCount] = {
    // zero stored loading loaded busy mapped evicting failed
    {true, false, true, false, true, true, false, false},   // zero: first touch; update below; a gradient adopted
    {false, true, true, false, true, false, false, false},  // stored: read; update below
    {true, true, true, true, false, false, false, true},    // loading: no zeros; not now; read; lost
    {true, true, false, true, true, false, false, true},    // loaded: taken back from a pin that failed; taken
    {true, true, false, true, true, true, true, true},      // busy: dropped; unmapped; mapped; written; cannot be moved
    {true, true, false, false, true, true, false, true},    // mapped: taken back from a pin, memory lost; taken
    {false, true, false, true, false, false, true, false},  // evicting: written; not written, or wanted again
    {false, false, true, false, true, false, false, true},  // failed: overwritten; 0xFF put there and taken away
};

using Counts = std::array<std::array<std::atomic<std::uint64_t>, kPageStateCount>, kPageStateCount>;

/// Shared with children.
Counts& counts() {
    static Counts* const shared = [] {
        void* const memory = ::mmap(nullptr, sizeof(Counts), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::runtime_error("no memory to count transitions in");
        return new (memory) Counts{};
    }();
    return *shared;
}

void note(PageState from, PageState to) noexcept {
    counts()[static_cast<std::size_t>(from)][static_cast<std::size_t>(to)].fetch_add(1, std::memory_order_relaxed);
}

template <typename Chosen>
std::string list(Chosen is_chosen) {
    std::string text;
    for (std::size_t from = 0; from < kPageStateCount; ++from) {
        for (std::size_t to = 0; to < kPageStateCount; ++to) {
            const std::uint64_t count = counts()[from][to].load();
            if (count == 0 || from == to || !is_chosen(from, to)) continue;
            text += concat(text.empty() ? "" : ", ", kNames[from], '>', kNames[to], ' ', count);
        }
    }
    return text;
}

}  // namespace

void forget_transitions() {
    for (auto& row : counts()) {
        for (auto& count : row) count.store(0);
    }
}

std::string seen_transitions() {
    return list([](std::size_t, std::size_t) { return true; });
}

std::string illegal_transitions() {
    return list([](std::size_t from, std::size_t to) { return !kLegal[from][to]; });
}

}  // namespace torch_offload::test

using torch_offload::Page;
using torch_offload::PageState;
using torch_offload::PageWord;

// Page::change and Page::enter, as the linker knows them.
extern "C" {
bool __real__ZN13torch_offload4Page6changeERNS_8PageWordES1_(Page*, PageWord&, PageWord) noexcept;
void __real__ZN13torch_offload4Page5enterENS_9PageStateEjj(Page*, PageState, std::uint32_t, std::uint32_t) noexcept;

bool __wrap__ZN13torch_offload4Page6changeERNS_8PageWordES1_(Page* page, PageWord& expected,
                                                             PageWord desired) noexcept {
    const PageState before = expected.state();
    const bool is_changed = __real__ZN13torch_offload4Page6changeERNS_8PageWordES1_(page, expected, desired);
    if (is_changed) torch_offload::test::note(before, desired.state());
    return is_changed;
}

// Called by who has the page to itself: nobody else changes its state meanwhile.
void __wrap__ZN13torch_offload4Page5enterENS_9PageStateEjj(Page* page, PageState state, std::uint32_t set_flags,
                                                           std::uint32_t clear_flags) noexcept {
    torch_offload::test::note(page->load().state(), state);
    __real__ZN13torch_offload4Page5enterENS_9PageStateEjj(page, state, set_flags, clear_flags);
}
}
