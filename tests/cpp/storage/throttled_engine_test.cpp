#include "storage/throttled_engine.h"

#include <algorithm>
#include <cstdint>
#include <deque>

#include "conformance/io_engine_contract.h"
#include "support/fake_clock.h"

namespace torch_offload::test {

struct ThrottledFactory {
    static std::unique_ptr<IoEngine> make(std::size_t capacity) {
        return std::make_unique<ThrottledEngine>(make_io_engine(IoEngineKind::threads, capacity), 100e6);
    }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Throttled, IoEngineContract, ThrottledFactory);

namespace {

using std::chrono::nanoseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

/// Has done a transfer as soon as it is submitted. Waiting takes no time: it advances the clock.
class InstantEngine final : public IoEngine {
public:
    explicit InstantEngine(FakeClock& clock) : clock_(clock) {}

    std::size_t submit(std::span<IoRequest* const> requests) override {
        done_.insert(done_.end(), requests.begin(), requests.end());
        return requests.size();
    }
    std::size_t reap(std::span<IoRequest*> finished, milliseconds timeout) override {
        const std::size_t count = std::min(finished.size(), done_.size());
        std::copy_n(done_.begin(), count, finished.begin());
        done_.erase(done_.begin(), done_.begin() + static_cast<std::ptrdiff_t>(count));
        if (count == 0) clock_.advance(timeout);
        return count;
    }
    void wake() noexcept override {}
    BufferIndex register_buffer(std::span<std::byte>) override { return kUnregistered; }
    void unregister_buffer(BufferIndex) override {}
    bool quiesce() noexcept override { return true; }
    std::size_t capacity() const noexcept override { return 8; }
    std::string name() const override { return "instant"; }

private:
    FakeClock& clock_;
    std::deque<IoRequest*> done_;
};

/// A disk of 4 MB/s.
class ThrottledTime : public testing::Test {
protected:
    static constexpr std::int64_t kBytesPerSecond = 4'000'000;

    static nanoseconds time_of(std::size_t size_bytes) {
        return nanoseconds(static_cast<std::int64_t>(size_bytes) * seconds(1) / nanoseconds(1) / kBytesPerSecond);
    }
    /// The time that passes until the next transfer comes back, and which that was.
    std::pair<nanoseconds, IoRequest*> next() {
        const Clock::time_point before = Clock::now();
        IoRequest* finished = nullptr;
        EXPECT_EQ(engine.reap({&finished, 1}, kLong), 1u);
        return {Clock::now() - before, finished};
    }

    FakeClock clock;
    ThrottledEngine engine{std::make_unique<InstantEngine>(clock), double{kBytesPerSecond}};
    AlignedBuffer memory{64 * kSectorBytes};
};

// A transfer comes back when the slow disk would have done it, not before. Method: a sector, asked for a millisecond
// too early and then again.
TEST_F(ThrottledTime, TransferIsKeptUntilItsTime) {
    IoRequest request{.buffer = memory.bytes().first(kSectorBytes)};
    IoRequest* pointer = &request;
    ASSERT_EQ(engine.submit({&pointer, 1}), 1u);
    IoRequest* finished = nullptr;
    EXPECT_EQ(engine.reap({&finished, 1}, milliseconds(1)), 0u);  // a sector takes 1.024 ms
    EXPECT_EQ(engine.reap({&finished, 1}, milliseconds(1)), 1u);
    EXPECT_EQ(finished, &request);
}

// Transfers come back at the disk's rate, no slower and no faster, whatever their size, number and direction. Method:
// 200 of 1 to 64 sectors in both directions, as many at once as the engine takes; each at the time at which so many
// bytes have passed, but for the millisecond in which waits are counted.
TEST_F(ThrottledTime, RateIsThatOfTheDisk) {
    std::mt19937 random(1);
    std::deque<IoRequest> requests(200);
    const Clock::time_point start = Clock::now();
    std::size_t submitted = 0;
    std::size_t passed_bytes = 0;
    for (IoRequest& expected : requests) {
        for (; submitted < requests.size(); ++submitted) {
            IoRequest& request = requests[submitted];
            request.direction = random() % 2 == 0 ? IoDirection::read : IoDirection::write;
            request.buffer = memory.bytes().first((1 + random() % 64) * kSectorBytes);
            IoRequest* pointer = &request;
            if (engine.submit({&pointer, 1}) == 0) break;
        }
        ASSERT_EQ(next().second, &expected);
        passed_bytes += expected.buffer.size();
        ASSERT_GE(Clock::now() - start, time_of(passed_bytes));
        ASSERT_LT(Clock::now() - start, time_of(passed_bytes) + milliseconds(1));
    }
}

// A disk that had nothing to do is no faster afterwards. Method: a transfer after a minute, twice.
TEST_F(ThrottledTime, IdleTimeIsNotSavedUp) {
    IoRequest request{.buffer = memory.bytes()};
    for (int time = 0; time < 2; ++time) {
        clock.advance(seconds(60));
        IoRequest* pointer = &request;
        ASSERT_EQ(engine.submit({&pointer, 1}), 1u);
        const nanoseconds passed = next().first;
        EXPECT_GE(passed, time_of(request.buffer.size()));
        EXPECT_LT(passed, time_of(request.buffer.size()) + milliseconds(1));
    }
}

TEST(ThrottledEngine, RateOfNothingIsRefused) {
    EXPECT_THROW(ThrottledEngine(make_io_engine(IoEngineKind::threads, 8), 0), InvalidArgument);
}

}  // namespace
}  // namespace torch_offload::test
