// One scratch file per directory, used as one. Layer storage: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "storage/block_file.h"

namespace torch_offload {

/// Hands out extents over several directories, on disks of their own if it is to be faster.
/// Threads: as BlockFile.
class StripedFile {
public:
    /// Opens a scratch file in each directory. `limits`: of each; empty: there are none.
    /// Throws: what BlockFile does, InvalidArgument if there is no directory.
    explicit StripedFile(std::span<const std::string> directories, std::span<const ScratchLimits> limits = {});

    /// Space in the file that holds least; where its disk is full, in another.
    /// Throws: the TierIoError of the last one when all are full.
    Extent allocate(std::size_t size_bytes);
    void free(const Extent& extent) noexcept { files_[extent.file]->free(extent); }

    int file_descriptor(const Extent& extent) const noexcept { return files_[extent.file]->file_descriptor(); }
    const std::string& directory(const Extent& extent) const noexcept { return files_[extent.file]->directory(); }
    std::size_t file_count() const noexcept { return files_.size(); }
    std::uint64_t size_bytes() const;       // of all files, as of BlockFile
    std::uint64_t allocated_bytes() const;  // the same

private:
    std::vector<std::unique_ptr<BlockFile>> files_;
};

}  // namespace torch_offload
