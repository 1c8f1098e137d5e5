// Pages that lie in a file of somebody else's until they are written.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <vector>

#include "base/check.h"
#include "pager/pager.h"
#include "support/counting_memory.h"
#include "support/pager_fixture.h"
#include "support/scratch_directory.h"

namespace torch_offload::test {
namespace {

constexpr std::size_t kPages = 6;
constexpr std::size_t kBehindBytes = 5000;  // the file goes on, and ends within a sector

/// A file with the words of segment 1 behind `lead_bytes`, and a segment whose pages lie there.
class HomePages : public testing::TestWithParam<std::size_t> {
protected:
    HomePages() : path_(directory_.path() + "/weights") {
        std::vector<std::uint32_t> words(kPages * kPageElements);
        for (std::size_t i = 0; i < words.size(); ++i) words[i] = word_of(1, i);
        std::ofstream file(path_, std::ios::binary);
        file << std::string(lead_bytes(), 'l');
        file.write(reinterpret_cast<const char*>(words.data()), kPages * kPageBytes);
        file << std::string(kBehindBytes, 'b');
    }

    static std::size_t lead_bytes() { return GetParam(); }

    std::shared_ptr<const HomeFile> open_home() const {
        const int file = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
        const std::size_t size_bytes = lead_bytes() + kPages * kPageBytes + kBehindBytes;
        void* const mapped = ::mmap(nullptr, size_bytes, PROT_READ, MAP_PRIVATE, file, 0);
        ::close(file);
        OFFLOAD_CHECK(mapped != MAP_FAILED, LogicError, "no mapping");
        std::optional<MappedFile> found = file_under({static_cast<std::byte*>(mapped), size_bytes});
        ::munmap(mapped, size_bytes);
        OFFLOAD_CHECK(found, LogicError, "the file cannot be read directly");
        return std::make_shared<const HomeFile>(std::move(*found));
    }

    std::shared_ptr<Segment> segment_in(Pager& pager, const std::shared_ptr<const HomeFile>& home,
                                        std::size_t element_bytes = 4) const {
        auto segment = pager.create_segment(kPages * kPageBytes, element_bytes, SegmentKind::parameter);
        segment->label = "weights";
        EXPECT_EQ(pager.set_home(*segment, home, lead_bytes()), segment->page_count());
        return segment;
    }

    /// Writes a byte of page `index` into the file, in place.
    void change_file(std::size_t index) const {
        const int file = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
        const auto offset = static_cast<off_t>(lead_bytes() + index * kPageBytes + 17);
        EXPECT_EQ(::pwrite(file, "!", 1, offset), 1);
        EXPECT_EQ(::fsync(file), 0);
        EXPECT_EQ(::close(file), 0);
    }

    ScratchDirectory directory_;
    std::string path_;
};

// Nothing is read before a page is used, and nothing written when it leaves: it is read from the file again.
TEST_P(HomePages, AreReadFromTheirFileAndNeverWritten) {
    Pager pager(options_with(16));
    const auto segment = segment_in(pager, open_home());
    EXPECT_EQ(total(pager.statistics().read_bytes), 0u);
    EXPECT_EQ(pager.statistics().store.home_bytes, kPages * kPageBytes);
    for (int round = 1; round <= 2; ++round) {
        const PinGuard guard = pin(pager, segment, Access::read);
        EXPECT_TRUE(holds(*segment, 1));
    }
    for (std::uint64_t round = 2; round <= 3; ++round) {
        EXPECT_EQ(pager.evict(segment), 0u);
        const PinGuard guard = pin(pager, segment, Access::read);
        EXPECT_TRUE(holds(*segment, 1));
        EXPECT_EQ(total(pager.statistics().read_bytes), round * kPages * kPageBytes);
    }
    EXPECT_EQ(total(pager.statistics().written_bytes), 0u);
    EXPECT_EQ(pager.statistics().store.stored_bytes, 0u);
}

// Memory for them, of their size, is made and cleared before they are read: for all, or as much as the budget has but
// for an eighth.
TEST_P(HomePages, HaveMemoryBeforeTheyAreRead) {
    struct Case {
        std::size_t budget_pages, made_pages, element_bytes;
    };
    for (const Case& each : {Case{16, kPages, 4}, Case{5, 4, 4}, Case{16, kPages, 2}}) {
        const std::size_t made_bytes = each.made_pages * kPageBytes;
        CountingMemory memory;
        PagerOptions options = options_with(each.budget_pages);
        options.memory = &memory;
        Pager pager(options);
        const auto segment = segment_in(pager, open_home(), each.element_bytes);
        const auto free_bytes = [&] { return pager.statistics().memory.free_frame_bytes; };
        EXPECT_TRUE(comes_true([&] { return free_bytes() == made_bytes; })) << free_bytes();
        pager.flush();  // and has looked ahead once more
        EXPECT_EQ(total(pager.statistics().read_bytes), 0u);
        for (std::size_t i = 0; i < made_bytes / segment->page_bytes(); ++i) {
            const PinGuard guard = pager.pin_pages(segment, i, 1, Access::read);
            EXPECT_EQ(pager.statistics().memory.frame_bytes, (i + 1) * segment->page_bytes());
        }
        EXPECT_EQ(memory.populated_bytes(), made_bytes);
        EXPECT_EQ(memory.peak_bytes(), made_bytes) << "what was read lies in that";
    }
}

// The first write of a page moves it to the scratch file, and that page only. The file stays as it is.
TEST_P(HomePages, LeaveTheirFileWhenTheyAreWritten) {
    Pager pager(options_with(16));
    const auto segment = segment_in(pager, open_home());
    {
        const PinGuard guard = pager.pin_pages(segment, 2, 1, Access::write);
        segment->range()[2 * kPageBytes] ^= std::byte{0xFF};
    }
    {
        const PinGuard guard = pager.pin_pages(segment, 4, 1, Access::overwrite);
        std::ranges::fill(segment->page_range(4), std::byte{7});
    }
    EXPECT_EQ(pager.evict(segment), 0u);
    EXPECT_EQ(total(pager.statistics().written_bytes), 2 * kPageBytes);
    EXPECT_EQ(pager.statistics().store.stored_bytes, 2 * kPageBytes);
    EXPECT_EQ(pager.statistics().store.home_bytes, (kPages - 2) * kPageBytes);
    const PinGuard guard = pin(pager, segment, Access::read);
    EXPECT_EQ(segment->range()[4 * kPageBytes + 99], std::byte{7});
    Pager other(options_with(16));
    const auto unchanged = segment_in(other, open_home());
    const PinGuard there = pin(other, unchanged, Access::read);
    EXPECT_TRUE(holds(*unchanged, 1));
    EXPECT_EQ(segment->range()[2 * kPageBytes], unchanged->range()[2 * kPageBytes] ^ std::byte{0xFF});
}

// A file that is deleted, or whose name another takes, is still there for who has it open.
TEST_P(HomePages, OutliveTheNameOfTheirFile) {
    Pager pager(options_with(16));
    const auto segment = segment_in(pager, open_home());
    ASSERT_EQ(::unlink(path_.c_str()), 0);
    std::ofstream(path_) << "another";
    const PinGuard guard = pin(pager, segment, Access::read);
    EXPECT_TRUE(holds(*segment, 1));
}

// Bytes that somebody wrote into the file are never used: neither those of a page that was read before, whose checksum
// is known, nor of one that was not, where only the file's time tells.
TEST_P(HomePages, OfAFileThatWasWrittenToRaise) {
    Pager pager(options_with(16));
    const auto segment = segment_in(pager, open_home());
    {
        const PinGuard guard = pager.pin_pages(segment, 0, 2, Access::read);
    }
    ASSERT_EQ(pager.evict(segment), 0u);
    change_file(1);
    {
        const PinGuard guard = pager.pin_pages(segment, 0, 1, Access::read);
    }  // its own bytes are as they were
    for (const std::size_t index : {std::size_t{1}, std::size_t{3}}) {
        try {
            const PinGuard guard = pager.pin_pages(segment, index, 1, Access::read);
            FAIL() << "page " << index << " was read";
        } catch (const CorruptPage& error) {
            EXPECT_NE(std::string(error.what()).find("the file was changed"), std::string::npos) << error.what();
            EXPECT_NE(std::string(error.what()).find(path_), std::string::npos) << error.what();
            EXPECT_NE(std::string(error.what()).find("weights"), std::string::npos) << error.what();
        }
    }
    {
        const PinGuard guard = pager.pin_pages(segment, 3, 1, Access::overwrite);
    }  // overwriting heals
    EXPECT_EQ(pager.evict(segment), 0u);
    const PinGuard guard = pager.pin_pages(segment, 3, 1, Access::read);
}

// What the file has lost its end of raises as well.
TEST_P(HomePages, OfAFileThatWasTruncatedRaise) {
    Pager pager(options_with(16));
    const auto segment = segment_in(pager, open_home());
    ASSERT_EQ(::truncate(path_.c_str(), static_cast<off_t>(2 * kPageBytes)), 0);
    EXPECT_THROW(pin(pager, segment, Access::read), OffloadError);
    EXPECT_THROW(pager.pin_pages(segment, kPages - 1, 1, Access::read), OffloadError);
}

// Pages behind the last whole sector of the file stay zeros, to be filled by who loads them.
TEST_P(HomePages, EndWhereDirectReadsEnd) {
    Pager pager(options_with(16));
    const auto segment = pager.create_segment((kPages + 1) * kPageBytes, 4, SegmentKind::parameter);
    EXPECT_EQ(pager.set_home(*segment, open_home(), lead_bytes()), kPages);
    const PinGuard guard = pin(pager, segment, Access::read);
    EXPECT_EQ(segment->range()[kPages * kPageBytes], std::byte{0});
}

// A segment that ends gives its pages up; its file is closed with the last of them.
TEST_P(HomePages, EndWithTheirSegment) {
    Pager pager(options_with(16));
    std::shared_ptr<const HomeFile> home = open_home();
    const std::weak_ptr<const HomeFile> watched = home;
    auto segment = segment_in(pager, home);
    home.reset();
    EXPECT_FALSE(watched.expired());
    segment.reset();
    EXPECT_TRUE(watched.expired());
    EXPECT_EQ(pager.statistics().store.home_bytes, 0u);
}

INSTANTIATE_TEST_SUITE_P(Offsets, HomePages, testing::Values(0, 8, 4088, 4096, 7000));

}  // namespace
}  // namespace torch_offload::test
