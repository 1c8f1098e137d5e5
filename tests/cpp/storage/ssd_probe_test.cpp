#include "storage/ssd_probe.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "base/check.h"
#include "base/units.h"
#include "support/aligned_buffer.h"
#include "support/scratch_directory.h"

namespace torch_offload::test {
namespace {

using std::chrono::milliseconds;

class SsdProbeTest : public ::testing::Test {
protected:
    SsdProbeOptions options() const {
        return {.directory = directory.path(), .block_bytes = 64 * kKiB, .file_bytes = 2 * kMiB, .max_depth = 4};
    }

    ScratchDirectory directory;
};

std::string message_of(const SsdProbeOptions& options) {
    try {
        SsdProbe probe(options);
    } catch (const InvalidArgument& error) {
        return error.what();
    }
    return "";
}

/// The descriptor of the nameless file in `directory` that this process has open, -1 if there is none.
int scratch_descriptor(const std::string& directory) {
    for (int file = 3; file < 256; ++file) {
        char target[512];
        const std::string link = "/proc/self/fd/" + std::to_string(file);
        const ssize_t length = ::readlink(link.c_str(), target, sizeof target);
        if (length > 0 && std::string(target, static_cast<std::size_t>(length)).starts_with(directory)) return file;
    }
    return -1;
}

// A pattern moves what it says, in whole blocks, at every depth. Method: the byte counts of each direction.
TEST_F(SsdProbeTest, CountsWhatItMoves) {
    SsdProbe probe(options());
    for (const std::size_t depth : {1, 3, 4}) {
        const SsdBandwidth read = probe.measure({SsdPattern::read, depth, milliseconds{20}});
        EXPECT_GT(read.read_bytes, 0u);
        EXPECT_EQ(read.read_bytes % (64 * kKiB), 0u);
        EXPECT_EQ(read.written_bytes, 0u);
        const SsdBandwidth write = probe.measure({SsdPattern::write, depth, milliseconds{20}});
        EXPECT_EQ(write.read_bytes, 0u);
        EXPECT_GT(write.written_bytes, 0u);
        const SsdBandwidth mix = probe.measure({SsdPattern::mix, depth, milliseconds{20}});
        const std::int64_t difference = static_cast<std::int64_t>(mix.read_bytes - mix.written_bytes);
        EXPECT_LE(std::abs(difference), static_cast<std::int64_t>(64 * kKiB));
        EXPECT_GE(mix.seconds, 0.02);
        EXPECT_DOUBLE_EQ(mix.bytes_per_second(), static_cast<double>(mix.read_bytes + mix.written_bytes) / mix.seconds);
    }
}

// A measurement of no length still moves one transfer. Method: a duration of 0.
TEST_F(SsdProbeTest, MovesAtLeastOneBlock) {
    SsdProbe probe(options());
    EXPECT_GE(probe.measure({SsdPattern::read, 2, milliseconds{0}}).read_bytes, 64 * kKiB);
}

std::size_t prepared_bytes = 0;

// Its memory can be prepared, such as to lie in huge pages. Method: the size of what the caller is shown.
TEST_F(SsdProbeTest, ShowsItsMemoryToTheCaller) {
    SsdProbeOptions prepared = options();
    prepared.prepare_memory = [](std::span<std::byte> memory) noexcept { prepared_bytes = memory.size(); };
    SsdProbe probe(prepared);
    EXPECT_GE(prepared_bytes, 4 * 64 * kKiB);
    EXPECT_GT(probe.measure({SsdPattern::read, 4, milliseconds{20}}).read_bytes, 0u);
}

// The stamps outlive reads, writes and mixes, so that each read proves what was written. Method: all patterns twice;
// any read of wrong bytes throws.
TEST_F(SsdProbeTest, EveryReadIsChecked) {
    SsdProbe probe(options());
    for (int round = 0; round < 2; ++round) {
        for (const SsdPattern pattern : {SsdPattern::write, SsdPattern::mix, SsdPattern::read}) {
            EXPECT_NO_THROW(probe.measure({pattern, 4, milliseconds{20}}));
        }
    }
}

// Bytes that changed on disk are found. Method: the test overwrites the whole file behind the probe's back.
TEST_F(SsdProbeTest, ForeignBytesAreCorrupt) {
    SsdProbe probe(options());
    const int file = scratch_descriptor(directory.path());
    ASSERT_GE(file, 0);
    AlignedBuffer foreign(probe.file_bytes());
    ASSERT_EQ(::pwrite(file, foreign.bytes().data(), foreign.bytes().size(), 0),
              static_cast<ssize_t>(foreign.bytes().size()));
    EXPECT_THROW(probe.measure({SsdPattern::read, 2, milliseconds{20}}), CorruptPage);
}

// A file that became shorter is an error, not a figure. Method: truncated to nothing.
TEST_F(SsdProbeTest, FailedReadIsAnError) {
    SsdProbe probe(options());
    const int file = scratch_descriptor(directory.path());
    ASSERT_GE(file, 0);
    ASSERT_EQ(::ftruncate(file, 0), 0);
    EXPECT_THROW(probe.measure({SsdPattern::read, 2, milliseconds{20}}), TierIoError);
}

// Options that cannot be served are refused by name. Method: one wrong value each.
TEST_F(SsdProbeTest, RefusesWhatCannotBe) {
    SsdProbeOptions uneven = options();
    uneven.block_bytes = 1000;
    EXPECT_NE(message_of(uneven).find("block_bytes"), std::string::npos);
    SsdProbeOptions shallow = options();
    shallow.max_depth = 0;
    EXPECT_NE(message_of(shallow).find("max_depth"), std::string::npos);
    SsdProbeOptions small = options();
    small.file_bytes = 7 * 64 * kKiB;
    EXPECT_NE(message_of(small).find("smaller depth"), std::string::npos);
    SsdProbe probe(options());
    EXPECT_THROW(probe.measure({SsdPattern::read, 0, milliseconds{1}}), InvalidArgument);
    EXPECT_THROW(probe.measure({SsdPattern::read, 5, milliseconds{1}}), InvalidArgument);
}

// Nothing is left in the directory. Method: its contents while a probe lives and after.
TEST_F(SsdProbeTest, LeavesNothingBehind) {
    {
        SsdProbe probe(options());
        EXPECT_TRUE(directory.is_empty());
    }
    EXPECT_TRUE(directory.is_empty());
}

}  // namespace
}  // namespace torch_offload::test
