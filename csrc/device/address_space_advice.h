// What the system is told about memory that is not ours to move: a mapped file whose bytes are copied into pages.
// Layer device: includes nothing.
#pragma once

#include <cstddef>
#include <span>

namespace torch_offload {

/// Has the part of a file that is mapped at `range` read, without waiting for it. Other memory is left alone.
/// Threads: any, also below.
void advise_read_ahead(std::span<const std::byte> range) noexcept;

/// Lets the system take the whole sectors of `range` back. The bytes stay readable: those of a file are read again,
/// what was changed goes to swap or stays.
void advise_not_needed(std::span<const std::byte> range) noexcept;

}  // namespace torch_offload
