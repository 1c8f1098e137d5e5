// The writeback of gradients for any processor.
#include "optim/writeback_loops.h"

namespace torch_offload {

void writeback_portable(const WritebackArrays& arrays, WritebackSum* sums) noexcept { write_back_all(arrays, sums); }

}  // namespace torch_offload
