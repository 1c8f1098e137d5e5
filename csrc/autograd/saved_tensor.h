// What autograd keeps for the backward pass, as pages. Layer autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "autograd/engine.h"

namespace torch_offload {

/// A tensor that a graph keeps. It shares the bytes and not the history, or the graph would keep itself alive.
struct SavedTensor {
    at::Tensor tensor;
    std::uint32_t version = 0;
};

/// True if torch would let hooks on saved tensors be put in place in this thread, and nobody's are: checkpointing has
/// its own, and what `torch.func` transforms may have none.
bool may_hook_saved_tensors();
/// The number of hooks on saved tensors that are in place in this thread.
std::size_t saved_tensor_hook_count();

/// Takes a tensor that a graph is about to keep. Where its memory is a temporary of the engine, it becomes pages where
/// it lies: no byte is copied, and memory that is used before the backward pass can leave until then. On a GPU torch's
/// allocator has it: it is copied into pages, once for each storage and count of its changes in place, and stays the
/// program's until the program lets it go. Anything else
/// (parameters and their views, what is small, no floating-point numbers, memory from elsewhere) is only held.
/// Threads: any. Throws: what a pin throws.
SavedTensor save_for_backward(const std::shared_ptr<Engine>& engine, const at::Tensor& tensor);

/// Gives it back as often as it is asked for.
/// Throws: c10::Error as torch does if it was changed in place since.
at::Tensor restore_for_backward(const SavedTensor& saved);

}  // namespace torch_offload
