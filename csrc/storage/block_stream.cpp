#include "storage/block_stream.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/units.h"

namespace torch_offload {
namespace {

constexpr std::chrono::milliseconds kWait{200};
constexpr std::uint64_t kMaxSkippedBytes = 1 * kMiB;  // between parts that follow each other

}  // namespace

BlockStream::BlockStream(MappedFile file, std::unique_ptr<IoEngine> engine, std::span<std::byte> memory,
                         std::size_t block_count)
    : file_(std::move(file)), engine_(std::move(engine)), blocks_(block_count) {
    const std::size_t block_bytes = memory.size() / block_count / kSectorBytes * kSectorBytes;
    OFFLOAD_CHECK(block_bytes > 0, InvalidArgument, "no room for ", block_count, " blocks in ", memory.size(),
                  " bytes");
    for (std::size_t i = 0; i < block_count; ++i) blocks_[i].memory = memory.subspan(i * block_bytes, block_bytes);
}

BlockStream::~BlockStream() {
    for (const Block& block : blocks_) wait_for(block);
}

void BlockStream::copy(std::uint64_t offset_bytes, std::span<std::byte> target) {
    const std::uint64_t copy_end = offset_bytes + target.size();
    OFFLOAD_CHECK(copy_end <= file_.direct_end_bytes(), InvalidArgument, "bytes up to ", copy_end, " of ", file_.path,
                  ", which ends at ", file_.size_bytes);
    const bool follows = copied_bytes_ <= offset_bytes && offset_bytes - copied_bytes_ <= kMaxSkippedBytes;
    const std::uint64_t until_bytes = follows ? file_.direct_end_bytes() : round_up(copy_end, kSectorBytes);
    const bool is_coming = first_ < next_ && block(first_).request.offset_bytes <= offset_bytes;
    if (!is_coming || offset_bytes >= next_bytes_) start_at(offset_bytes);
    while (!target.empty()) {
        read_ahead(until_bytes);
        OFFLOAD_CHECK(first_ < next_, LogicError, "the engine took no read of ", file_.path);
        const Block& from = block(first_);
        wait_for(from);
        if (from.request.error != 0) {
            throw TierIoError(
                concat("reading ", from.request.buffer.size(), " bytes at offset ", from.request.offset_bytes, " of ",
                       file_.path, ": ", std::strerror(from.request.error)),
                from.request.error);
        }
        if (end_of(from) > offset_bytes) {
            const std::uint64_t skipped_bytes = offset_bytes - from.request.offset_bytes;
            const std::size_t part_bytes = std::min<std::size_t>(end_of(from) - offset_bytes, target.size());
            std::memcpy(target.data(), from.memory.data() + skipped_bytes, part_bytes);
            target = target.subspan(part_bytes);
            offset_bytes += part_bytes;
        }
        if (end_of(from) <= offset_bytes) ++first_;
    }
    copied_bytes_ = copy_end;
    read_ahead(until_bytes);
}

/// Gives up what was read ahead.
void BlockStream::start_at(std::uint64_t offset_bytes) {
    for (; first_ < next_; ++first_) wait_for(block(first_));
    next_bytes_ = offset_bytes / kSectorBytes * kSectorBytes;
}

void BlockStream::read_ahead(std::uint64_t until_bytes) {
    for (; next_ - first_ < blocks_.size() && next_bytes_ < until_bytes; ++next_) {
        Block& free = block(next_);
        const std::size_t size_bytes = std::min<std::size_t>(free.memory.size(), until_bytes - next_bytes_);
        free.request = IoRequest{};
        free.request.file_descriptor = file_.file.get();
        free.request.offset_bytes = next_bytes_;
        free.request.buffer = free.memory.first(size_bytes);
        free.request.context = &free;
        IoRequest* request = &free.request;
        if (engine_->submit({&request, 1}) == 0) return;
        free.is_under_way = true;
        next_bytes_ += size_bytes;
    }
}

void BlockStream::wait_for(const Block& block) {
    std::array<IoRequest*, 8> finished{};
    while (block.is_under_way) {
        const std::size_t count = engine_->reap(finished, kWait);
        for (IoRequest* request : std::span(finished).first(count)) {
            static_cast<Block*>(request->context)->is_under_way = false;
        }
    }
}

}  // namespace torch_offload
