#include "device/locked_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "conformance/memory_contract.h"
#include "support/fake_gpu.h"
#include "support/log_capture.h"

namespace torch_offload::test {
namespace {

struct Locked {
    Memory& memory() { return gpu.host_memory; }
    FakeGpu gpu;
};
INSTANTIATE_TYPED_TEST_SUITE_P(LockedHost, MemoryContract, Locked);

constexpr std::size_t kBytes = 4 * kSectorBytes;

/// Committed memory of the host, and a place where a page is read and written.
struct Page {
    explicit Page(const FakeCudaOptions& options = {})
        : gpu(options),
          slot(gpu.host_memory.reserve(kBytes, nullptr)),
          place(gpu.host_memory.reserve(kBytes, nullptr)) {
        gpu.host_memory.commit(slot, HugePages::allowed);
    }
    ~Page() {
        gpu.host_memory.release(slot);
        gpu.host_memory.release(place);
    }

    FakeGpu gpu;
    std::span<std::byte> slot;
    std::span<std::byte> place;
};

// What the driver has registered stays where it is while a page has the memory elsewhere, and shows what is written
// there. Method: both looked at, before, between and after.
TEST(LockedMemory, KeepsItsPlace) {
    Page page;
    EXPECT_TRUE(page.gpu.driver.is_registered(page.slot));
    EXPECT_TRUE(page.gpu.host_memory.is_locked(page.slot.subspan(kSectorBytes)));
    EXPECT_FALSE(page.gpu.host_memory.is_locked(page.place));
    page.gpu.host_memory.move(page.slot, page.place.data(), Protection::read_write);
    std::memset(page.place.data(), 7, kBytes);
    EXPECT_TRUE(std::ranges::all_of(page.slot, [](std::byte byte) { return byte == std::byte{7}; }));
    EXPECT_TRUE(page.gpu.driver.is_registered(page.slot));
    page.gpu.host_memory.move(page.place, page.slot.data(), Protection::read_write);
    EXPECT_EQ(page.slot.back(), std::byte{7});
}

// It moves as a whole, away from where it was committed and back. Method: a part, a place without memory, a place that
// is not its own.
TEST(LockedMemory, RefusesOtherMoves) {
    Page page;
    Memory& memory = page.gpu.host_memory;
    const auto other = memory.reserve(kBytes, nullptr);
    EXPECT_THROW(memory.move(page.slot.first(kSectorBytes), page.place.data(), Protection::read), LogicError);
    EXPECT_THROW(memory.move(page.place, page.slot.data(), Protection::read), LogicError);
    memory.move(page.slot, page.place.data(), Protection::read);
    EXPECT_THROW(memory.move(page.place, other.data(), Protection::read), LogicError);
    memory.release(other);
}

// Memory that is given back is unregistered first, and costs nothing afterwards. Method: the place in the file is taken
// again, and is zeros.
TEST(LockedMemory, GivesMemoryBack) {
    Page page;
    std::memset(page.slot.data(), 7, kBytes);
    page.gpu.host_memory.decommit(page.slot);
    EXPECT_FALSE(page.gpu.driver.is_registered(page.slot));
    EXPECT_FALSE(page.gpu.host_memory.is_locked(page.slot));
    page.gpu.host_memory.commit(page.slot, HugePages::allowed);
    EXPECT_EQ(page.slot.back(), std::byte{0});
}

// Where the system refuses to register, it is ordinary memory, and copies are what they were. Method: a driver that
// refuses; bytes to the GPU and back.
TEST(LockedMemory, IsPageableWhereRegisteringIsRefused) {
    const LogCapture log(LogLevel::error);
    Page page({.may_register = false});
    EXPECT_FALSE(page.gpu.host_memory.is_locked(page.slot));
    std::memset(page.slot.data(), 7, kBytes);
    const auto there = page.gpu.memory.reserve(kBytes, nullptr);
    page.gpu.memory.commit(there, HugePages::allowed);
    const auto stream = page.gpu.device.make_stream(LinkDirection::to_device);
    stream->copy(there.first(kBytes), page.slot);
    stream->record()->wait();
    EXPECT_EQ(there[kBytes - 1], std::byte{7});
    page.gpu.memory.release(there);
}

// Locked memory is copied where it lies. Method: nothing but the page is registered, and the copy has not begun when
// copy() returns, so that what is written meanwhile arrives.
TEST(LockedMemory, IsCopiedWithoutBuffers) {
    Page page;
    const auto there = page.gpu.memory.reserve(kBytes, nullptr);
    page.gpu.memory.commit(there, HugePages::allowed);
    {
        const auto to_device = page.gpu.device.make_stream(LinkDirection::to_device);
        const auto to_host = page.gpu.device.make_stream(LinkDirection::to_host);
        page.gpu.driver.hold();
        to_device->copy(there.first(kBytes), page.slot);
        std::memset(page.slot.data(), 9, kBytes);
        page.gpu.driver.let_go();
        to_device->record()->wait();
        std::memset(page.slot.data(), 0, kBytes);
        to_host->copy(page.slot, there.first(kBytes));
        to_host->record()->wait();
    }
    EXPECT_EQ(page.slot.front(), std::byte{9});
    EXPECT_EQ(page.gpu.driver.call_count("cuMemHostRegister_v2"), 1u);
    page.gpu.memory.release(there);
}

// A commit that fails takes nothing. Method: the driver is lost while it registers.
TEST(LockedMemory, FailedCommitTakesNothing) {
    const LogCapture log(LogLevel::error);
    FakeGpu gpu;
    const auto range = gpu.host_memory.reserve(kBytes, nullptr);
    gpu.driver.lose_at("cuMemHostRegister_v2", CuResult::ecc_uncorrectable);
    EXPECT_THROW(gpu.host_memory.commit(range, HugePages::allowed), TierIoError);
    EXPECT_FALSE(gpu.host_memory.is_locked(range));
    gpu.host_memory.release(range);
}

}  // namespace
}  // namespace torch_offload::test
