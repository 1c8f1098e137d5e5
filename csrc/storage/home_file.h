// Pages that lie in a file of somebody else's, at any offset. Layer storage: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/units.h"
#include "storage/io_engine.h"
#include "storage/mapped_file.h"

namespace torch_offload {

/// A checkpoint's file in which pages lie until they are first written. Open for reads past the page cache: its bytes
/// stay when it is deleted or another takes its name.
/// Threads: any.
class HomeFile {
public:
    explicit HomeFile(MappedFile file) noexcept : file_(std::move(file)) {}

    int file_descriptor() const noexcept { return file_.file.get(); }
    const std::string& path() const noexcept { return file_.path; }
    bool is_same_content(const MappedFile& other) const noexcept { return file_.is_same_content(other); }
    std::uint64_t direct_end_bytes() const noexcept { return file_.direct_end_bytes(); }
    /// Whether nobody has written to it since, as far as its size and its time of modification tell. False if the
    /// system does not say.
    bool is_unchanged() const noexcept;

private:
    MappedFile file_;
};

/// Where a page begins in such a file.
struct HomePlace {
    std::shared_ptr<const HomeFile> file;  // nullptr: it lies elsewhere
    std::uint64_t offset_bytes = 0;

    explicit operator bool() const noexcept { return file != nullptr; }
    /// Whether direct reads bring all of a page of so many bytes.
    bool can_be_read(std::size_t page_bytes) const noexcept;
};

/// One read of a page from its home file. Direct reads begin and end on sectors, pages need not: the sectors around a
/// page are read into its frame, the last of them aside if the frame has no room for it.
class HomeRead {
public:
    /// `slot`: of the page's frame. Throws: std::bad_alloc. Pre: place.can_be_read(page_bytes), and the slot has room
    /// for the page.
    HomeRead(const HomePlace& place, std::size_t page_bytes, std::span<std::byte> slot);

    /// Where the bytes come from and where they go to.
    void fill(IoRequest& request) const noexcept;
    /// They have come: the page's bytes go to the beginning of the slot, zeros behind them.
    void put_in_place() noexcept;

private:
    struct alignas(kSectorBytes) Sector {
        std::byte bytes[kSectorBytes];
    };

    int file_descriptor_;
    std::uint64_t begin_bytes_;  // in the file, on a sector
    std::size_t lead_bytes_;     // of others, before the page
    std::size_t page_bytes_;
    std::span<std::byte> slot_;
    std::unique_ptr<Sector> tail_;  // nullptr: the slot has room for all
};

}  // namespace torch_offload
