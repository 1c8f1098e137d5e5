#include "storage/striped_file.h"

#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <limits>

#include "base/check.h"
#include "base/units.h"
#include "support/scratch_directory.h"

namespace torch_offload::test {
namespace {

constexpr std::size_t kExtentBytes = kMiB;

// Directories fill evenly, also after extents of one of them went. Method: two directories, count extents per file.
TEST(StripedFile, SpreadsEvenly) {
    const ScratchDirectory first, second;
    const std::array directories{first.path(), second.path()};
    StripedFile file(directories);
    std::array<std::vector<Extent>, 2> extents;
    const auto take = [&] {
        const Extent extent = file.allocate(kExtentBytes);
        extents.at(extent.file).push_back(extent);
    };
    for (int i = 0; i < 8; ++i) take();
    ASSERT_EQ(extents[0].size(), 4u);
    ASSERT_EQ(extents[1].size(), 4u);
    for (int i = 0; i < 2; ++i) {
        file.free(extents[1].back());
        extents[1].pop_back();
    }
    take();
    take();
    EXPECT_EQ(extents[1].size(), 4u);
    EXPECT_EQ(file.allocated_bytes(), 8 * kExtentBytes);
    EXPECT_EQ(file.directory(extents[1].front()), second.path());
    EXPECT_NE(file.file_descriptor(extents[0].front()), file.file_descriptor(extents[1].front()));
}

// What no disk can hold is ENOSPC; each was asked. Method: more than any disk has, then an extent that fits.
TEST(StripedFile, FullDisksAreENOSPC) {
    const ScratchDirectory first, second;
    const std::array directories{first.path(), second.path()};
    StripedFile file(directories);
    constexpr std::size_t kTooMuch = std::numeric_limits<std::int64_t>::max() / kSectorBytes * kSectorBytes;
    try {
        file.allocate(kTooMuch);
        FAIL() << "the disk had room";
    } catch (const TierIoError& error) {
        EXPECT_EQ(error.error_number(), ENOSPC);
    }
    EXPECT_EQ(file.allocate(kExtentBytes).size_bytes, kExtentBytes);
}

// A file that may not grow leaves the others to. Method: a cap on one of two, then on both.
TEST(StripedFile, CapsAreFullDisks) {
    const ScratchDirectory first, second;
    const std::array directories{first.path(), second.path()};
    const std::array limits{ScratchLimits{.max_bytes = kExtentBytes}, ScratchLimits{.max_bytes = 3 * kExtentBytes}};
    StripedFile file(directories, limits);
    std::array<int, 2> counts{};
    for (int i = 0; i < 4; ++i) ++counts.at(file.allocate(kExtentBytes).file);
    EXPECT_EQ(counts, (std::array{1, 3}));
    EXPECT_THROW(file.allocate(kExtentBytes), TierIoError);
    EXPECT_EQ(file.size_bytes(), 4 * kExtentBytes);
    EXPECT_THROW(StripedFile(directories, std::span(limits).first(1)), InvalidArgument);
}

// Without a directory there is nothing to open. Method: an empty list.
TEST(StripedFile, NeedsADirectory) { EXPECT_THROW(StripedFile{std::span<const std::string>{}}, InvalidArgument); }

}  // namespace
}  // namespace torch_offload::test
