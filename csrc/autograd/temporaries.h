// Ranges that the CPU allocator handed out, by address: large allocations whose context must be their address, since
// torch's raw allocation interface allows nothing else. Layer autograd: includes no torch header.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>

namespace torch_offload {

class Engine;

/// Memory of an engine's budget that is nobody's page yet.
struct Temporary {
    std::shared_ptr<Engine> engine;
    std::span<std::byte> range;
};

/// Notes that `temporary` was handed out. Threads: any, for all three.
void add_temporary(Temporary temporary);
/// What was handed out at `address`, if anything was and it is still noted.
std::optional<Temporary> find_temporary(const void* address);
/// The same, and the note is gone: the range is the caller's to give back or to keep.
std::optional<Temporary> take_temporary(const void* address);

}  // namespace torch_offload
