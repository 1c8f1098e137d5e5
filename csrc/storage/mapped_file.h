// The file that a program sees through mapped memory, for who wants to read it some other way.
// Layer storage: includes base only.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/units.h"
#include "storage/file_descriptor.h"

namespace torch_offload {

/// A file, open for reads past the page cache, and where in it some memory lies.
struct MappedFile {
    FileDescriptor file;
    std::string path;
    std::uint64_t offset_bytes = 0;      // of the first byte of the memory
    std::uint64_t size_bytes = 0;        // of the file
    std::span<const std::byte> mapping;  // around the memory, to its end
    bool is_private = false;             // nobody writes to the file through the mapping
    dev_t device = 0;
    ino_t inode = 0;
    std::int64_t modified_ns = 0;

    /// Whether the two are one file that nobody has written to in between.
    bool is_same_content(const MappedFile& other) const noexcept {
        return device == other.device && inode == other.inode && size_bytes == other.size_bytes &&
               modified_ns == other.modified_ns;
    }

    /// Where direct reads end: a last sector that the file does not fill cannot be read so.
    std::uint64_t direct_end_bytes() const noexcept { return size_bytes / kSectorBytes * kSectorBytes; }
};

/// The file whose bytes `memory` shows, if reading them from the disk gives the same: a mapping, or parts of one behind
/// each other, of a regular file that still has its name, no part of it written to in memory. Whatever else, or what
/// the system does not tell: nothing.
std::optional<MappedFile> file_under(std::span<const std::byte> memory);

/// When the contents were last written.
std::int64_t modified_ns(const struct stat& status) noexcept;

/// Whether the file may be read later as fast and as surely as a scratch file: not over a network, not by a program of
/// the user's. False if the system does not say.
bool is_on_local_disk(int file_descriptor) noexcept;

/// Whether more than half of a mapped file's `memory` is in the page cache, or the system does not tell.
bool is_mostly_cached(std::span<const std::byte> memory);

}  // namespace torch_offload
