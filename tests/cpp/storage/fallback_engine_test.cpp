#include "storage/fallback_engine.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "base/units.h"
#include "storage/block_file.h"
#include "storage/thread_engine.h"
#include "support/aligned_buffer.h"
#include "support/breaking_engine.h"

namespace torch_offload::test {
namespace {

using std::chrono::milliseconds;

/// Every transfer finished, or fewer after ten seconds.
std::size_t reap_all(IoEngine& engine, std::size_t count) {
    std::size_t reaped = 0;
    std::vector<IoRequest*> finished(count);
    for (int i = 0; i < 100 && reaped < count; ++i) reaped += engine.reap(finished, milliseconds(100));
    return reaped;
}

// Every transfer is carried out once and right, whichever call of the first engine fails. Method: writes and reads of a
// real file in small batches; the nth call throws, for every n until none does.
TEST(FallbackEngine, EveryTransferEndsWhicheverCallFails) {
    constexpr std::size_t kCount = 12;
    bool is_broken = true;
    int calls = 0;
    for (; is_broken; ++calls) {
        ASSERT_LT(calls, 500);
        BlockFile file(OFFLOAD_TEST_DIRECTORY);
        auto breaking = std::make_unique<BreakingEngine>(std::make_unique<ThreadEngine>(4), calls);
        const auto broken = breaking->is_broken();
        FallbackEngine engine(std::move(breaking));
        std::vector<AlignedBuffer> buffers;
        std::vector<IoRequest> requests(kCount);
        for (std::size_t i = 0; i < kCount; ++i) buffers.emplace_back(kSectorBytes);
        for (const IoDirection direction : {IoDirection::write, IoDirection::read}) {
            for (std::size_t i = 0; i < kCount; ++i) {
                const std::byte value = direction == IoDirection::write ? static_cast<std::byte>(i + 1) : std::byte{0};
                std::ranges::fill(buffers[i].bytes(), value);
                if (direction == IoDirection::write) {
                    requests[i] = {.file_descriptor = file.file_descriptor(),
                                   .offset_bytes = file.allocate(kSectorBytes).offset_bytes,
                                   .buffer = buffers[i].bytes()};
                }
                requests[i].direction = direction;
            }
            for (std::size_t begin = 0; begin < kCount; begin += 3) {
                IoRequest* batch[] = {&requests[begin], &requests[begin + 1], &requests[begin + 2]};
                ASSERT_EQ(engine.submit(batch), 3u);
                ASSERT_EQ(reap_all(engine, 3), 3u);
            }
        }
        for (std::size_t i = 0; i < kCount; ++i) {
            ASSERT_EQ(requests[i].error, 0);
            for (const std::byte value : buffers[i].bytes()) ASSERT_EQ(value, static_cast<std::byte>(i + 1));
        }
        is_broken = broken->load();
        EXPECT_EQ(engine.name(), is_broken ? "threads" : "breaking");
    }
    EXPECT_GE(calls, 16) << "8 batches of a call each to submit and to reap";
}

// A second engine that fails as well is the caller's to see. Method: both break at once.
TEST(FallbackEngine, SecondFailureIsThrown) {
    const auto make_breaking = [](std::size_t capacity) {
        return std::make_unique<BreakingEngine>(std::make_unique<ThreadEngine>(capacity), 1);
    };
    FallbackEngine engine(make_breaking(2), make_breaking);
    IoRequest* finished = nullptr;
    EXPECT_EQ(engine.reap({&finished, 1}, milliseconds(0)), 0u);
    EXPECT_THROW(engine.reap({&finished, 1}, milliseconds(0)), TierIoError);
    EXPECT_THROW(engine.reap({&finished, 1}, milliseconds(0)), TierIoError);
}

// A request that is refused for what it says does not count as a failure of the engine. Method: an odd size.
TEST(FallbackEngine, WrongRequestIsRefusedByTheFirst) {
    FallbackEngine engine(std::make_unique<BreakingEngine>(std::make_unique<ThreadEngine>(2), 100));
    AlignedBuffer memory(kSectorBytes);
    IoRequest request{.file_descriptor = 0, .buffer = memory.bytes().first(100)};
    IoRequest* pointer = &request;
    EXPECT_THROW(engine.submit({&pointer, 1}), InvalidArgument);
    EXPECT_EQ(engine.name(), "breaking");
}

}  // namespace
}  // namespace torch_offload::test
