// Whether and to whom an access behind the dispatcher that ended on wrong bytes is told of. Method: a disk that refuses
// reads, and bytes that are read without a pin.
#include "pager/fault_errors.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cerrno>
#include <exception>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "support/pager_fixture.h"
#include "support/sim_engine.h"

namespace torch_offload::test {
namespace {

/// A pager over a disk that can be read or not, with one page on it.
struct RefusedReads {
    explicit RefusedReads(const FaultNotice& notice) : engine(new SimEngine(8, 1, {})) {
        PagerOptions options = options_with(12);
        options.fault_notice = notice;
        pager.emplace(options, std::unique_ptr<IoEngine>(engine));
        segment = filled_segment(*pager, 1, 1);
        other = filled_segment(*pager, 1, 2);
    }

    /// Ends on wrong bytes.
    void read_in_vain() {
        EXPECT_EQ(pager->evict(segment), 0u);
        engine->refuse(IoDirection::read, EIO);
        EXPECT_EQ(static_cast<unsigned>(segment->range()[0]), 0xFFu);
        engine->refuse(IoDirection::read, 0);
    }

    /// Returns once the service thread is done with earlier accesses, not only those that made them: it answers one
    /// after the other.
    void read_another() {
        EXPECT_EQ(pager->evict(other), 0u);
        EXPECT_NE(static_cast<unsigned>(other->range()[0]), 0xFFu);
    }

    SimEngine* engine;  // the pager's
    std::optional<Pager> pager;
    std::shared_ptr<Segment> segment;
    std::shared_ptr<Segment> other;
};

// The thread whose access it was finds the notice given, and the error raised to the first who asks and nobody else.
// The notice may ask the pager, which holds no lock then.
TEST(FaultErrors, NoticeIsGivenBeforeTheAccessEnds) {
    std::atomic<int> notices{0};
    std::atomic<std::uint64_t> faults{0};
    std::unique_ptr<RefusedReads> f;
    f = std::make_unique<RefusedReads>(FaultNotice{[&] {
                                                       faults = f->pager->statistics().faults;
                                                       ++notices;
                                                   },
                                                   {}});
    f->read_in_vain();
    EXPECT_EQ(notices, 1);
    EXPECT_EQ(faults, 1u);
    f->read_another();  // an error that is raised before its bytes are marked as wrong is told of twice
    EXPECT_THROW(f->pager->raise_fault_error(), TierIoError);
    EXPECT_NO_THROW(f->pager->raise_fault_error());
    const PinGuard guard = pin(*f->pager, f->segment, Access::read);
    EXPECT_TRUE(holds(*f->segment, 1));
    EXPECT_EQ(notices, 1);
}

// Of several who ask at once one gets the error.
TEST(FaultErrors, OneOfManyRaises) {
    constexpr int kThreads = 4;
    RefusedReads f({});
    for (int round = 0; round < 50; ++round) {
        f.read_in_vain();
        std::atomic<int> raised{0};
        std::barrier start(kThreads);
        std::vector<std::thread> threads;
        for (int i = 0; i < kThreads; ++i) {
            threads.emplace_back([&] {
                start.arrive_and_wait();
                try {
                    f.pager->raise_fault_error();
                } catch (const TierIoError&) {
                    ++raised;
                }
            });
        }
        for (std::thread& thread : threads) thread.join();
        ASSERT_EQ(raised, 1);
    }
}

// Wrong bytes do not outlive their error, even if it was raised before they were marked as wrong. Method: the notice,
// which comes just then, raises it.
TEST(FaultErrors, BytesOfAnErrorThatWasRaisedEarlyAreTakenAway) {
    std::atomic<int> notices{0};
    std::atomic<int> raised{0};
    std::unique_ptr<RefusedReads> f;
    f = std::make_unique<RefusedReads>(FaultNotice{[&] {
                                                       if (++notices > 1) return;
                                                       try {
                                                           f->pager->raise_fault_error();
                                                       } catch (const TierIoError&) {
                                                           ++raised;
                                                       }
                                                   },
                                                   {}});
    f->read_in_vain();
    EXPECT_EQ(raised, 1);
    ASSERT_TRUE(comes_true([&] { return notices == 2; })) << "that there are bytes to take away";
    EXPECT_NO_THROW(f->pager->raise_fault_error());
    EXPECT_TRUE(holds(*f->segment, 1));
}

// A pager that ends hands over what nobody asked it for, and nothing else.
TEST(FaultErrors, ErrorThatNobodyAskedForIsLeft) {
    std::vector<std::exception_ptr> left;
    const FaultNotice notice{{}, [&](std::exception_ptr error) { left.push_back(std::move(error)); }};
    for (const bool is_raised : {true, false}) {
        RefusedReads f(notice);
        f.read_in_vain();
        if (is_raised) {
            EXPECT_THROW(f.pager->raise_fault_error(), TierIoError);
        }
        EXPECT_TRUE(left.empty());
    }
    ASSERT_EQ(left.size(), 1u);
    EXPECT_THROW(std::rethrow_exception(left[0]), TierIoError);
}

}  // namespace
}  // namespace torch_offload::test
