#include "storage/block_stream.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <fstream>
#include <random>
#include <vector>

#include "base/check.h"
#include "base/units.h"
#include "storage/mapped_file.h"
#include "support/aligned_buffer.h"
#include "support/scratch_directory.h"

namespace torch_offload::test {
namespace {

constexpr std::size_t kBlockBytes = 64 * kKiB;
constexpr std::size_t kBlockCount = 3;
constexpr std::size_t kFileBytes = 20 * kBlockBytes + 777;

/// A file of random bytes that is not in the page cache, and a private mapping of it.
class BlockStreamTest : public testing::Test {
protected:
    BlockStreamTest()
        : path_(directory_.path() + "/content"), content_(kFileBytes), memory_(kBlockCount * kBlockBytes) {
        std::mt19937 random(7);
        for (std::byte& byte : content_) byte = static_cast<std::byte>(random());
        std::ofstream(path_, std::ios::binary)
            .write(reinterpret_cast<const char*>(content_.data()), static_cast<std::streamsize>(kFileBytes));
        file_ = FileDescriptor(::open(path_.c_str(), O_RDWR | O_CLOEXEC));
        forget_cached();
        void* mapped = ::mmap(nullptr, kFileBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file_.get(), 0);
        if (mapped != MAP_FAILED) mapping_ = {static_cast<std::byte*>(mapped), kFileBytes};
    }
    ~BlockStreamTest() override {
        if (!mapping_.empty()) ::munmap(mapping_.data(), mapping_.size());
    }

    void forget_cached() {
        ::fsync(file_.get());
        ::posix_fadvise(file_.get(), 0, 0, POSIX_FADV_DONTNEED);
    }

    BlockStream open_stream() {
        std::optional<MappedFile> found = file_under(mapping_);
        OFFLOAD_CHECK(found, LogicError, "the scratch file cannot be read directly");
        return BlockStream(std::move(*found), make_io_engine(IoEngineKind::threads, kBlockCount), memory_.bytes(),
                           kBlockCount);
    }

    std::vector<std::byte> content(std::size_t begin, std::size_t size) const {
        return {content_.begin() + static_cast<std::ptrdiff_t>(begin),
                content_.begin() + static_cast<std::ptrdiff_t>(begin + size)};
    }

    ScratchDirectory directory_;
    std::string path_;
    std::vector<std::byte> content_;
    AlignedBuffer memory_;
    FileDescriptor file_;
    std::span<std::byte> mapping_;
};

// Any part comes as it is in the file, in order or not. Method: parts that follow each other, overlap, jump back, skip.
TEST_F(BlockStreamTest, CopiesPartsInAnyOrder) {
    BlockStream stream = open_stream();
    const std::pair<std::size_t, std::size_t> parts[] = {
        {5, 100},
        {105, 3 * kBlockBytes},
        {105 + 3 * kBlockBytes, 10},
        {9 * kBlockBytes + 1, 2 * kBlockBytes},
        {17, kSectorBytes},
        {kSectorBytes - 1, 2},
        {19 * kBlockBytes, kBlockBytes},
        {0, kBlockBytes * 20},
    };
    for (const auto& [begin, size] : parts) {
        std::vector<std::byte> target(size);
        stream.copy(begin, target);
        EXPECT_EQ(target, content(begin, size)) << size << " bytes at " << begin;
    }
    std::vector<std::byte> target(1);
    const std::uint64_t end_bytes = stream.file().direct_end_bytes();
    EXPECT_EQ(end_bytes, kFileBytes / kSectorBytes * kSectorBytes);
    EXPECT_THROW(stream.copy(end_bytes, target), InvalidArgument);
}

// A file that has become shorter is an error with its name, not old bytes. Method: cut it behind the stream's back.
TEST_F(BlockStreamTest, MissingBytesAreAnError) {
    BlockStream stream = open_stream();
    ASSERT_EQ(::ftruncate(file_.get(), static_cast<off_t>(kBlockBytes)), 0);
    std::vector<std::byte> target(2 * kBlockBytes);
    try {
        stream.copy(0, target);
        FAIL() << "bytes behind the end were read";
    } catch (const TierIoError& error) {
        EXPECT_NE(std::string(error.what()).find(path_), std::string::npos) << error.what();
    }
}

// The file behind memory is found with the place in it. Method: ask for the middle of a mapping.
TEST_F(BlockStreamTest, FindsTheFileUnderMemory) {
    const std::optional<MappedFile> found = file_under(mapping_.subspan(kBlockBytes + 5, kBlockBytes));
    ASSERT_TRUE(found);
    EXPECT_EQ(found->path, path_);
    EXPECT_EQ(found->offset_bytes, kBlockBytes + 5);
    EXPECT_EQ(found->size_bytes, kFileBytes);
}

// A file that was written to is no longer the one whose blocks were read ahead. Method: write, compare.
TEST_F(BlockStreamTest, KnowsAFileThatWasWrittenTo) {
    const std::optional<MappedFile> before = file_under(mapping_);
    ASSERT_TRUE(before);
    EXPECT_TRUE(before->is_same_content(*file_under(mapping_)));
    const timespec times[] = {{.tv_sec = 0, .tv_nsec = UTIME_OMIT}, {.tv_sec = 1, .tv_nsec = 0}};
    ASSERT_EQ(::futimens(file_.get(), times), 0);
    EXPECT_FALSE(before->is_same_content(*file_under(mapping_)));
}

// Memory that no longer shows the file is not taken for it. Method: write into the private mapping, far away and near.
TEST_F(BlockStreamTest, ChangedMemoryIsNotTheFile) {
    mapping_[3 * kBlockBytes] = std::byte{1};
    EXPECT_TRUE(file_under(mapping_.first(3 * kBlockBytes)));
    EXPECT_FALSE(file_under(mapping_.subspan(2 * kBlockBytes, kBlockBytes + 1)));
}

// What has lost its name or never was a file is left alone. Method: unlink; ask for memory of malloc.
TEST_F(BlockStreamTest, OnlyNamedFiles) {
    EXPECT_FALSE(file_under(content_));
    ASSERT_TRUE(file_under(mapping_));
    ASSERT_EQ(::unlink(path_.c_str()), 0);
    EXPECT_FALSE(file_under(mapping_));
}

// The page cache is seen. Method: ask before and after the file was read by the usual way.
TEST_F(BlockStreamTest, SeesWhatIsCached) {
    EXPECT_FALSE(is_mostly_cached(mapping_));
    std::vector<char> sink(kFileBytes);
    ASSERT_EQ(::pread(file_.get(), sink.data(), sink.size(), 0), static_cast<ssize_t>(kFileBytes));
    EXPECT_TRUE(is_mostly_cached(mapping_));
}

}  // namespace
}  // namespace torch_offload::test
