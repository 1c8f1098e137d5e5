// Reading a file from front to end, some blocks ahead of who copies them out. Layer storage: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/units.h"
#include "storage/io_engine.h"
#include "storage/mapped_file.h"

namespace torch_offload {

/// Serves parts of a file in any order, fast in the order of the file. Reads past the page cache.
/// Threads: one.
class BlockStream {
public:
    /// `memory` holds the blocks and outlives the stream; it is aligned to sectors.
    /// Pre: `engine` is used by nobody else, and `memory` has room for a sector in each of `block_count` blocks.
    BlockStream(MappedFile file, std::unique_ptr<IoEngine> engine, std::span<std::byte> memory,
                std::size_t block_count);
    /// Waits for what is under way.
    ~BlockStream();
    BlockStream(const BlockStream&) = delete;
    BlockStream& operator=(const BlockStream&) = delete;

    const MappedFile& file() const noexcept { return file_; }

    /// Copies the file's bytes from `offset_bytes` on to `target`. Goes on reading behind it where this part followed
    /// the last one.
    /// Throws: TierIoError, also for an earlier read ahead; InvalidArgument beyond file().direct_end_bytes().
    void copy(std::uint64_t offset_bytes, std::span<std::byte> target);

private:
    struct Block {
        IoRequest request;
        std::span<std::byte> memory;
        bool is_under_way = false;
    };

    Block& block(std::size_t position) { return blocks_[position % blocks_.size()]; }
    std::uint64_t end_of(const Block& block) const { return block.request.offset_bytes + block.request.buffer.size(); }
    void start_at(std::uint64_t offset_bytes);
    void read_ahead(std::uint64_t until_bytes);
    void wait_for(const Block& block);

    MappedFile file_;
    std::unique_ptr<IoEngine> engine_;
    std::vector<Block> blocks_;
    std::size_t first_ = 0;            // position of the block that is copied out
    std::size_t next_ = 0;             // position of the block that is read next; the ones between are in use
    std::uint64_t next_bytes_ = 0;     // where in the file it begins
    std::uint64_t copied_bytes_ = ~0;  // where in the file the last part ended
};

}  // namespace torch_offload
