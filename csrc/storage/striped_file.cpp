#include "storage/striped_file.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/check.h"

namespace torch_offload {

StripedFile::StripedFile(std::span<const std::string> directories, std::span<const ScratchLimits> limits) {
    OFFLOAD_CHECK(!directories.empty(), InvalidArgument, "a scratch file needs a directory; name one on a disk");
    OFFLOAD_CHECK(limits.empty() || limits.size() == directories.size(), InvalidArgument, "limits of ", limits.size(),
                  " scratch files for ", directories.size(), " directories");
    for (std::size_t i = 0; i < directories.size(); ++i) {
        files_.push_back(std::make_unique<BlockFile>(directories[i], limits.empty() ? ScratchLimits{} : limits[i]));
    }
}

Extent StripedFile::allocate(std::size_t size_bytes) {
    std::vector<std::pair<std::uint64_t, std::uint32_t>> by_content;
    for (std::uint32_t file = 0; file < files_.size(); ++file) {
        by_content.emplace_back(files_[file]->allocated_bytes(), file);
    }
    std::sort(by_content.begin(), by_content.end());
    for (std::size_t i = 0;; ++i) {
        try {
            Extent extent = files_[by_content[i].second]->allocate(size_bytes);
            extent.file = by_content[i].second;
            return extent;
        } catch (const TierIoError& error) {
            const bool is_full = error.error_number() == ENOSPC || error.error_number() == EDQUOT;
            if (!is_full || i + 1 == by_content.size()) throw;
        }
    }
}

std::uint64_t StripedFile::size_bytes() const {
    std::uint64_t total_bytes = 0;
    for (const auto& file : files_) total_bytes += file->size_bytes();
    return total_bytes;
}

std::uint64_t StripedFile::allocated_bytes() const {
    std::uint64_t total_bytes = 0;
    for (const auto& file : files_) total_bytes += file->allocated_bytes();
    return total_bytes;
}

}  // namespace torch_offload
