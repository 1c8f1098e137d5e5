#include "storage/home_file.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "support/aligned_buffer.h"

namespace torch_offload::test {
namespace {

constexpr std::size_t kFileBytes = 64 * kKiB;

std::vector<std::byte> random_bytes(std::size_t count) {
    std::mt19937 random(3);
    std::vector<std::byte> bytes(count);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    return bytes;
}

HomePlace place_at(std::uint64_t offset_bytes, std::uint64_t file_bytes = kFileBytes) {
    MappedFile file;
    file.size_bytes = file_bytes;
    return {std::make_shared<const HomeFile>(std::move(file)), offset_bytes};
}

/// Answers the read from `content` as direct I/O does; false if it is not of whole sectors within it.
bool answer(HomeRead& read, const std::vector<std::byte>& content) {
    IoRequest request;
    read.fill(request);
    check_request(request);
    if (request.offset_bytes + request.size_bytes() > content.size()) return false;
    const std::byte* from = content.data() + request.offset_bytes;
    for (const iovec& piece : pieces_left(request)) {
        std::memcpy(piece.iov_base, from, piece.iov_len);
        from += piece.iov_len;
    }
    return true;
}

// The page's bytes come, zeros behind them, wherever it begins and however full its frame is; whole sectors are read,
// at once.
TEST(HomeRead, BringsThePageFromAnyOffset) {
    const std::vector<std::byte> content = random_bytes(kFileBytes);
    AlignedBuffer slot(4 * kSectorBytes);
    for (const std::uint64_t offset : {0u, 8u, 2048u, 4088u, 4095u, 4096u, 12'345u}) {
        for (const std::size_t page_bytes : {1u, 4088u, 4096u, 12'289u, 16'000u, 16'384u}) {
            std::ranges::fill(slot.bytes(), std::byte{0xAB});
            HomeRead read(place_at(offset), page_bytes, slot.bytes());
            const bool fits = offset % kSectorBytes + page_bytes <= slot.bytes().size();
            IoRequest request;
            read.fill(request);
            EXPECT_EQ(request.tail.size(), fits ? 0u : kSectorBytes) << offset << " " << page_bytes;
            ASSERT_TRUE(answer(read, content)) << offset << " " << page_bytes;
            read.put_in_place();
            EXPECT_EQ(std::memcmp(slot.bytes().data(), content.data() + offset, page_bytes), 0)
                << offset << " " << page_bytes;
            const auto behind = slot.bytes().subspan(page_bytes);
            EXPECT_TRUE(std::ranges::all_of(behind, [](std::byte byte) { return byte == std::byte{0}; }));
        }
    }
}

// A read that is made again brings the same.
TEST(HomeRead, BringsItAgain) {
    const std::vector<std::byte> content = random_bytes(kFileBytes);
    AlignedBuffer slot(4 * kSectorBytes);
    HomeRead read(place_at(100), slot.bytes().size(), slot.bytes());
    for (int time = 0; time < 2; ++time) {
        ASSERT_TRUE(answer(read, content));
        read.put_in_place();
        EXPECT_EQ(std::memcmp(slot.bytes().data(), content.data() + 100, slot.bytes().size()), 0);
    }
}

// The last bytes of a file whose size is no multiple of a sector cannot be read directly.
TEST(HomePlace, EndsBeforeALastPartOfASector) {
    EXPECT_TRUE(place_at(8192, 12'288).can_be_read(4096));
    EXPECT_FALSE(place_at(8192, 12'287).can_be_read(4096));
    EXPECT_TRUE(place_at(8, 12'288).can_be_read(12'280));
    EXPECT_FALSE(place_at(8, 12'300).can_be_read(12'281));
}

}  // namespace
}  // namespace torch_offload::test
