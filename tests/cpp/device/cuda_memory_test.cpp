#include "device/cuda_memory.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "base/check.h"
#include "conformance/memory_contract.h"
#include "device/address_space.h"
#include "support/fake_gpu.h"

namespace torch_offload::test {
namespace {

struct HostMemory {
    Memory& memory() { return AddressSpace::process(); }
};
struct GpuMemory {
    Memory& memory() { return gpu.memory; }
    FakeGpu gpu;
};
INSTANTIATE_TYPED_TEST_SUITE_P(Host, MemoryContract, HostMemory);
INSTANTIATE_TYPED_TEST_SUITE_P(Gpu, MemoryContract, GpuMemory);

constexpr std::size_t kGranuleBytes = FakeCudaOptions{}.granule_bytes;

/// Three granules of memory that holds 1, 2 and 3, and a place for it.
struct Moving {
    Moving()
        : from(gpu.memory.reserve(3 * kGranuleBytes, nullptr)), to(gpu.memory.reserve(3 * kGranuleBytes, nullptr)) {
        gpu.memory.commit(from, HugePages::allowed);
        for (std::size_t i = 0; i < 3; ++i) from[i * kGranuleBytes] = static_cast<std::byte>(i + 1);
    }
    ~Moving() {
        gpu.memory.release(from);
        gpu.memory.release(to);
    }
    static bool holds(std::span<std::byte> range) {
        for (std::size_t i = 0; i < 3; ++i) {
            if (range[i * kGranuleBytes] != static_cast<std::byte>(i + 1)) return false;
        }
        return true;
    }

    FakeGpu gpu;
    std::span<std::byte> from;
    std::span<std::byte> to;
};

// A page that comes and goes costs three calls of the driver, however large it is. Method: counted.
TEST(CudaMemory, MovesAreThreeCalls) {
    Moving moving;
    const auto calls = [&] {
        std::size_t count = 0;
        for (const char* const symbol : {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"}) {
            count += moving.gpu.driver.call_count(symbol);
        }
        return count;
    };
    const std::size_t before = calls();
    moving.gpu.memory.move(moving.from, moving.to.data(), Protection::read);
    moving.gpu.memory.protect(moving.to, Protection::read_write);
    EXPECT_TRUE(Moving::holds(moving.to));
    EXPECT_TRUE(Moving::holds(moving.from));
    moving.gpu.memory.move(moving.to, moving.from.data(), Protection::read_write);
    EXPECT_FALSE(moving.gpu.driver.is_mapped(moving.to));
    EXPECT_EQ(calls(), before + 3);
}

// A move that fails leaves the memory where it was, usable, and the next one succeeds. Method: each call of the way
// there and back fails once.
TEST(CudaMemory, FailedMoveIsUndone) {
    for (const char* const symbol : {"cuMemMap", "cuMemSetAccess"}) {
        Moving moving;
        moving.gpu.driver.fail(symbol, CuResult::map_failed);
        EXPECT_THROW(moving.gpu.memory.move(moving.from, moving.to.data(), Protection::read_write), LogicError);
        EXPECT_TRUE(Moving::holds(moving.from)) << symbol;
        EXPECT_FALSE(moving.gpu.driver.is_mapped(moving.to)) << symbol;
        moving.gpu.memory.move(moving.from, moving.to.data(), Protection::read_write);
        EXPECT_TRUE(Moving::holds(moving.to)) << symbol;
        moving.gpu.driver.fail("cuMemUnmap", CuResult::map_failed);
        EXPECT_THROW(moving.gpu.memory.move(moving.to, moving.from.data(), Protection::read_write), LogicError);
        EXPECT_TRUE(Moving::holds(moving.to)) << symbol;
        moving.gpu.memory.move(moving.to, moving.from.data(), Protection::read_write);
        EXPECT_TRUE(Moving::holds(moving.from)) << symbol;
    }
}

// Memory that the device does not have is an error that takes nothing. Method: too little for three granules, and each
// call of a commit failing once.
TEST(CudaMemory, FailedCommitTakesNothing) {
    FakeGpu gpu({.memory_bytes = 2 * kGranuleBytes});
    const auto range = gpu.memory.reserve(3 * kGranuleBytes, nullptr);
    EXPECT_THROW(gpu.memory.commit(range, HugePages::allowed), OutOfTierMemory);
    EXPECT_EQ(gpu.driver.created_bytes(), 0u);
    const auto small = range.first(2 * kGranuleBytes);
    for (const char* const symbol : {"cuMemCreate", "cuMemMap", "cuMemSetAccess"}) {
        gpu.driver.fail(symbol, CuResult::not_permitted, 0);
        EXPECT_THROW(gpu.memory.commit(small, HugePages::allowed), LogicError);
        EXPECT_EQ(gpu.driver.created_bytes(), 0u) << symbol;
    }
    gpu.memory.commit(small, HugePages::allowed);
    gpu.memory.release(range);
}

// What is no whole granule, or has no memory, is refused before the driver is asked. Method: one of each.
TEST(CudaMemory, PartsAndHolesAreRefused) {
    Moving moving;
    Memory& memory = moving.gpu.memory;
    const std::size_t asked = moving.gpu.driver.call_count("cuMemUnmap");
    EXPECT_THROW(memory.move(moving.from.first(kGranuleBytes / 2), moving.to.data(), Protection::read), LogicError);
    EXPECT_THROW(memory.move(moving.from.first(kGranuleBytes), moving.to.data() + 1, Protection::read), LogicError);
    EXPECT_THROW(memory.move(moving.to, moving.from.data(), Protection::read), LogicError);
    EXPECT_THROW(memory.decommit(moving.to), LogicError);
    EXPECT_EQ(moving.gpu.driver.call_count("cuMemUnmap"), asked);
    EXPECT_TRUE(Moving::holds(moving.from));
}

// Nothing of a range is left once it is released, in whichever order. Method: moved; where it was committed is released
// first, or last; the fake looks at what is left.
TEST(CudaMemory, ReleaseGivesMemoryBack) {
    for (const bool is_place_first : {false, true}) {
        FakeGpu gpu;
        const auto slot = gpu.memory.reserve(kGranuleBytes, nullptr);
        const auto place = gpu.memory.reserve(kGranuleBytes, nullptr);
        gpu.memory.commit(slot, HugePages::allowed);
        gpu.memory.move(slot, place.data(), Protection::read_write);
        gpu.memory.release(is_place_first ? place : slot);
        gpu.memory.release(is_place_first ? slot : place);
        EXPECT_EQ(gpu.driver.created_bytes(), 0u);
    }
}

// A device that is lost in the middle of a move says so, and the end of everything is quiet. Method: an error that
// ends it.
TEST(CudaMemory, LossDuringAMoveIsSaid) {
    Moving moving;
    moving.gpu.driver.lose_at("cuMemSetAccess", CuResult::ecc_uncorrectable);
    EXPECT_THROW(moving.gpu.memory.move(moving.from, moving.to.data(), Protection::read_write), TierIoError);
    EXPECT_THROW(moving.gpu.memory.fill_zero(moving.from), TierIoError);
    EXPECT_THROW(moving.gpu.memory.decommit(moving.from), TierIoError);
}

TEST(CudaMemory, PoisonIsSeen) {
    Moving moving;
    moving.gpu.memory.poison(moving.from);
    EXPECT_EQ(moving.from.front(), std::byte{0xFF});
    EXPECT_EQ(moving.from.back(), std::byte{0xFF});
}

}  // namespace
}  // namespace torch_offload::test
