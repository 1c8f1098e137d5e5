#include "storage/block_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

#include "base/check.h"
#include "base/log.h"
#include "base/units.h"

namespace torch_offload {
namespace {

constexpr std::uint64_t kMinGrowthBytes = kMiB;
constexpr std::uint64_t kMaxGrowthBytes = 64 * kMiB;
constexpr std::uint64_t kGrowthPart = 32;  // of the file, between those two: so much of it is room to spare
constexpr std::uint64_t kGrowthShare = 8;  // one step takes at most this part of the free disk, or what is asked for

void check_directory(const std::string& directory) {
    struct stat status{};
    const int error = ::stat(directory.c_str(), &status) == 0 ? 0 : errno;
    OFFLOAD_CHECK(error != ENOENT && error != ENOTDIR, InvalidArgument, "scratch directory ", directory,
                  " does not exist; create it or name another");
    if (error != 0) {
        throw TierIoError(concat("cannot look at scratch directory ", directory, ": ", std::strerror(error),
                                 "; grant access to it or name another"),
                          error);
    }
    OFFLOAD_CHECK(S_ISDIR(status.st_mode), InvalidArgument, "scratch directory ", directory,
                  " is not a directory; name one");
    struct statfs filesystem{};
    const bool known = ::statfs(directory.c_str(), &filesystem) == 0;
    const auto type = static_cast<std::uint64_t>(filesystem.f_type);
    OFFLOAD_CHECK(!known || (type != TMPFS_MAGIC && type != RAMFS_MAGIC), InvalidArgument, "scratch directory ",
                  directory, " lies in memory (", type == TMPFS_MAGIC ? "tmpfs" : "ramfs",
                  "): offloading there frees nothing; name a directory on a disk");
}

[[noreturn]] void throw_cannot_open(const std::string& directory, int error) {
    const char* remedy = "name another directory";
    if (error == EROFS) remedy = "the filesystem is read-only; remount it or name another directory";
    if (error == EACCES || error == EPERM) remedy = "grant write permission or name another directory";
    if (error == ENOSPC || error == EDQUOT) remedy = "free space there or name another directory";
    throw TierIoError(concat("cannot open a scratch file in ", directory, ": ", std::strerror(error), "; ", remedy),
                      error);
}

/// A file that has a name for the shortest time there is: for filesystems without O_TMPFILE.
FileDescriptor open_and_unlink(const std::string& directory) {
    std::string path = directory + "/torch_offload_XXXXXX";
    FileDescriptor file(::mkostemp(path.data(), O_CLOEXEC));
    if (!file || ::unlink(path.c_str()) != 0) throw_cannot_open(directory, errno);
    return file;
}

FileDescriptor open_nameless(const std::string& directory) {
    FileDescriptor file(::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR));
    if (file) return file;
    // A filesystem without O_TMPFILE says EOPNOTSUPP, one behind FUSE or an old kernel EISDIR, EINVAL or ENOENT.
    const bool is_unsupported = errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL || errno == ENOENT;
    if (!is_unsupported) throw_cannot_open(directory, errno);
    return open_and_unlink(directory);
}

/// Switched on afterwards: opening with O_DIRECT can fail after it has made the file.
bool switch_direct_io(int file, bool is_on) noexcept {
    const int flags = ::fcntl(file, F_GETFL);
    return flags >= 0 && ::fcntl(file, F_SETFL, is_on ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

bool is_refused(int error) noexcept { return error == EINVAL || error == EOPNOTSUPP; }

/// A filesystem may take the flag and refuse the transfers. 0 or errno of one of each direction.
int try_direct_io(int file) noexcept {
    alignas(kSectorBytes) std::array<std::byte, kSectorBytes> sector{};
    const auto error_of = [&](auto transfer) {
        ssize_t moved_bytes = 0;
        do {
            moved_bytes = transfer(file, sector.data(), sector.size(), 0);
        } while (moved_bytes < 0 && errno == EINTR);
        if (moved_bytes < 0) return errno;
        return static_cast<std::size_t>(moved_bytes) == sector.size() ? 0 : EIO;
    };
    const int error = error_of(::pwrite);
    return error != 0 ? error : error_of(::pread);
}

/// Bytes that a user may still write to the disk of `file`; all there are where the filesystem does not say.
std::uint64_t free_disk_bytes(int file) noexcept {
    struct statvfs status{};
    if (::fstatvfs(file, &status) != 0 || status.f_blocks == 0) return std::numeric_limits<std::uint64_t>::max();
    return static_cast<std::uint64_t>(status.f_bavail) * status.f_frsize;
}

/// What a file of `size_bytes` may still take of its disk.
std::uint64_t growth_bytes(const ScratchLimits& limits, std::uint64_t size_bytes, std::uint64_t free_bytes) noexcept {
    const std::uint64_t kept_bytes = std::min(limits.keep_free_bytes, free_bytes);
    const std::uint64_t capped_bytes = limits.max_bytes - std::min(limits.max_bytes, size_bytes);
    return std::min(free_bytes - kept_bytes, capped_bytes);
}

/// Names the limit that ended a file's growth before the disk did, and what raises it.
std::string full_because(const ScratchLimits& limits, std::uint64_t wanted_bytes, std::uint64_t size_bytes,
                         std::uint64_t free_bytes) {
    if (wanted_bytes > limits.max_bytes - std::min(limits.max_bytes, size_bytes)) {
        return concat("it may have ", limits.max_bytes, "; give a larger max_spill, or leave it out");
    }
    if (limits.keep_free_bytes > 0 && wanted_bytes <= free_bytes) {
        return concat(limits.keep_free_bytes, " are kept free; free space there, lower keep_free, or name a directory ",
                      "on a larger disk");
    }
    return "free space there or name a directory on a larger disk";
}

/// 0 or errno.
int preallocate(int file, std::uint64_t offset_bytes, std::uint64_t size_bytes) noexcept {
    int result = 0;
    do {
        result = ::fallocate(file, 0, static_cast<off_t>(offset_bytes), static_cast<off_t>(size_bytes));
    } while (result != 0 && errno == EINTR);
    return result == 0 ? 0 : errno;
}

}  // namespace

BlockFile::BlockFile(const std::string& directory, ScratchLimits limits) : directory_(directory), limits_(limits) {
    check_directory(directory);
    file_ = open_nameless(directory);
    direct_ = switch_direct_io(file_.get(), true);
    const int error_of_direct = direct_ ? try_direct_io(file_.get()) : 0;
    if (is_refused(error_of_direct)) {
        direct_ = !switch_direct_io(file_.get(), false);
    } else if (error_of_direct != 0) {
        throw_cannot_open(directory, error_of_direct);
    }
    if (!direct_) OFFLOAD_LOG(warning, "scratch file in ", directory, ": no direct I/O there, using the page cache");
    const int error = preallocate(file_.get(), 0, kSectorBytes);
    preallocates_ = error != EOPNOTSUPP;
    if (!preallocates_) {
        OFFLOAD_LOG(warning, "scratch file in ", directory,
                    ": no preallocation there, a full disk shows only at a write");
    } else if (error != 0) {
        throw_cannot_open(directory, error);
    }
}

Extent BlockFile::allocate(std::size_t size_bytes) {
    OFFLOAD_CHECK(size_bytes > 0 && size_bytes % kSectorBytes == 0, InvalidArgument,
                  "extent size must be a positive multiple of ", kSectorBytes, " bytes, got ", size_bytes);
    if (const auto offset_bytes = take(size_bytes)) return {.offset_bytes = *offset_bytes, .size_bytes = size_bytes};
    const std::lock_guard growing(growth_mutex_);
    if (const auto offset_bytes = take(size_bytes)) return {.offset_bytes = *offset_bytes, .size_bytes = size_bytes};
    return {.offset_bytes = grow(size_bytes), .size_bytes = size_bytes};
}

std::optional<std::uint64_t> BlockFile::take(std::size_t size_bytes) {
    const std::lock_guard lock(mutex_);
    return map_.take(size_bytes);
}

/// Makes the file longer by `wanted_bytes` or more and takes as many for the caller. The disk is worked without
/// mutex_, so that free() never waits for it.
std::uint64_t BlockFile::grow(std::size_t wanted_bytes) {
    const std::uint64_t end_bytes = size_bytes();
    const std::uint64_t free_bytes = free_disk_bytes(file_.get());
    const std::uint64_t usable_bytes = growth_bytes(limits_, end_bytes, free_bytes);
    const std::uint64_t share_bytes = std::clamp(end_bytes / kGrowthPart, kMinGrowthBytes, kMaxGrowthBytes);
    const std::uint64_t step_bytes = std::min(share_bytes, usable_bytes / kGrowthShare);
    std::uint64_t added_bytes = std::max<std::uint64_t>(wanted_bytes, step_bytes / wanted_bytes * wanted_bytes);
    int error = wanted_bytes <= usable_bytes ? extend_to(end_bytes, added_bytes) : ENOSPC;
    if (error != 0 && added_bytes > wanted_bytes) {
        added_bytes = wanted_bytes;
        error = extend_to(end_bytes, added_bytes);
    }
    if (error != 0) {
        throw TierIoError(concat("cannot grow the scratch file in ", directory_, " from ", end_bytes, " by ",
                                 wanted_bytes, " bytes (", free_bytes, " free on its disk): ", std::strerror(error),
                                 "; ", full_because(limits_, wanted_bytes, end_bytes, free_bytes)),
                          error);
    }
    const std::lock_guard lock(mutex_);
    map_.add(end_bytes, added_bytes);  // without memory for it, the file is longer than it is said to be
    size_bytes_ = end_bytes + added_bytes;
    return *map_.take(wanted_bytes);
}

/// 0 or errno; after an error the file has its old length and blocks.
int BlockFile::extend_to(std::uint64_t end_bytes, std::uint64_t added_bytes) noexcept {
    const int file = file_.get();
    if (!preallocates_) return ::ftruncate(file, static_cast<off_t>(end_bytes + added_bytes)) == 0 ? 0 : errno;
    const int error = preallocate(file, end_bytes, added_bytes);
    if (error != 0 && ::ftruncate(file, static_cast<off_t>(end_bytes)) != 0) return errno;
    return error;
}

void BlockFile::free(const Extent& extent) noexcept {
    try {
        const std::lock_guard lock(mutex_);
        const bool lies_inside =
            extent.offset_bytes <= size_bytes_ && extent.size_bytes <= size_bytes_ - extent.offset_bytes;
        OFFLOAD_CHECK(lies_inside, LogicError, "extent at ", extent.offset_bytes, " lies outside the file");
        map_.release(extent.offset_bytes, extent.size_bytes);
    } catch (const std::exception& error) {
        OFFLOAD_LOG(error, "scratch file in ", directory_, ": an extent is lost: ", error.what());
    }
}

std::uint64_t BlockFile::size_bytes() const {
    const std::lock_guard lock(mutex_);
    return size_bytes_;
}

std::uint64_t BlockFile::allocated_bytes() const {
    const std::lock_guard lock(mutex_);
    return size_bytes_ - map_.free_bytes();
}

}  // namespace torch_offload
