#include "storage/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>
#include <vector>

#include "base/units.h"

namespace torch_offload {
namespace {

struct Mapping {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    std::uint64_t offset_bytes = 0;
    bool is_private = false;
    dev_t device = 0;
    ino_t inode = 0;
    std::string path;
};

struct SectorRange {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;

    std::size_t count() const noexcept { return (end - begin) / kSectorBytes; }
};

/// The sectors that hold `memory`.
SectorRange sectors_of(std::span<const std::byte> memory) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    return {address / kSectorBytes * kSectorBytes, round_up(address + memory.size(), kSectorBytes)};
}

/// "7f10a000-7f20a000 r--p 00001000 fe:00 1835013                 /models/model.safetensors", see proc(5).
std::optional<Mapping> parse(const std::string& line) {
    Mapping mapping;
    std::string permissions;
    unsigned int major = 0;
    unsigned int minor = 0;
    char separator = 0;
    std::istringstream words(line);
    words >> std::hex >> mapping.begin >> separator >> mapping.end >> permissions >> mapping.offset_bytes >> major >>
        separator >> minor >> std::dec >> mapping.inode >> std::ws;
    std::getline(words, mapping.path);
    mapping.is_private = permissions.ends_with('p');
    mapping.device = makedev(major, minor);
    return mapping.path.starts_with('/') ? std::optional(mapping) : std::nullopt;
}

/// Whether the file goes on where the first ends: one mapping of which parts were given different advice.
bool goes_on(const Mapping& first, const Mapping& next) {
    return first.end == next.begin && first.offset_bytes + (first.end - first.begin) == next.offset_bytes &&
           first.is_private == next.is_private && first.device == next.device && first.inode == next.inode &&
           first.path == next.path;
}

/// From the part on in which `begin` lies.
std::optional<Mapping> find_mapping(std::uintptr_t begin, std::uintptr_t end) {
    std::ifstream maps("/proc/self/maps");
    std::optional<Mapping> whole;
    for (std::string line; std::getline(maps, line);) {
        const std::uintptr_t line_end = std::stoull(line.substr(line.find('-') + 1), nullptr, 16);
        if (line_end <= begin) continue;
        std::optional<Mapping> part = parse(line);
        if (!whole) {
            if (!part || begin < part->begin) return std::nullopt;
            whole = std::move(part);
        } else if (part && goes_on(*whole, *part)) {
            whole->end = part->end;
        } else {
            break;
        }
    }
    return whole && end <= whole->end ? whole : std::nullopt;
}

/// Whether no page has been written to: a private mapping then shows memory of the process, not the file.
bool is_unchanged(const SectorRange& range) {
    constexpr std::uint64_t kPresent = std::uint64_t{1} << 63;
    constexpr std::uint64_t kSwapped = std::uint64_t{1} << 62;
    constexpr std::uint64_t kOfFile = std::uint64_t{1} << 61;
    const FileDescriptor pagemap(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
    if (!pagemap) return false;
    std::vector<std::uint64_t> entries(range.count());
    const std::size_t size_bytes = entries.size() * sizeof(std::uint64_t);
    const auto offset = static_cast<off_t>(range.begin / kSectorBytes * sizeof(std::uint64_t));
    if (::pread(pagemap.get(), entries.data(), size_bytes, offset) != static_cast<ssize_t>(size_bytes)) return false;
    return std::all_of(entries.begin(), entries.end(), [](std::uint64_t entry) {
        return (entry & (kPresent | kSwapped)) == 0 || (entry & kOfFile) != 0;
    });
}

}  // namespace

std::optional<MappedFile> file_under(std::span<const std::byte> memory) {
    if (memory.empty() || ::sysconf(_SC_PAGESIZE) != kSectorBytes) return std::nullopt;
    const SectorRange range = sectors_of(memory);
    const std::optional<Mapping> mapping = find_mapping(range.begin, range.end);
    if (!mapping || !is_unchanged(range)) return std::nullopt;

    MappedFile found;
    found.file = FileDescriptor(::open(mapping->path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
    struct stat status{};
    if (!found.file || ::fstat(found.file.get(), &status) != 0) return std::nullopt;
    const bool is_same = status.st_dev == mapping->device && status.st_ino == mapping->inode;
    if (!is_same || !S_ISREG(status.st_mode)) return std::nullopt;
    found.path = mapping->path;
    found.offset_bytes = mapping->offset_bytes + (reinterpret_cast<std::uintptr_t>(memory.data()) - mapping->begin);
    found.mapping = {reinterpret_cast<const std::byte*>(mapping->begin), mapping->end - mapping->begin};
    found.is_private = mapping->is_private;
    found.size_bytes = static_cast<std::uint64_t>(status.st_size);
    found.device = status.st_dev;
    found.inode = status.st_ino;
    found.modified_ns = modified_ns(status);
    return found;
}

std::int64_t modified_ns(const struct stat& status) noexcept {
    return std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
}

bool is_on_local_disk(int file_descriptor) noexcept {
    // NFS, SMB, CIFS, SMB2, FUSE, 9P, Ceph, AFS: see statfs(2).
    constexpr std::array<std::uint32_t, 8> kElsewhere = {0x6969,     0x517B,     0xFF534D42, 0xFE534D42,
                                                         0x65735546, 0x01021997, 0x00C36400, 0x5346414F};
    struct statfs status{};
    if (::fstatfs(file_descriptor, &status) != 0) return false;
    return std::ranges::find(kElsewhere, static_cast<std::uint32_t>(status.f_type)) == kElsewhere.end();
}

bool is_mostly_cached(std::span<const std::byte> memory) {
    const SectorRange range = sectors_of(memory);
    std::vector<unsigned char> residency(range.count());
    auto* const begin = reinterpret_cast<void*>(range.begin);
    if (::mincore(begin, range.count() * kSectorBytes, residency.data()) != 0) return true;
    const auto cached = std::count_if(residency.begin(), residency.end(), [](unsigned char page) { return page & 1; });
    return static_cast<std::size_t>(cached) > range.count() / 2;
}

}  // namespace torch_offload
