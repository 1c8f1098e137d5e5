// Deferred work as bytes, for a process that has its pages. Layer autograd.
#pragma once

#include <cstddef>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "autograd/deferred_chain.h"

namespace torch_offload {

/// What operators do to page `index`, in torch's own pickle. Throws: std::bad_alloc, c10::Error.
std::vector<std::byte> encode_work(std::span<const PlacedOp> operations, std::size_t index);

/// Runs it on the bytes of pages, with all cores. Returns how many operators ran; `error`: why no more did.
/// Throws: InvalidArgument for what is not such work on so many pages, before any of it has run.
std::size_t run_encoded_work(std::span<const std::byte> work, std::span<const std::span<std::byte>> pages,
                             std::exception_ptr& error);

/// What the bits of operators that work by element depend on: torch's version and the instructions that it uses.
std::string kernels_here();

}  // namespace torch_offload
