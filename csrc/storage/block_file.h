// A scratch file of extents on a real disk that leaves nothing behind. Layer storage: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <string>

#include "storage/extent_map.h"
#include "storage/file_descriptor.h"

namespace torch_offload {

/// How far a scratch file may grow. What is beyond counts as a full disk.
struct ScratchLimits {
    std::uint64_t keep_free_bytes = 0;  // of its disk, for everybody else
    std::uint64_t max_bytes = std::numeric_limits<std::uint64_t>::max();
};

/// An unlinked, preallocated, direct-I/O file whose space is handed out as extents.
/// Nothing is left behind after any exit, kill -9 included: the file has no name (O_TMPFILE, or open and unlink
/// before the first byte is written).
/// Threads: allocate() and free() may be called from any thread.
class BlockFile {
public:
    /// Opens a scratch file in `directory`.
    /// Throws: InvalidArgument if the directory is missing, not a directory, or lies in memory (tmpfs, ramfs);
    ///         TierIoError if it is read-only or full. The message names the directory and one remedy.
    explicit BlockFile(const std::string& directory, ScratchLimits limits = {});
    BlockFile(const BlockFile&) = delete;
    BlockFile& operator=(const BlockFile&) = delete;

    /// Space for `size_bytes`, a multiple of kSectorBytes; grows the file (fallocate) when no hole fits.
    /// Throws: TierIoError (ENOSPC when the disk is full, or full as far as the limits allow) naming the directory, the
    ///         bytes wanted and free, one remedy.
    Extent allocate(std::size_t size_bytes);

    /// Gives an extent back. One that is not allocated is logged and left alone.
    void free(const Extent& extent) noexcept;

    int file_descriptor() const noexcept { return file_.get(); }
    const std::string& directory() const noexcept { return directory_; }
    std::uint64_t size_bytes() const;       // bytes preallocated on disk
    std::uint64_t allocated_bytes() const;  // bytes in live extents

private:
    std::optional<std::uint64_t> take(std::size_t size_bytes);
    std::uint64_t grow(std::size_t wanted_bytes);
    int extend_to(std::uint64_t end_bytes, std::uint64_t added_bytes) noexcept;

    std::string directory_;
    ScratchLimits limits_;
    FileDescriptor file_;
    bool direct_ = true;
    bool preallocates_ = true;
    std::mutex growth_mutex_;   // held while the file is made longer; taken before mutex_
    mutable std::mutex mutex_;  // guards the two below; never held across a system call
    ExtentMap map_;
    std::uint64_t size_bytes_ = 0;
};

}  // namespace torch_offload
