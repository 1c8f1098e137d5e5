// The departure of gradients for any processor.
#include "optim/departure_loops.h"

namespace torch_offload {

void departure_portable(const DepartureArrays& arrays, DepartureSum* sums) noexcept { depart_all(arrays, sums); }

}  // namespace torch_offload
