// What the system is told about memory that is not ours to move: a mapped file whose bytes are copied into pages,
// buffers of others.
// Layer device: includes nothing.
#pragma once

#include <cstddef>
#include <span>

namespace torch_offload {

/// Has what is mapped of a file at [begin, begin + size_bytes) read, without waiting for it. Other memory, and
/// addresses that have none, are left alone. Threads: any, also below.
void advise_read_ahead(const std::byte* begin, std::size_t size_bytes) noexcept;

/// Has the system read no more of a mapped file than the 2 MiB around what is touched, for who reads most of it some
/// other way: else a touch reads up to 16 MiB. Holds as long as the mapping; on kernels without huge pages of files
/// nothing changes. Method: do_sync_mmap_readahead() in mm/filemap.c of Linux.
void advise_few_touches(std::span<const std::byte> mapping) noexcept;

/// Has the system read only the sectors that are touched of what is mapped of a file at [begin, begin + size_bytes),
/// for who looks at single elements there. Holds as long as the mapping.
void advise_single_touches(const std::byte* begin, std::size_t size_bytes) noexcept;

/// Has memory lie in huge pages where it can, from the next touch on. Its bytes are lost: what was touched before, such
/// as memory that malloc gives out again, would stay in small pages.
void advise_huge_pages(std::span<std::byte> memory) noexcept;

/// Lets the system take the whole sectors of `range` back. The bytes stay readable: those of a file are read again,
/// what was changed goes to swap or stays.
void advise_not_needed(std::span<const std::byte> range) noexcept;

}  // namespace torch_offload
