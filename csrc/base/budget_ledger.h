// A budget of memory that processes of one machine share, in a page of memory that all of them see.
// Layer base: includes nothing of another layer.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/units.h"

namespace torch_offload {

/// The page itself. The budget is cut into quanta, and each quantum's word says who holds it: so what is held can never
/// be more than there is, and whatever a process was doing when it died, its quanta are those that bear its name. All
/// zero until it is laid out.
struct LedgerPage {
    static constexpr std::size_t kQuanta = 256;
    static constexpr std::size_t kMaxRanks = 64;
    /// A process (its id, when it was started, its slot), or one of these.
    using Holder = std::uint64_t;
    static constexpr Holder kNobody = 0;
    static constexpr Holder kEnded = 1;  // of a slot: its process ended

    struct Slot {
        std::atomic<Holder> holder;
        std::atomic<std::uint64_t> wanted_quanta;  // that its holder would take at once
    };

    std::atomic<std::uint64_t> quantum_bytes;
    std::atomic<std::uint64_t> ranks;  // processes that the budget is for: so many slots are used
    Slot slots[kMaxRanks];
    std::atomic<Holder> quanta[kQuanta];

    /// Pre: nobody else sees the page yet.
    /// Throws: InvalidArgument for a budget that cannot be cut, or for too many ranks.
    void lay_out(std::size_t budget_bytes, std::size_t rank_count);
    /// As many as can be divided among the ranks: the words that are used.
    std::span<std::atomic<Holder>> divided_quanta() noexcept;
    /// Of those; less than 256 bytes below what it was laid out with.
    std::size_t budget_bytes() const noexcept;
    /// What a rank has where all want as much as they can get.
    std::size_t equal_bytes() const noexcept;
};
static_assert(sizeof(LedgerPage) <= kSectorBytes && std::atomic<std::uint64_t>::is_always_lock_free);

/// This process's share of such a budget: some quanta for good, the others leased from the rest and given back.
/// Who has less than an equal part is entitled to it: who has more gives back what such a rank wants. Beyond its equal
/// part a rank gets what nobody else is entitled to and wants, once all ranks have come: memory of one that has not is
/// not known to be free. The quanta of a process that ended are taken away by whoever is short.
/// Nothing here waits but the constructor.
/// Threads: any.
class BudgetShare {
public:
    /// Takes a slot and `guaranteed_bytes`, in whole quanta, which others have to give back where they are leased.
    /// Pre: the page outlives it.
    /// Throws: InvalidArgument if all slots are taken, or for more than an equal part; OutOfTierMemory if the quanta
    /// have not come after `patience`.
    BudgetShare(LedgerPage& page, std::size_t guaranteed_bytes, std::chrono::milliseconds patience);
    /// Gives everything back. Nothing in a forked child, which has no share.
    ~BudgetShare();
    BudgetShare(const BudgetShare&) = delete;
    BudgetShare& operator=(const BudgetShare&) = delete;

    /// Takes whole quanta for `size_bytes` more, as many as it may have; what is missing is wanted from now on. Returns
    /// the bytes taken.
    std::size_t lease(std::size_t size_bytes) noexcept;
    /// Gives back whole quanta. Pre: they are leased, and no longer used.
    void give_back(std::size_t size_bytes) noexcept;
    /// What was wanted is no longer.
    void want_nothing() noexcept { want(0); }

    /// What lease() could not get lately.
    std::size_t wanted_bytes() const noexcept;
    /// What this share has to give back now, to who is entitled to it: only that with most quanta has to.
    std::size_t asked_bytes() const noexcept;
    /// Whether anybody else would take more than it has.
    bool is_wanted_by_others() const noexcept;
    /// Whether it has less than an equal part: what is missing will be given back by others.
    bool is_entitled() const noexcept { return held_bytes() < equal_bytes_; }

    std::size_t quantum_bytes() const noexcept { return quantum_bytes_; }
    std::size_t budget_bytes() const noexcept { return page_.budget_bytes(); }
    std::size_t equal_bytes() const noexcept { return equal_bytes_; }
    std::size_t guaranteed_bytes() const noexcept { return guaranteed_bytes_; }
    std::size_t held_bytes() const noexcept { return held_quanta_.load(std::memory_order_acquire) * quantum_bytes_; }
    std::size_t most_held_bytes() const noexcept {
        return most_quanta_.load(std::memory_order_acquire) * quantum_bytes_;
    }

private:
    struct Counts;

    void take_slot();
    bool take_slot_of(LedgerPage::Holder former) noexcept;
    void take_guaranteed(std::chrono::milliseconds patience);
    void leave() noexcept;
    std::size_t take(std::size_t quantum_count) noexcept;
    std::size_t allowed_quanta() const noexcept;
    void want(std::size_t quantum_count) noexcept;
    Counts count() const noexcept;
    bool reap_now() noexcept;
    bool reap_if_due() noexcept;
    void take_away(LedgerPage::Slot& slot, LedgerPage::Holder ended) noexcept;

    LedgerPage& page_;
    const std::size_t quantum_bytes_;
    const std::size_t ranks_;
    const std::size_t equal_bytes_;
    const std::size_t guaranteed_bytes_;
    std::size_t slot_ = 0;
    LedgerPage::Holder self_ = LedgerPage::kNobody;
    std::atomic<std::size_t> held_quanta_{0};
    std::atomic<std::size_t> most_quanta_{0};
    std::atomic<std::int64_t> last_reap_ns_{0};
};

}  // namespace torch_offload
