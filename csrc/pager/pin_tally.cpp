#include "pager/pin_tally.h"

#include <array>
#include <utility>

namespace torch_offload {
namespace {

/// What a thread holds of one tally.
struct Own {
    const PinTally* tally = nullptr;
    std::size_t page_count = 0;
};
constexpr std::size_t kMaxTallies = 4;  // of further ones a thread's shares count as those of others

// The fault handler reads it: its memory must be there already.
[[gnu::tls_model("initial-exec")]] constinit thread_local std::array<Own, kMaxTallies> owns{};

Own* own_of(const PinTally& tally) noexcept {
    for (Own& own : owns) {
        if (own.tally == &tally) return &own;
    }
    return nullptr;
}

/// nullptr: there is no room.
Own* make_own_of(const PinTally& tally) noexcept {
    if (Own* own = own_of(tally)) return own;
    for (Own& own : owns) {
        if (own.page_count != 0) continue;
        own.tally = &tally;
        return &own;
    }
    return nullptr;
}

}  // namespace

// --- Shares -------------------------------------------------------------------------------------------------------

PinTally::Share::Share(PinTally& tally, std::size_t page_count, Holder holder) noexcept
    : tally_(&tally), thread_(&owns), page_count_(page_count) {
    if (Own* own = make_own_of(tally)) own->page_count += page_count;
    tally.begun_.fetch_add(page_count, std::memory_order_relaxed);  // whoever finds a page pinned finds this
    if (holder == Holder::update) tally.updated_.fetch_add(page_count, std::memory_order_release);
}

PinTally::Share::~Share() {
    if (!tally_) return;
    if (Own* own = thread_ == &owns ? own_of(*tally_) : nullptr; own && own->page_count >= page_count_) {
        own->page_count -= page_count_;
    }
    tally_->ended_.fetch_add(page_count_, std::memory_order_release);
}

// --- Waits --------------------------------------------------------------------------------------------------------

PinTally::Wait::Wait(PinTally& tally, const std::atomic<std::uint32_t>& word, std::uint32_t seen)
    : tally_(tally), word_(word), seen_(seen), page_count_(tally.own_count()) {
    if (page_count_ == 0) return;
    const std::lock_guard lock(tally.mutex_);
    next_ = std::exchange(tally.waits_, this);
}

PinTally::Wait::~Wait() {
    if (page_count_ == 0) return;
    const std::lock_guard lock(tally_.mutex_);
    Wait** link = &tally_.waits_;
    while (*link != this) link = &(*link)->next_;
    *link = next_;
}

PinTally::Fault::Fault(PinTally& tally) noexcept : tally_(tally), page_count_(tally.own_count()) {
    tally.faulting_.fetch_add(page_count_, std::memory_order_acq_rel);
}

PinTally::Fault::~Fault() { tally_.faulting_.fetch_sub(page_count_, std::memory_order_acq_rel); }

std::size_t PinTally::own_count() const noexcept {
    const Own* own = own_of(*this);
    return own ? own->page_count : 0;
}

bool PinTally::has_others() const {
    const std::uint64_t ended = ended_.load(std::memory_order_acquire);  // first: no more than have begun
    const std::uint64_t held = begun_.load(std::memory_order_relaxed) - ended;
    std::uint64_t stuck = own_count();
    if (held <= stuck) return false;  // the usual case
    stuck += faulting_.load(std::memory_order_acquire);
    const std::lock_guard lock(mutex_);
    for (const Wait* wait = waits_; wait; wait = wait->next_) {
        if (wait->word_.load(std::memory_order_acquire) == wait->seen_) stuck += wait->page_count_;
    }
    return held > stuck;
}

}  // namespace torch_offload
