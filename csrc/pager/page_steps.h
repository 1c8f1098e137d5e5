// What a thread does next with a page that it wants somewhere: one table for all that threads want, and the changes of
// state that there are. Layer pager: includes nothing that moves pages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pager/page_table.h"

namespace torch_offload {

/// Where a thread wants a page to be.
enum class PageGoal : std::uint8_t {
    read,       // at its address
    write,      // the same, writable and dirty
    overwrite,  // the same, and what its bytes were does not matter
    update,     // in memory: busy in its frame's slot and the thread's own, or, where others hold it, as for write
    handover,   // busy without a frame and the thread's own, its bytes in the tier below
    eviction,   // on its way out of memory
    deferral,   // pending, not at its address
};
inline constexpr std::size_t kPageGoalCount = 7;

/// Whether the program has the page at its address afterwards.
constexpr bool is_access(PageGoal goal) noexcept { return goal <= PageGoal::overwrite; }

/// Whether a thread waits for what others do with a page, and for memory, or leaves it.
enum class Patience : std::uint8_t { wait, give_up };

enum class PageStep : std::uint8_t {
    finish,  // it is there
    mark,    // its flags change to what marked() says, and it is there
    take,    // it becomes busy, and moves on from the state in which it was
    load,    // it gets a frame, and its bytes or none
    settle,  // its deferred work comes first
    wait,    // until its word changes
    leave,   // it is not to be had now
    raise,   // it is lost
};

namespace page_steps {

constexpr PageStep wait_or_leave(Patience patience) noexcept {
    return patience == Patience::wait ? PageStep::wait : PageStep::leave;
}

/// Of a page at its address that is to be written to there. One that is undefined is dirty once the whole pin has
/// succeeded.
constexpr PageStep to_be_written(PageWord word) noexcept {
    if (!word.has(PageWord::kWritable)) return PageStep::take;
    return word.has(PageWord::kDirty | PageWord::kUndefined) ? PageStep::finish : PageStep::mark;
}

/// `is_own`: the thread is the one that will overwrite a page whose bytes are undefined.
constexpr PageStep to_address(PageGoal goal, PageWord word, bool is_own) noexcept {
    if (word.has(PageWord::kPending)) return PageStep::settle;
    if (word.has(PageWord::kUndefined) && !is_own) return PageStep::wait;
    if (word.is_absent()) return PageStep::load;
    switch (word.state()) {
        case PageState::loaded:
            return word.has(PageWord::kPoisoning) ? PageStep::wait : PageStep::take;
        case PageState::mapped:
            return goal == PageGoal::read ? PageStep::finish : to_be_written(word);
        case PageState::failed:
            return goal == PageGoal::overwrite ? PageStep::load : PageStep::raise;
        default:
            return PageStep::wait;
    }
}

/// Who gives up waits for what is on its way all the same: it takes nothing from others.
constexpr PageStep to_update(PageWord word, Patience patience) noexcept {
    if (word.has(PageWord::kUndefined)) return wait_or_leave(patience);
    if (word.is_absent()) return patience == Patience::wait ? PageStep::load : PageStep::leave;
    switch (word.state()) {
        case PageState::loaded:
            return PageStep::take;
        case PageState::mapped:
            return to_be_written(word);
        case PageState::failed:
            return PageStep::raise;
        default:
            return PageStep::wait;
    }
}

/// At its address it is held by somebody.
constexpr PageStep to_handover(PageWord word, Patience patience) noexcept {
    if (word.has(PageWord::kUndefined)) return wait_or_leave(patience);
    if (word.is_absent() || word.state() == PageState::loaded) return PageStep::take;
    switch (word.state()) {
        case PageState::mapped:
            return PageStep::leave;
        case PageState::failed:
            return PageStep::raise;
        default:
            return wait_or_leave(patience);
    }
}

constexpr PageStep to_eviction(PageWord word) noexcept {
    return word.in_memory() && word.pin_count() == 0 ? PageStep::take : PageStep::leave;
}

constexpr PageStep to_deferral(PageWord word) noexcept {
    if (word.has(PageWord::kPending)) return PageStep::finish;
    if (word.pin_count() != 0) return PageStep::leave;
    if (word.state() == PageState::busy) return PageStep::wait;
    return word.state() == PageState::mapped ? PageStep::take : PageStep::mark;
}

}  // namespace page_steps

/// What comes next for a page whose word is `word`.
constexpr PageStep next_step(PageGoal goal, PageWord word, Patience patience, bool is_own) noexcept {
    switch (goal) {
        case PageGoal::update:
            return page_steps::to_update(word, patience);
        case PageGoal::handover:
            return page_steps::to_handover(word, patience);
        case PageGoal::eviction:
            return page_steps::to_eviction(word);
        case PageGoal::deferral:
            return page_steps::to_deferral(word);
        default:
            return page_steps::to_address(goal, word, is_own);
    }
}

/// The word after PageStep::mark.
constexpr PageWord marked(PageGoal goal, PageWord word) noexcept {
    return word.with_flag(goal == PageGoal::deferral ? PageWord::kPending : PageWord::kDirty);
}

/// Whether a page may go from one state to the other.
constexpr bool is_legal(PageState from, PageState to) noexcept {
    constexpr auto one_of = [](auto... states) {
        return static_cast<std::uint8_t>(((1u << static_cast<unsigned>(states)) | ...));
    };
    using enum PageState;
    constexpr std::uint8_t kNext[kPageStateCount] = {
        one_of(loading, busy, mapped),                           // of zero; mapped: memory adopted at its address
        one_of(loading, busy),                                   // of stored
        one_of(zero, stored, loaded, failed),                    // of loading
        one_of(busy),                                            // of loaded
        one_of(zero, stored, loaded, mapped, evicting, failed),  // of busy
        one_of(busy),                                            // of mapped
        one_of(stored, loaded),                                  // of evicting
        one_of(loading, busy),                                   // of failed
    };
    return from == to || (kNext[static_cast<std::size_t>(from)] & one_of(to)) != 0;
}

/// How often a page went where it must not: a defect of this project, logged as well. Of the process.
std::uint64_t illegal_changes() noexcept;

}  // namespace torch_offload
