// What every Memory promises, whatever it is made of. The bytes are looked at from the host.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "device/memory.h"

namespace torch_offload::test {

/// Factory: a default-constructible type with `Memory& memory()`.
template <typename Factory>
class MemoryContract : public testing::Test {
protected:
    MemoryContract() : memory_(factory_.memory()), granule_bytes_(memory_.granularity_bytes()) {}

    /// A reserved range that is released with the test.
    std::span<std::byte> range_of(std::size_t granules) {
        const auto range = memory_.reserve(granules * granule_bytes_, nullptr);
        ranges_.push_back(range);
        return range;
    }
    void TearDown() override {
        for (const auto range : ranges_) memory_.release(range);
    }
    static void write(std::span<std::byte> bytes, int value) { std::memset(bytes.data(), value, bytes.size()); }
    static bool all_are(std::span<const std::byte> bytes, int value) {
        return std::ranges::all_of(bytes, [&](std::byte byte) { return byte == static_cast<std::byte>(value); });
    }

    Factory factory_;
    Memory& memory_;
    std::size_t granule_bytes_;
    std::vector<std::span<std::byte>> ranges_;
};

TYPED_TEST_SUITE_P(MemoryContract);

// Addresses come in whole granules, and not twice. Method: sizes beside a granule.
TYPED_TEST_P(MemoryContract, ReservesWholeGranules) {
    const auto small = this->memory_.reserve(1, nullptr);
    const auto large = this->memory_.reserve(this->granule_bytes_ + 1, nullptr);
    EXPECT_EQ(small.size(), this->granule_bytes_);
    EXPECT_EQ(large.size(), 2 * this->granule_bytes_);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(small.data()) % this->granule_bytes_, 0u);
    EXPECT_TRUE(small.data() + small.size() <= large.data() || large.data() + large.size() <= small.data());
    this->memory_.release(small);
    this->memory_.release(large);
    EXPECT_THROW(this->memory_.reserve(0, nullptr), InvalidArgument);
}

// Bytes move from address to address and back. Method: a frame's life, three times.
TYPED_TEST_P(MemoryContract, BytesMove) {
    const auto slot = this->range_of(2);
    const auto place = this->range_of(2);
    this->memory_.commit(slot, HugePages::allowed);
    for (int value = 1; value <= 3; ++value) {
        this->write(slot, value);
        this->memory_.move(slot, place.data(), Protection::read_write);
        EXPECT_TRUE(this->all_are(place, value));
        this->write(place, value + 10);
        this->memory_.move(place, slot.data(), Protection::read_write);
        EXPECT_TRUE(this->all_are(slot, value + 10));
    }
}

// Parts of what was committed at once move alone, and together again, or are refused where it keeps its place. Method:
// three granules through three places.
TYPED_TEST_P(MemoryContract, GranulesMoveAlone) {
    const auto range = this->range_of(3);
    const auto other = this->range_of(3);
    this->memory_.commit(range, HugePages::never);
    for (std::size_t i = 0; i < 3; ++i) {
        const auto granule = range.subspan(i * this->granule_bytes_, this->granule_bytes_);
        this->write(granule, static_cast<int>(i) + 1);
        const std::size_t turned = (i + 1) % 3 * this->granule_bytes_;
        if (this->memory_.keeps_place()) {
            EXPECT_THROW(this->memory_.move(granule, other.data() + turned, Protection::read_write), LogicError);
            continue;
        }
        this->memory_.move(granule, other.data() + turned, Protection::read_write);
    }
    for (std::size_t i = 0; i < 3 && !this->memory_.keeps_place(); ++i) {
        const auto granule = other.subspan((i + 1) % 3 * this->granule_bytes_, this->granule_bytes_);
        EXPECT_TRUE(this->all_are(granule, static_cast<int>(i) + 1));
    }
}

// Memory that was read-only to the program can be written after protect(). Method: moved in for reading, then written.
TYPED_TEST_P(MemoryContract, ProtectionGrows) {
    const auto slot = this->range_of(1);
    const auto place = this->range_of(1);
    this->memory_.commit(slot, HugePages::allowed);
    this->write(slot, 5);
    this->memory_.move(slot, place.data(), Protection::read);
    EXPECT_TRUE(this->all_are(place, 5));
    this->memory_.protect(place, Protection::read_write);
    this->write(place, 6);
    EXPECT_TRUE(this->all_are(place, 6));
}

TYPED_TEST_P(MemoryContract, ZerosAreZeros) {
    const auto range = this->range_of(2);
    this->memory_.commit(range, HugePages::allowed);
    this->write(range, 0xEE);
    this->memory_.fill_zero(range);
    EXPECT_TRUE(this->all_are(range, 0));
}

// Addresses outlive their memory. Method: decommit, commit again, write.
TYPED_TEST_P(MemoryContract, AddressesOutliveMemory) {
    const auto range = this->range_of(2);
    for (int round = 0; round < 3; ++round) {
        this->memory_.commit(range, HugePages::allowed);
        this->write(range, round);
        EXPECT_TRUE(this->all_are(range, round));
        this->memory_.decommit(range);
    }
}

REGISTER_TYPED_TEST_SUITE_P(MemoryContract, ReservesWholeGranules, BytesMove, GranulesMoveAlone, ProtectionGrows,
                            ZerosAreZeros, AddressesOutliveMemory);

}  // namespace torch_offload::test
