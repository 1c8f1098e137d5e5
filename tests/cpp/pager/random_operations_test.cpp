// Every operation of a pager by several threads at once, at random, with every byte known. Its purpose is what a thread
// sanitizer says of it: `make operations` makes a million of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/pager_fixture.h"
#include "support/seeds.h"

namespace torch_offload::test {
namespace {

constexpr std::size_t kSmallPage = kPageElements;  // bytes: elements of one
constexpr std::size_t kThreads = 4;
constexpr std::size_t kOwnSegments = 6;  // of each thread, of one to four pages
constexpr std::size_t kSharedSegments = 4;
constexpr std::size_t kMostPages = 4;
constexpr std::size_t kBudgetPages = 40;  // of 80 or so
constexpr std::uint64_t kOfOnePager = 20'000;

/// How many operations are made: OFFLOAD_TEST_OPERATIONS.
std::uint64_t wanted_operations() {
    const char* const wanted = std::getenv("OFFLOAD_TEST_OPERATIONS");
    return wanted ? std::strtoull(wanted, nullptr, 10) : kOfOnePager;
}

enum class Operation : std::uint8_t {
    pin_to_read,
    pin_to_write,
    pin_to_overwrite,
    pin_pages,
    read_raw,
    write_raw,
    allocate,
    prefetch,
    prefetch_page,
    evict,
    set_pending,
    latch,
    forget,
    touch,
    flush,
    end_step,
};
constexpr std::array kNames = {
    "pin_to_read",   "pin_to_write", "pin_to_overwrite", "pin_pages", "read_raw", "write_raw", "allocate", "prefetch",
    "prefetch_page", "evict",        "set_pending",      "latch",     "forget",   "touch",     "flush",    "end_step"};
constexpr std::size_t kOperationCount = kNames.size();
using Counts = std::array<std::atomic<std::uint64_t>, kOperationCount>;

/// A segment, and what each of its pages is full of once its deferred work is done.
struct Known {
    std::shared_ptr<Segment> segment;
    std::array<std::uint32_t, kMostPages> words{};
    std::mutex turn{};                                 // of an update
    std::array<std::uint32_t, kMostPages> recorded{};  // what updates that are still to be applied will add
};

std::span<std::uint32_t> words_of_page(const Segment& segment, std::size_t page) {
    const std::span<std::byte> bytes = segment.page_range(page);
    return {reinterpret_cast<std::uint32_t*>(bytes.data()), bytes.size() / sizeof(std::uint32_t)};
}

/// Looks at some words: at all of them, a million operations would take long.
bool is_full_of(std::span<const std::uint32_t> words, std::uint32_t word) {
    for (std::size_t i = 0; i < words.size(); i += 73) {
        if (words[i] != word) return false;
    }
    return words.back() == word;
}

/// One pager with threads that each have segments of their own, and some that all of them read.
class Crowd {
public:
    Crowd(std::uint64_t seed, Counts& counts) : pager_(options(seed)), counts_(counts) {
        pager_.set_pending_work(
            [this](Segment& segment, std::size_t page, bool may_wait) { return resolve(segment, page, may_wait); },
            [this](Segment& segment) {
                const std::shared_ptr<Known> known = find(segment);
                return known ? std::vector{known->segment} : std::vector<std::shared_ptr<Segment>>{};
            });
        std::mt19937_64 random(seed);
        for (std::size_t i = 0; i < kSharedSegments; ++i) shared_.push_back(make(random));
    }
    ~Crowd() { pager_.clear_pending_work(); }

    void run(std::uint64_t seed, std::uint64_t operations) {
        std::vector<std::thread> threads;
        for (std::size_t t = 0; t < kThreads; ++t) {
            threads.emplace_back(
                [this, seed, t, operations] { work(seed * kThreads + t, t, (operations + kThreads - 1) / kThreads); });
        }
        for (std::thread& thread : threads) thread.join();
    }
    int wrong() const { return wrong_; }
    PagerStatistics statistics() const { return pager_.statistics(); }

private:
    static PagerOptions options(std::uint64_t seed) {
        PagerOptions options = options_with(1, seed % 2 == 0 ? IoEngineKind::automatic : IoEngineKind::threads);
        options.budget_bytes = kBudgetPages * kSmallPage;
        return options;
    }

    std::shared_ptr<Known> make(std::mt19937_64& random) {
        auto known = std::make_shared<Known>();
        known->segment = pager_.create_segment((1 + random() % kMostPages) * kSmallPage, 1, SegmentKind::parameter);
        known->segment->label = "of a crowd";
        known->segment->trace_id = pager_.new_trace_id();
        overwrite(*known, random);
        const std::lock_guard lock(known_mutex_);
        known_.emplace_back(known);
        return known;
    }

    /// Nothing where the segment is going away.
    std::shared_ptr<Known> find(const Segment& segment) {
        const std::lock_guard lock(known_mutex_);
        for (const std::shared_ptr<Known>& known : known_) {
            if (known->segment.get() == &segment) return known;
        }
        return nullptr;
    }

    void count(Operation operation) {
        counts_[static_cast<std::size_t>(operation)].fetch_add(1, std::memory_order_relaxed);
    }
    void expect(bool is_right) { wrong_ += is_right ? 0 : 1; }

    // --- What is done to a segment
    // ------------------------------------------------------------------------------------
    void overwrite(Known& known, std::mt19937_64& random) {
        const PinGuard guard = pin(pager_, known.segment, Access::overwrite);
        for (std::size_t page = 0; page < known.segment->page_count(); ++page) {
            known.words[page] = static_cast<std::uint32_t>(random());
            std::ranges::fill(words_of_page(*known.segment, page), known.words[page]);
        }
    }

    void check(const Known& known, std::size_t first, std::size_t count) {
        for (std::size_t page = first; page < first + count; ++page) {
            expect(is_full_of(words_of_page(*known.segment, page), known.words[page]));
        }
    }

    void add(Known& known, std::size_t first, std::size_t count) {
        check(known, first, count);
        for (std::size_t page = first; page < first + count; ++page) {
            for (std::uint32_t& word : words_of_page(*known.segment, page)) ++word;
            ++known.words[page];
        }
    }

    void use_pages(Known& known, Access access, std::mt19937_64& random) {
        const std::size_t first = random() % known.segment->page_count();
        const std::size_t count = 1 + random() % (known.segment->page_count() - first);
        const PinGuard guard = pager_.pin_pages(known.segment, first, count, access);
        access == Access::read ? check(known, first, count) : add(known, first, count);
    }

    /// False if it gave up. Adding nothing writes nothing: others may look at the page meanwhile.
    bool update(Known& known, std::size_t page, bool may_wait) {
        UpdateLatch latch = pager_.latch_for_update({&known.segment, 1}, page, may_wait);
        if (!latch) return false;
        if (const std::uint32_t added = std::exchange(known.recorded[page], 0); added != 0) {
            const std::span<std::byte> bytes = latch.bytes(0);
            auto* const words = reinterpret_cast<std::uint32_t*>(bytes.data());
            for (std::size_t i = 0; i < bytes.size() / sizeof *words; ++i) words[i] += added;
        }
        latch.finish();
        return true;
    }

    bool resolve(Segment& segment, std::size_t page, bool may_wait) {
        const std::shared_ptr<Known> known = find(segment);
        if (!known) return true;
        std::unique_lock turn(known->turn, std::defer_lock);
        if (may_wait) {
            turn.lock();
        } else if (!turn.try_lock()) {
            return false;
        }
        return !segment.page(page).load().has(PageWord::kPending) || update(*known, page, may_wait);
    }

    /// Records an update that adds `added`, or applies it where others hold the page.
    void defer(Known& known, std::size_t page, std::uint32_t added) {
        const std::lock_guard turn(known.turn);
        const bool is_pending = pager_.set_pending(*known.segment, page);
        record(known, page, added);
        if (!is_pending) expect(update(known, page, true));
    }

    void update_now(Known& known, std::size_t page, std::uint32_t added) {
        const std::lock_guard turn(known.turn);
        record(known, page, added);
        expect(update(known, page, true));
    }

    /// What is shared stays as it is, since others look at it without the lock.
    void record(Known& known, std::size_t page, std::uint32_t added) {
        if (added == 0) return;
        known.recorded[page] += added;
        known.words[page] += added;
    }

    /// Pre: nobody else has it.
    void forget(std::shared_ptr<Known>& known, std::mt19937_64& random) {
        {
            const PinGuard guard = pin(pager_, known->segment, Access::read);
            check(*known, 0, known->segment->page_count());
        }
        {
            const std::lock_guard lock(known_mutex_);
            std::erase(known_, known);
        }
        known = make(random);
    }

    void allocate(std::mt19937_64& random) {
        const std::span<std::byte> range = pager_.allocate_range((1 + random() % 3) * kSmallPage);
        std::memset(range.data(), 0xAB, range.size());
        pager_.free_range(range);
    }

    // --- Threads
    // ------------------------------------------------------------------------------------------------------
    void work(std::uint64_t seed, std::size_t thread, std::uint64_t operations) {
        std::mt19937_64 random(seed);
        std::vector<std::shared_ptr<Known>> own;
        for (std::size_t i = 0; i < kOwnSegments; ++i) own.push_back(make(random));
        for (std::uint64_t i = 0; i < operations; ++i) {
            const auto operation = static_cast<Operation>(random() % kOperationCount);
            const bool is_rare = operation == Operation::flush || operation == Operation::end_step;
            if (is_rare && (thread != 0 || random() % 16 != 0)) {
                --i;  // drawn again
            } else if (random() % 3 == 0) {
                do_to_shared(*shared_[random() % shared_.size()], operation, random);
            } else {
                do_to_own(own[random() % own.size()], operation, random);
            }
        }
        for (std::shared_ptr<Known>& known : own) check_at_end(*known);
    }

    void check_at_end(const Known& known) {
        const PinGuard guard = pin(pager_, known.segment, Access::read);
        check(known, 0, known.segment->page_count());
    }

    void do_to_own(std::shared_ptr<Known>& known, Operation operation, std::mt19937_64& random) {
        const std::size_t pages = known->segment->page_count();
        const std::size_t page = random() % pages;
        count(operation);
        switch (operation) {
            case Operation::pin_to_write: {
                const PinGuard guard = pin(pager_, known->segment, Access::write);
                return add(*known, 0, pages);
            }
            case Operation::pin_to_overwrite:
                return overwrite(*known, random);
            case Operation::pin_pages:
                return use_pages(*known, random() % 2 == 0 ? Access::read : Access::write, random);
            case Operation::write_raw:
                return add(*known, page, 1);
            case Operation::set_pending:
                return defer(*known, page, 1 + static_cast<std::uint32_t>(random() % 8));
            case Operation::latch:
                return update_now(*known, page, 3);
            case Operation::forget:
                return forget(known, random);
            default:
                return do_to_any(*known, operation, random);
        }
    }

    /// Operations that would write look only.
    void do_to_shared(Known& known, Operation operation, std::mt19937_64& random) {
        const std::size_t page = random() % known.segment->page_count();
        switch (operation) {
            case Operation::pin_pages:
                count(operation);
                return use_pages(known, Access::read, random);
            case Operation::set_pending:
                count(operation);
                return defer(known, page, 0);
            case Operation::latch:
                count(operation);
                return update_now(known, page, 0);
            case Operation::pin_to_write:
            case Operation::pin_to_overwrite:
            case Operation::forget:
                count(Operation::pin_to_read);
                return do_to_any(known, Operation::pin_to_read, random);
            case Operation::write_raw:
                count(Operation::read_raw);
                return do_to_any(known, Operation::read_raw, random);
            default:
                count(operation);
                return do_to_any(known, operation, random);
        }
    }

    void do_to_any(Known& known, Operation operation, std::mt19937_64& random) {
        const std::size_t page = random() % known.segment->page_count();
        switch (operation) {
            case Operation::read_raw:
                return check(known, page, 1);
            case Operation::allocate:
                return allocate(random);
            case Operation::prefetch:
                return pager_.prefetch(known.segment);
            case Operation::prefetch_page:
                return pager_.prefetch_page(known.segment, page);
            case Operation::evict:
                pager_.evict(known.segment);
                return;
            case Operation::touch:
                return pager_.touch(known.segment);
            case Operation::flush:
                return pager_.flush();
            case Operation::end_step:
                return pager_.end_step();
            default:
                return check_at_end(known);
        }
    }

    Pager pager_;
    Counts& counts_;
    std::mutex known_mutex_;  // a leaf
    std::vector<std::shared_ptr<Known>> known_;
    std::vector<std::shared_ptr<Known>> shared_;
    std::atomic<int> wrong_{0};
};

// Whatever threads do at once, each sees what was written last, and the budget holds. Method: seeds; every operation
// that is made is counted.
TEST(RandomOperations, OfManyThreadsKeepEveryByte) {
    Counts counts{};
    std::uint64_t faults = 0;
    std::uint64_t evictions = 0;
    std::uint64_t misses = 0;
    std::uint64_t made = 0;
    const std::uint64_t wanted = wanted_operations();
    for (std::uint64_t seed = base_seed(); made < wanted; ++seed) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        const std::uint64_t here = std::min(kOfOnePager, wanted - made);
        Crowd crowd(seed, counts);
        crowd.run(seed, here);
        made += here;
        const PagerStatistics seen = crowd.statistics();
        ASSERT_EQ(crowd.wrong(), 0);
        ASSERT_LE(seen.memory.peak_bytes, kBudgetPages * kSmallPage);
        faults += seen.faults;
        evictions += seen.evictions;
        misses += seen.misses;
    }
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < kOperationCount; ++i) {
        const std::uint64_t count = counts[i];
        total += count;
        std::cout << kNames[i] << ' ' << count << '\n';
        RecordProperty(kNames[i], std::to_string(count));
    }
    std::cout << total << " operations of " << kThreads << " threads; " << faults << " faults, " << misses
              << " misses, " << evictions << " evictions\n";
    RecordProperty("operations", std::to_string(total));
    RecordProperty("faults", std::to_string(faults));
    RecordProperty("evictions", std::to_string(evictions));
    EXPECT_GT(faults, total / 100);
    EXPECT_GT(evictions, total / 100);
    EXPECT_GE(total, wanted);
}

}  // namespace
}  // namespace torch_offload::test
