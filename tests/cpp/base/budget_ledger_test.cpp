#include "base/budget_ledger.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "base/check.h"
#include "support/seeds.h"

namespace torch_offload::test {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kQuantumBytes = kSectorBytes;
constexpr std::size_t kBudgetBytes = LedgerPage::kQuanta * kQuantumBytes;
constexpr std::size_t kRanks = 4;
constexpr std::size_t kEqualBytes = kBudgetBytes / kRanks;
constexpr milliseconds kPatience{10'000};

/// Memory that forked processes share, all zero.
template <typename Content>
class Shared {
public:
    Shared()
        : memory_(::mmap(nullptr, sizeof(Content), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)),
          content_(memory_ == MAP_FAILED ? throw std::bad_alloc() : new (memory_) Content()) {}
    ~Shared() { ::munmap(memory_, sizeof(Content)); }
    Shared(const Shared&) = delete;
    Shared& operator=(const Shared&) = delete;

    Content& operator*() const noexcept { return *content_; }
    Content* operator->() const noexcept { return content_; }

private:
    void* memory_;
    Content* content_;
};

struct BudgetLedger : testing::Test {
    BudgetLedger() { page->lay_out(kBudgetBytes, kRanks); }
    std::unique_ptr<BudgetShare> join(std::size_t guaranteed_quanta = 1) {
        return std::make_unique<BudgetShare>(*page, guaranteed_quanta * kQuantumBytes, kPatience);
    }
    Shared<LedgerPage> page;
};

/// Ends a process whatever it does. It is a zombie until it is waited for.
void kill_process(pid_t process) { ASSERT_EQ(::kill(process, SIGKILL), 0); }
void wait_for_end(pid_t process) { ASSERT_EQ(::waitpid(process, nullptr, 0), process); }

TEST_F(BudgetLedger, APartIsHadWithoutTheOthersAndNoMoreBeforeTheyHaveCome) {
    const auto first = join();
    EXPECT_EQ(first->held_bytes(), kQuantumBytes);
    EXPECT_EQ(first->lease(kBudgetBytes), kEqualBytes - kQuantumBytes);
    EXPECT_EQ(first->held_bytes(), kEqualBytes);
    EXPECT_EQ(first->wanted_bytes(), kBudgetBytes - kEqualBytes + kQuantumBytes);
    EXPECT_EQ(first->asked_bytes(), 0u);
}

TEST_F(BudgetLedger, WhatNobodyElseNeedsIsLentOnceAllHaveCome) {
    const auto first = join(2);
    const auto second = join(3);
    const auto third = join();
    const auto fourth = join();
    EXPECT_EQ(first->lease(kBudgetBytes), kBudgetBytes - 7 * kQuantumBytes);
    EXPECT_EQ(first->most_held_bytes(), kBudgetBytes - 5 * kQuantumBytes);
    EXPECT_EQ(second->lease(1), 0u);
    EXPECT_EQ(second->guaranteed_bytes(), 3 * kQuantumBytes);
}

TEST_F(BudgetLedger, WhoHasMoreThanAPartGivesBackWhatAnEntitledRankWants) {
    const auto first = join();
    const auto second = join();
    const auto third = join();
    const auto fourth = join();
    first->lease(kBudgetBytes);
    EXPECT_EQ(first->asked_bytes(), 0u);
    EXPECT_EQ(second->lease(10 * kQuantumBytes), 0u);
    EXPECT_TRUE(second->is_entitled());
    EXPECT_EQ(first->asked_bytes(), 10 * kQuantumBytes);
    first->give_back(first->asked_bytes());
    EXPECT_EQ(first->asked_bytes(), 0u);
    EXPECT_EQ(first->lease(kQuantumBytes), 0u) << "what others are entitled to and want is not taken again";
    EXPECT_EQ(second->lease(10 * kQuantumBytes), 10 * kQuantumBytes);
    EXPECT_FALSE(first->is_wanted_by_others());
    second->lease(kBudgetBytes);
    EXPECT_EQ(first->asked_bytes(), kEqualBytes - 11 * kQuantumBytes) << "up to an equal part";
    second->want_nothing();
    EXPECT_EQ(first->asked_bytes(), 0u);
}

TEST_F(BudgetLedger, OnlyWhoHasMostGivesBack) {
    const auto first = join();
    const auto second = join();
    const auto third = join();
    const auto fourth = join();
    second->lease(kEqualBytes + 20 * kQuantumBytes);
    first->lease(kBudgetBytes);
    third->lease(kQuantumBytes);
    EXPECT_EQ(first->asked_bytes(), kQuantumBytes);
    EXPECT_EQ(second->asked_bytes(), 0u);
}

TEST_F(BudgetLedger, NoMoreThanTheRanksHaveAShare) {
    const auto first = join();
    const auto second = join();
    const auto third = join();
    auto fourth = join();
    EXPECT_THROW(join(), InvalidArgument);
    fourth->lease(kBudgetBytes);
    fourth.reset();
    EXPECT_EQ(join(kEqualBytes / kQuantumBytes)->held_bytes(), kEqualBytes);
    EXPECT_THROW(BudgetShare(*page, kEqualBytes + 1, kPatience), InvalidArgument);
}

TEST_F(BudgetLedger, WhatIsGuaranteedIsWaitedForUntilItIsGivenBack) {
    const auto first = join();
    const auto second = join();
    const auto third = join();
    auto fourth = join();
    first->lease(kBudgetBytes);
    fourth.reset();
    first->lease(kBudgetBytes);  // nothing: a rank is missing
    EXPECT_THROW(BudgetShare(*page, 4 * kQuantumBytes, milliseconds(1)), OutOfTierMemory);
    std::thread giver([&] {
        while (first->asked_bytes() == 0) std::this_thread::yield();
        first->give_back(first->asked_bytes());
    });
    EXPECT_EQ(join(4)->held_bytes(), 4 * kQuantumBytes);
    giver.join();
}

TEST_F(BudgetLedger, BudgetsThatCannotBeCutAreRefused) {
    Shared<LedgerPage> other;
    EXPECT_THROW(other->lay_out(kBudgetBytes - 1, kRanks), InvalidArgument);
    EXPECT_THROW(other->lay_out(kBudgetBytes, 0), InvalidArgument);
    EXPECT_THROW(other->lay_out(kBudgetBytes, LedgerPage::kMaxRanks + 1), InvalidArgument);
    other->lay_out(3 * kBudgetBytes + 1, LedgerPage::kMaxRanks);
    EXPECT_EQ(other->budget_bytes(), 3 * kBudgetBytes);
}

TEST(LedgerPage, NothingOfTheBudgetIsLeftOver) {
    for (std::size_t ranks = 1; ranks <= LedgerPage::kMaxRanks; ++ranks) {
        Shared<torch_offload::LedgerPage> page;
        page->lay_out(2 * kBudgetBytes - 1, ranks);
        EXPECT_GT(page->budget_bytes(), 2 * kBudgetBytes - 1 - LedgerPage::kQuanta);
        EXPECT_LE(page->budget_bytes(), 2 * kBudgetBytes - 1);
        std::size_t held_bytes = 0;
        std::vector<std::unique_ptr<BudgetShare>> shares;
        for (std::size_t i = 0; i < ranks; ++i) {
            shares.push_back(std::make_unique<BudgetShare>(*page, page->equal_bytes(), milliseconds(0)));
            held_bytes += shares.back()->held_bytes();
        }
        EXPECT_EQ(held_bytes, page->budget_bytes());
    }
}

TEST_F(BudgetLedger, QuantaOfAKilledProcessAreTakenByWhoIsShort) {
    const pid_t child = ::fork();
    if (child == 0) {
        BudgetShare share(*page, kQuantumBytes, kPatience);
        share.lease(kEqualBytes);
        while (true) ::pause();
    }
    const auto has_leased = [&] {
        return page->slots[0].wanted_quanta.load() != 0;  // an equal part and a quantum were asked for
    };
    while (!has_leased()) std::this_thread::yield();
    const auto second = join();
    const auto third = join();
    const auto fourth = join();
    EXPECT_EQ(second->lease(kBudgetBytes), kBudgetBytes - kEqualBytes - 3 * kQuantumBytes);
    kill_process(child);
    // It may take a moment to end, and is not waited for: a zombie has given its memory back.
    std::size_t got = 0;
    for (int i = 0; i < 10'000 && got == 0; ++i, std::this_thread::sleep_for(milliseconds(1))) {
        got = second->lease(kEqualBytes);
    }
    EXPECT_EQ(got, kEqualBytes);
    wait_for_end(child);
}

// Of two who want the last quantum one gets it. Method: again and again two threads ask for it at the same time, of so
// many places that both begin to look for it nearly where it is.
TEST(LedgerPage, TheLastQuantumHasOneHolder) {
    constexpr int kRounds = 50'000;
    LedgerPage page{};
    page.lay_out(kBudgetBytes, LedgerPage::kMaxRanks);
    std::vector<std::unique_ptr<BudgetShare>> shares(LedgerPage::kMaxRanks);
    for (auto& share : shares) share = std::make_unique<BudgetShare>(page, 0, kPatience);
    ASSERT_EQ(shares[2]->lease(kBudgetBytes - kQuantumBytes), kBudgetBytes - kQuantumBytes);
    std::atomic<int> begun{0}, holders{0}, too_many{0};
    const auto contend = [&](BudgetShare& share) {
        for (int round = 1; round <= kRounds; ++round) {
            ++begun;
            for (int look = 1; begun < 2 * round; ++look) {
                if (look % 1'000 == 0) std::this_thread::yield();  // the other one may have no core
            }
            if (share.lease(kQuantumBytes) == 0) continue;
            too_many += holders.fetch_add(1);
            --holders;
            share.give_back(kQuantumBytes);
        }
    };
    std::thread other(contend, std::ref(*shares[0]));
    contend(*shares[1]);
    other.join();
    EXPECT_EQ(too_many, 0);
    for (const std::size_t i : {0, 1}) EXPECT_EQ(shares[i]->held_bytes(), 0u) << "what it gave back was its own";
}

// What processes hold never adds up to more than the budget, and nothing is lost, whenever processes are killed.
// Method: as many processes as there are places lease and give back at random, and say what they hold after they took
// and before they give; one more looks at the sum, kills and starts again. OFFLOAD_TEST_OPERATIONS of them.
class Crowd {
public:
    struct Claim {
        std::atomic<std::uint64_t> changes;  // odd while it changes
        std::atomic<std::uint64_t> bytes;
    };
    struct Board {
        std::array<Claim, kRanks> claims;
        std::atomic<std::uint64_t> operations;
        std::atomic<std::uint64_t> refused;   // leases that got less than they wanted
        std::atomic<std::uint64_t> returned;  // because others wanted it
    };

    Crowd(LedgerPage& page, std::uint64_t seed) : page_(page), random_(seed) {
        for (std::size_t rank = 0; rank < kRanks; ++rank) start(rank);
    }
    ~Crowd() {
        for (std::size_t rank = 0; rank < kRanks; ++rank) end(rank);
    }

    const Board& board() const { return *board_; }
    /// The sum of what is claimed at one instant; nothing if it changed meanwhile.
    std::optional<std::uint64_t> sum() const {
        std::array<std::uint64_t, kRanks> before{};
        for (std::size_t rank = 0; rank < kRanks; ++rank) before[rank] = board_->claims[rank].changes.load();
        std::uint64_t sum = 0;
        for (const Claim& claim : board_->claims) sum += claim.bytes.load();
        for (std::size_t rank = 0; rank < kRanks; ++rank) {
            if (before[rank] % 2 != 0 || before[rank] != board_->claims[rank].changes.load()) return std::nullopt;
        }
        return sum;
    }
    void kill_one() {
        const std::size_t rank = random_() % kRanks;
        end(rank);
        start(rank);
    }

private:
    void start(std::size_t rank) {
        const std::uint64_t seed = random_();
        processes_[rank] = ::fork();
        if (processes_[rank] == 0) work(rank, seed);
    }
    /// Its claim goes after the process, and nobody looks meanwhile.
    void end(std::size_t rank) {
        kill_process(processes_[rank]);
        wait_for_end(processes_[rank]);
        Claim& claim = board_->claims[rank];
        claim.bytes = 0;
        claim.changes = 0;
    }

    static void change(Claim& claim, std::uint64_t bytes) {
        claim.changes.fetch_add(1);
        claim.bytes.store(bytes);
        claim.changes.fetch_add(1);
    }

    [[noreturn]] void work(std::size_t rank, std::uint64_t seed) {
        std::mt19937_64 random(seed);
        Claim& claim = board_->claims[rank];
        while (true) {
            BudgetShare share(page_, (1 + random() % 8) * kQuantumBytes, kPatience);
            change(claim, share.held_bytes());
            for (std::uint64_t left = random() % 1'000; left > 0; --left) {
                operate(share, claim, random);
                if (random() % 8 == 0) std::this_thread::yield();  // the others are to come between
            }
            change(claim, 0);
        }
    }

    void operate(BudgetShare& share, Claim& claim, std::mt19937_64& random) {
        board_->operations.fetch_add(1, std::memory_order_relaxed);
        const std::size_t leased = share.held_bytes() - share.guaranteed_bytes();
        std::size_t given = share.asked_bytes();
        if (given > 0) board_->returned.fetch_add(1, std::memory_order_relaxed);
        if (random() % 8 == 0) given = leased == 0 ? 0 : random() % leased / kQuantumBytes * kQuantumBytes;
        if (given > 0) {
            change(claim, share.held_bytes() - given);
            share.give_back(given);
            return;
        }
        const std::size_t wanted = (1 + random() % 64) * kQuantumBytes;
        if (share.lease(wanted) < wanted) board_->refused.fetch_add(1, std::memory_order_relaxed);
        change(claim, share.held_bytes());
        if (random() % 16 == 0) share.want_nothing();
    }

    LedgerPage& page_;
    std::mt19937_64 random_;
    Shared<Board> board_;
    std::array<pid_t, kRanks> processes_{};
};

TEST_F(BudgetLedger, IsNeverExceededByProcessesThatAreKilledAtRandom) {
    constexpr std::uint64_t kLeastKills = 20;  // however seldom this process has a core
    const char* const asked = std::getenv("OFFLOAD_TEST_OPERATIONS");
    const std::uint64_t wanted = asked ? std::strtoull(asked, nullptr, 10) : 100'000;
    std::mt19937_64 random(base_seed());
    std::uint64_t sums = 0, full = 0, kills = 0, too_much = 0;
    {
        Crowd crowd(*page, random());
        const auto is_enough = [&] { return crowd.board().operations >= wanted && kills > kLeastKills && full > 0; };
        for (std::uint64_t killed_at = 0; !is_enough();) {
            if (const std::optional<std::uint64_t> sum = crowd.sum()) {
                ++sums;
                full += *sum == kBudgetBytes ? 1 : 0;
                too_much += *sum > kBudgetBytes ? 1 : 0;
            }
            if (crowd.board().operations < killed_at) continue;
            crowd.kill_one();
            ++kills;
            killed_at = crowd.board().operations + random() % 400;
        }
        std::cout << crowd.board().operations << " operations, " << kills << " processes killed, " << sums
                  << " sums, of which " << full << " were the whole budget; " << crowd.board().refused
                  << " leases cut short, " << crowd.board().returned << " given back for others\n";
        EXPECT_GT(crowd.board().refused, 0u);
        EXPECT_GT(crowd.board().returned, 0u);
    }
    EXPECT_EQ(too_much, 0u);
    std::array<std::unique_ptr<BudgetShare>, kRanks> last;
    for (std::unique_ptr<BudgetShare>& share : last) share = join(0);
    EXPECT_EQ(last[0]->lease(kBudgetBytes), kBudgetBytes) << "all are dead: everything is to be had";
}

}  // namespace
}  // namespace torch_offload::test
