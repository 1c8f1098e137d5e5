#include "base/budget_ledger.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <thread>

#include "base/check.h"

namespace torch_offload {
namespace {

using Holder = LedgerPage::Holder;

// A holder in bits, from the highest: 22 of the process id, 36 of its start in ticks (21 years of them), 6 of the slot.
constexpr int kSlotBits = 6;
constexpr int kStartBits = 36;
constexpr Holder kStartMask = (Holder{1} << kStartBits) - 1;
static_assert(LedgerPage::kMaxRanks <= std::size_t{1} << kSlotBits);

/// Looking whether processes live costs some system calls for each.
constexpr std::int64_t kReapEveryNs = 100'000'000;

constexpr std::chrono::milliseconds kJoinSlice{10};  // others look at what is wanted about as often

std::int64_t now_ns() noexcept { return std::chrono::steady_clock::now().time_since_epoch().count(); }

/// Of a process.
struct Life {
    bool is_known = false;  // the system tells of it
    bool has_ended = false;
    std::uint64_t start = 0;  // in ticks since the machine's
};

/// The fields of /proc/PID/stat behind the name, which is in parentheses and may hold any characters.
Life parse_life(std::string_view line) noexcept {
    constexpr std::size_t kState = 0, kThreads = 17, kStart = 19;
    std::array<std::string_view, kStart + 1> fields;
    const std::size_t name_end = line.rfind(')');
    if (name_end == std::string_view::npos) return {};
    line.remove_prefix(std::min(name_end + 2, line.size()));
    for (std::string_view& field : fields) {
        field = line.substr(0, line.find(' '));
        line.remove_prefix(std::min(field.size() + 1, line.size()));
    }
    Life life;
    const std::string_view start = fields[kStart];
    life.is_known = std::from_chars(start.data(), start.data() + start.size(), life.start).ec == std::errc();
    // What others wait for has ended, unless it is only the first thread of a process that has more.
    const bool is_zombie = fields[kState] == "Z" || fields[kState] == "X";
    life.has_ended = is_zombie && (fields[kThreads] == "0" || fields[kThreads] == "1");
    return life;
}

Life life_of(std::uint64_t process) noexcept {
    char path[40];
    std::snprintf(path, sizeof path, "/proc/%llu/stat", static_cast<unsigned long long>(process));
    const int file = ::open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return {.is_known = errno == ENOENT, .has_ended = true};
    char line[1024];
    ssize_t size = 0;
    do {
        size = ::read(file, line, sizeof line);
    } while (size < 0 && errno == EINTR);
    const bool is_gone = size < 0 && errno == ESRCH;
    ::close(file);
    if (size <= 0) return {.is_known = is_gone, .has_ended = true};
    return parse_life({line, static_cast<std::size_t>(size)});
}

Holder make_holder(std::uint64_t process, std::uint64_t start, std::size_t slot) noexcept {
    return process << (kStartBits + kSlotBits) | (start & kStartMask) << kSlotBits | slot;
}

/// A process that the system does not tell of lives.
bool has_ended(Holder holder) noexcept {
    const Life life = life_of(holder >> (kStartBits + kSlotBits));
    if (!life.is_known) return false;
    return life.has_ended || (life.start & kStartMask) != (holder >> kSlotBits & kStartMask);
}

bool is_process(Holder holder) noexcept { return holder != LedgerPage::kNobody && holder != LedgerPage::kEnded; }

}  // namespace

void LedgerPage::lay_out(std::size_t budget_bytes, std::size_t rank_count) {
    OFFLOAD_CHECK(budget_bytes >= kQuanta * kSectorBytes, InvalidArgument, "a shared budget of ", budget_bytes,
                  " bytes is too small, at least ", kQuanta * kSectorBytes, " are needed");
    OFFLOAD_CHECK(rank_count > 0 && rank_count <= kMaxRanks, InvalidArgument, "a budget is shared by 1 to ", kMaxRanks,
                  " processes, not ", rank_count);
    ranks.store(rank_count, std::memory_order_release);
    quantum_bytes.store(budget_bytes / divided_quanta().size(), std::memory_order_release);
}

std::span<std::atomic<Holder>> LedgerPage::divided_quanta() noexcept {
    const std::size_t rank_count = ranks.load(std::memory_order_acquire);
    return std::span(quanta).first(kQuanta / rank_count * rank_count);
}

std::size_t LedgerPage::budget_bytes() const noexcept { return equal_bytes() * ranks.load(std::memory_order_acquire); }

std::size_t LedgerPage::equal_bytes() const noexcept {
    return kQuanta / ranks.load(std::memory_order_acquire) * quantum_bytes.load(std::memory_order_acquire);
}

/// Quanta by slot, read one after the other: what they add up to may never have been so. Those of who has left or ended
/// meanwhile are in none of them.
struct BudgetShare::Counts {
    std::size_t free = 0;
    std::array<std::size_t, LedgerPage::kMaxRanks> held{};
};

BudgetShare::BudgetShare(LedgerPage& page, std::size_t guaranteed_bytes, std::chrono::milliseconds patience)
    : page_(page),
      quantum_bytes_(page.quantum_bytes.load(std::memory_order_acquire)),
      ranks_(page.ranks.load(std::memory_order_acquire)),
      equal_bytes_(page.equal_bytes()),
      guaranteed_bytes_(round_up(guaranteed_bytes, quantum_bytes_)) {
    OFFLOAD_CHECK(guaranteed_bytes_ <= equal_bytes_, InvalidArgument, "a process may be guaranteed ", equal_bytes_,
                  " bytes of a budget that ", ranks_, " share, not ", guaranteed_bytes_);
    take_slot();
    try {
        take_guaranteed(patience);
    } catch (...) {
        leave();
        throw;
    }
}

BudgetShare::~BudgetShare() {
    if (self_ >> (kStartBits + kSlotBits) == static_cast<std::uint64_t>(::getpid())) leave();
}

void BudgetShare::take_slot() {
    if (take_slot_of(LedgerPage::kNobody) || take_slot_of(LedgerPage::kEnded)) return;
    reap_now();
    OFFLOAD_CHECK(take_slot_of(LedgerPage::kEnded) || take_slot_of(LedgerPage::kNobody), InvalidArgument, "all ",
                  ranks_, " places of the shared budget are taken by processes that run");
}

bool BudgetShare::take_slot_of(Holder former) noexcept {
    const auto process = static_cast<std::uint64_t>(::getpid());
    const std::uint64_t start = life_of(process).start;
    for (std::size_t i = 0; i < ranks_; ++i) {
        Holder expected = former;
        const Holder self = make_holder(process, start, i);
        if (!page_.slots[i].holder.compare_exchange_strong(expected, self)) continue;
        slot_ = i;
        self_ = self;
        return true;
    }
    return false;
}

void BudgetShare::take_guaranteed(std::chrono::milliseconds patience) {
    const std::size_t wanted = guaranteed_bytes_ / quantum_bytes_;
    const std::int64_t until_ns = now_ns() + std::chrono::nanoseconds(patience).count();
    while (true) {
        take(wanted - held_quanta_.load());
        if (held_quanta_.load() < wanted && reap_now()) continue;
        want(wanted - held_quanta_.load());
        if (held_quanta_.load() == wanted) return;
        OFFLOAD_CHECK(now_ns() < until_ns, OutOfTierMemory, "host memory tier: ", guaranteed_bytes_,
                      " bytes of the budget of ", page_.budget_bytes(), " bytes that ", ranks_,
                      " processes share were not given back in ", patience.count(), " ms, ", held_bytes(),
                      " were; raise `ram`");
        std::this_thread::sleep_for(kJoinSlice);  // others give back when they look
    }
}

/// The slot last: whoever holds quanta has one.
void BudgetShare::leave() noexcept {
    want_nothing();
    for (std::atomic<Holder>& quantum : page_.divided_quanta()) {
        Holder expected = self_;
        quantum.compare_exchange_strong(expected, LedgerPage::kNobody);
    }
    page_.slots[slot_].holder.store(LedgerPage::kNobody);
}

/// Returns how many were taken. Each process begins elsewhere.
std::size_t BudgetShare::take(std::size_t quantum_count) noexcept {
    std::size_t taken = 0;
    const std::span<std::atomic<Holder>> quanta = page_.divided_quanta();
    const std::size_t first = slot_ * quanta.size() / ranks_;
    for (std::size_t i = 0; i < quanta.size() && taken < quantum_count; ++i) {
        std::atomic<Holder>& quantum = quanta[(first + i) % quanta.size()];
        Holder expected = LedgerPage::kNobody;
        if (quantum.load(std::memory_order_relaxed) != expected) continue;
        taken += quantum.compare_exchange_strong(expected, self_) ? 1 : 0;
    }
    const std::size_t held = held_quanta_.fetch_add(taken) + taken;
    std::size_t most = most_quanta_.load();
    while (most < held && !most_quanta_.compare_exchange_weak(most, held)) {
    }
    return taken;
}

BudgetShare::Counts BudgetShare::count() const noexcept {
    Counts counts;
    for (const std::atomic<Holder>& quantum : page_.divided_quanta()) {
        const Holder holder = quantum.load(std::memory_order_acquire);
        if (holder == LedgerPage::kNobody) {
            ++counts.free;
        } else {
            ++counts.held[holder & (LedgerPage::kMaxRanks - 1)];
        }
    }
    return counts;
}

std::size_t BudgetShare::allowed_quanta() const noexcept {
    const Counts counts = count();
    const std::size_t equal = equal_bytes_ / quantum_bytes_;
    const auto missing = [&](std::size_t slot) { return equal - std::min(equal, counts.held[slot]); };
    std::size_t present = 0;
    std::size_t spoken_for = missing(slot_);
    for (std::size_t i = 0; i < ranks_; ++i) {
        present += page_.slots[i].holder.load(std::memory_order_acquire) != LedgerPage::kNobody ? 1 : 0;
        if (i != slot_) spoken_for += std::min<std::size_t>(page_.slots[i].wanted_quanta.load(), missing(i));
    }
    const bool may_have_more = present == ranks_;
    return missing(slot_) + (may_have_more ? counts.free - std::min(counts.free, spoken_for) : 0);
}

std::size_t BudgetShare::lease(std::size_t size_bytes) noexcept {
    const std::size_t wanted = std::min(divide_up(size_bytes, quantum_bytes_), LedgerPage::kQuanta);
    std::size_t taken = take(std::min(wanted, allowed_quanta()));
    if (taken < wanted && reap_if_due()) taken += take(std::min(wanted - taken, allowed_quanta()));
    want(wanted - taken);
    return taken * quantum_bytes_;
}

void BudgetShare::give_back(std::size_t size_bytes) noexcept {
    std::size_t left = size_bytes / quantum_bytes_;
    const std::span<std::atomic<Holder>> quanta = page_.divided_quanta();
    for (std::size_t i = quanta.size(); i-- > 0 && left > 0;) {
        Holder expected = self_;
        if (!quanta[i].compare_exchange_strong(expected, LedgerPage::kNobody)) continue;
        held_quanta_.fetch_sub(1);
        --left;
    }
}

void BudgetShare::want(std::size_t quantum_count) noexcept { page_.slots[slot_].wanted_quanta.store(quantum_count); }

std::size_t BudgetShare::wanted_bytes() const noexcept {
    return page_.slots[slot_].wanted_quanta.load() * quantum_bytes_;
}

bool BudgetShare::is_wanted_by_others() const noexcept {
    for (std::size_t i = 0; i < ranks_; ++i) {
        if (i != slot_ && page_.slots[i].wanted_quanta.load() != 0) return true;
    }
    return false;
}

std::size_t BudgetShare::asked_bytes() const noexcept {
    if (held_bytes() <= equal_bytes_ || !is_wanted_by_others()) return 0;
    const Counts counts = count();
    const std::size_t equal = equal_bytes_ / quantum_bytes_;
    std::size_t asked = 0;
    for (std::size_t i = 0; i < ranks_; ++i) {
        if (i == slot_) continue;
        const bool gives = counts.held[i] > counts.held[slot_] || (counts.held[i] == counts.held[slot_] && i < slot_);
        if (gives) return 0;
        const std::size_t missing = equal - std::min(equal, counts.held[i]);
        asked += std::min<std::size_t>(page_.slots[i].wanted_quanta.load(), missing);
    }
    return std::min((asked - std::min(asked, counts.free)) * quantum_bytes_, held_bytes() - equal_bytes_);
}

/// Takes from processes that ended what they held. Whether there was one. Several may do so at once, and each may end
/// anywhere: the slot says whose quanta are left until all of them are free, and no process ever has the name again.
bool BudgetShare::reap_now() noexcept {
    bool has_found = false;
    for (std::size_t i = 0; i < ranks_; ++i) {
        LedgerPage::Slot& slot = page_.slots[i];
        const Holder holder = slot.holder.load(std::memory_order_acquire);
        if (!is_process(holder) || !has_ended(holder)) continue;
        take_away(slot, holder);
        has_found = true;
    }
    return has_found;
}

void BudgetShare::take_away(LedgerPage::Slot& slot, Holder ended) noexcept {
    for (std::atomic<Holder>& quantum : page_.divided_quanta()) {
        Holder expected = ended;
        quantum.compare_exchange_strong(expected, LedgerPage::kNobody);
    }
    slot.wanted_quanta.store(0);  // of who has the slot next, at worst: it says so again
    slot.holder.compare_exchange_strong(ended, LedgerPage::kEnded);
}

bool BudgetShare::reap_if_due() noexcept {
    const std::int64_t now = now_ns();
    std::int64_t last = last_reap_ns_.load(std::memory_order_relaxed);
    if (now - last < kReapEveryNs || !last_reap_ns_.compare_exchange_strong(last, now)) return false;
    return reap_now();
}

}  // namespace torch_offload
