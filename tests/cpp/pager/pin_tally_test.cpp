#include "pager/pin_tally.h"

#include <gtest/gtest.h>

#include <future>
#include <latch>
#include <optional>
#include <thread>

#include "support/gated_engine.h"
#include "support/pager_fixture.h"

namespace torch_offload::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Shares count for other threads only, until they end or are moved into one that does. Method: shares of two threads.
TEST(PinTally, CountsTheSharesOfOthers) {
    PinTally tally;
    PinTally::Share own(tally, 3);
    EXPECT_FALSE(tally.has_others());
    PinTally::Share moved = std::move(own);
    std::thread([&] { EXPECT_TRUE(tally.has_others()); }).join();
    moved = {};
    std::thread([&] { EXPECT_FALSE(tally.has_others()); }).join();
    EXPECT_EQ(tally.accessed(), 3u);
}

// A thread with shares of several tallies is asked about each. Method: one of its own, one of another thread's.
TEST(PinTally, TalliesAreApart) {
    PinTally first;
    PinTally second;
    const PinTally::Share own(first, 1);
    std::optional<PinTally::Share> other;
    std::thread([&] { other.emplace(second, 1); }).join();
    EXPECT_FALSE(first.has_others());
    EXPECT_TRUE(second.has_others());
}

// A thread that waits for what has not come to pass lets nothing go. Method: a wait for a word, which then changes; an
// access that is not answered.
TEST(PinTally, ThreadsThatWaitDoNotCount) {
    PinTally tally;
    std::atomic<std::uint32_t> word{7};
    const PinTally::Share own(tally, 2);
    const auto has_others = [&] { return std::async(std::launch::async, [&] { return tally.has_others(); }).get(); };
    {
        const PinTally::Wait wait(tally, word, 7);
        EXPECT_FALSE(has_others());
        word = 8;
        EXPECT_TRUE(has_others()) << "it goes on in a moment";
    }
    {
        const PinTally::Fault fault(tally);
        EXPECT_FALSE(has_others());
    }
    EXPECT_TRUE(has_others());
}

/// A pager of ten pages, of which a segment of eight is there.
struct Operators {
    explicit Operators(milliseconds longest_operator = seconds(60))
        : pager(patient_options(longest_operator), std::make_unique<GatedEngine>()) {
        large = filled_segment(pager, 8, 1);
    }
    static PagerOptions patient_options(milliseconds longest_operator) {
        PagerOptions options = options_with(10);
        options.longest_operator = longest_operator;
        return options;
    }
    /// Memory for which all of `large` or half of it has to leave.
    void allocate(std::size_t pages) { pager.free_range(pager.allocate_range(pages * kPageBytes)); }

    Pager pager;
    std::shared_ptr<Segment> large;
};

/// A thread that pins `segment` until it is told to end.
class Holder {
public:
    explicit Holder(Pager& pager, const std::shared_ptr<Segment>& segment, bool keeps = false)
        : thread_([this, &pager, segment, keeps] {
              PinGuard guard = pin(pager, segment, Access::read);
              if (keeps) guard.keep();
              has_begun_.count_down();
              may_end_.wait();
          }) {
        has_begun_.wait();
    }
    ~Holder() {
        if (thread_.joinable()) end();
    }
    void end() {
        may_end_.count_down();
        thread_.join();
    }

private:
    std::latch has_begun_{1};
    std::latch may_end_{1};
    std::thread thread_;
};

template <typename Body>
auto started(Body body) {
    return std::async(std::launch::async, body);
}

/// Whether it ends long before operators are not waited for any more.
template <typename Result>
bool ends_soon(const std::future<Result>& result) {
    return result.wait_for(seconds(30)) == std::future_status::ready;
}

// Who runs out of memory waits for another thread's operator to end. Method: one thread pins most of the budget,
// another allocates as much; the first ends.
TEST(PagerOperators, ThoseOfOtherThreadsAreWaitedFor) {
    Operators operators;
    Holder holder(operators.pager, operators.large);
    std::future<void> other = started([&] { operators.allocate(4); });
    EXPECT_EQ(other.wait_for(milliseconds(50)), std::future_status::timeout);
    holder.end();
    EXPECT_TRUE(ends_soon(other));
    EXPECT_NO_THROW(other.get());
    EXPECT_LE(operators.pager.statistics().memory.peak_bytes, 10 * kPageBytes);
}

// The same where the other thread holds pages for an update. Method: latches in place of the pin.
TEST(PagerOperators, UpdatesOfOtherThreadsAreWaitedFor) {
    Operators operators;
    const std::uint64_t pins = operators.pager.statistics().pins;
    std::latch has_begun(1);
    std::latch may_end(1);
    std::future<void> update = started([&] {
        std::vector<UpdateLatch> latches;
        for (std::size_t page = 0; page < 8; ++page) {
            latches.push_back(operators.pager.latch_for_update({&operators.large, 1}, page, true));
        }
        has_begun.count_down();
        may_end.wait();
    });
    has_begun.wait();
    std::future<void> other = started([&] { operators.allocate(4); });
    EXPECT_EQ(other.wait_for(milliseconds(50)), std::future_status::timeout);
    may_end.count_down();
    EXPECT_TRUE(ends_soon(other));
    EXPECT_NO_THROW(other.get());
    EXPECT_EQ(operators.pager.statistics().pins, pins) << "updates are no pins";
}

// A thread does not wait for itself, nor for what other threads keep. Method: allocate under an own pin; under one that
// another thread keeps.
TEST(PagerOperators, OwnAndKeptPinsAreNotWaitedFor) {
    Operators operators;
    std::future<void> own = started([&] {
        const PinGuard guard = pin(operators.pager, operators.large, Access::read);
        operators.allocate(4);
    });
    EXPECT_TRUE(ends_soon(own));
    EXPECT_THROW(own.get(), OutOfTierMemory);
    const Holder holder(operators.pager, operators.large, true);
    std::future<void> other = started([&] { operators.allocate(4); });
    EXPECT_TRUE(ends_soon(other));
    EXPECT_THROW(other.get(), OutOfTierMemory);
}

// What can never fit is refused at once. Method: more than the budget, while another thread's operator runs.
TEST(PagerOperators, MoreThanTheBudgetIsNotWaitedFor) {
    Operators operators;
    const Holder holder(operators.pager, operators.large);
    std::future<void> other = started([&] { operators.allocate(11); });
    EXPECT_TRUE(ends_soon(other));
    EXPECT_THROW(other.get(), OutOfTierMemory);
}

// Threads that wait for each other's pins end with an error, all but one. Method: two pin half of the budget each, and
// ask for as much again once both have.
TEST(PagerOperators, ThatWaitForEachOtherEnd) {
    Operators operators;
    operators.large.reset();
    const std::shared_ptr<Segment> halves[] = {filled_segment(operators.pager, 4, 1),
                                               filled_segment(operators.pager, 4, 2)};
    std::latch both(2);
    std::atomic<int> refused{0};
    const auto run = [&](const std::shared_ptr<Segment>& half) {
        const PinGuard guard = pin(operators.pager, half, Access::read);
        both.arrive_and_wait();
        try {
            operators.allocate(4);
        } catch (const OutOfTierMemory&) {
            ++refused;
        }
    };
    std::future<void> first = started([&] { run(halves[0]); });
    std::future<void> second = started([&] { run(halves[1]); });
    EXPECT_TRUE(ends_soon(first));
    EXPECT_TRUE(ends_soon(second));
    EXPECT_GE(refused, 1);
}

// The same where one of them waits for a page that the other has. Method: one thread latches a page and allocates;
// another pins most of the budget and wants the page.
TEST(PagerOperators, ThatWaitForAPageOfTheCallerEnd) {
    Operators operators;
    const auto page = filled_segment(operators.pager, 1, 2);
    ASSERT_EQ(operators.pager.evict(page), 0u);
    std::latch is_latched(1);
    std::latch has_begun(1);
    std::future<void> own = started([&] {
        const UpdateLatch latch = operators.pager.latch_for_update({&page, 1}, 0, true);
        is_latched.count_down();
        has_begun.wait();
        operators.allocate(4);
    });
    std::future<void> other = started([&] {
        is_latched.wait();
        const PinGuard guard = pin(operators.pager, operators.large, Access::read);
        has_begun.count_down();
        static_cast<void>(pin(operators.pager, page, Access::read));
    });
    EXPECT_TRUE(ends_soon(own));
    EXPECT_THROW(own.get(), OutOfTierMemory);
    EXPECT_NO_THROW(other.get());
}

// An access behind the dispatcher, by a thread that has pinned everything, ends on 0xFF and does not wait for that
// thread. Method: read what left under the pin.
TEST(PagerOperators, ThatFaultAreNotWaitedFor) {
    Operators operators;
    const auto away = filled_segment(operators.pager, 2, 2);
    std::future<std::byte> value = started([&] {
        const PinGuard guard = pin(operators.pager, operators.large, Access::read);
        const std::span<std::byte> rest = operators.pager.allocate_range(kPageBytes);
        const std::byte found = away->range()[kPageBytes];
        operators.pager.free_range(rest);
        return found;
    });
    EXPECT_TRUE(ends_soon(value));
    EXPECT_EQ(value.get(), std::byte{0xFF});
    EXPECT_THROW(static_cast<void>(pin(operators.pager, away, Access::read)), OutOfTierMemory) << "for the access";
}

// An operator that does not end is not waited for for ever. Method: the same with little patience.
TEST(PagerOperators, ThatDoNotEndAreGivenUp) {
    Operators operators(milliseconds(100));
    const Holder holder(operators.pager, operators.large);
    std::future<void> other = started([&] { operators.allocate(4); });
    EXPECT_TRUE(ends_soon(other));
    EXPECT_THROW(other.get(), OutOfTierMemory);
}

}  // namespace
}  // namespace torch_offload::test
