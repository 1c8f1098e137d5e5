#include "optim/departure.h"

#include "optim/departure_block.h"

namespace torch_offload {

void depart_gradients(const DepartureArrays& arrays, DepartureSum* sums, InstructionSet set) noexcept {
    switch (set) {
        case InstructionSet::portable:
            departure_portable(arrays, sums);
            return;
        case InstructionSet::avx2:
            departure_avx2(arrays, sums);
            return;
        case InstructionSet::avx512:
            departure_avx512(arrays, sums);
            return;
    }
}

DepartureSum total_departure(const DepartureSum* sums, std::size_t chunk_count) noexcept {
    DepartureShared shared;
    DepartureSum total;
    total_chunks(HostTeam{}, sums, chunk_count, shared, &total);
    return total;
}

}  // namespace torch_offload
