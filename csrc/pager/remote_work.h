// Deferred work that a store's own process runs on pages which it keeps. Layer pager: includes nothing of this project.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <vector>

namespace torch_offload {

/// Operators on pages of equal index, as bytes that only who encodes them and who runs them understand.
struct RemoteWork {
    std::vector<std::byte> operators;
    std::vector<bool> is_worthless;  // of each page: nobody will read it afterwards
    /// Called once, by a thread of the store's that holds no lock: how many operators ran, in order, and why no more
    /// did. Must not throw.
    std::function<void(std::size_t ran, std::exception_ptr error)> end;
    /// The store is silent for longer than it may be; end() is still called, some day. Must not throw.
    std::function<void(std::exception_ptr error)> note_late;
};

}  // namespace torch_offload
