#include "optim/writeback.h"

#include "optim/writeback_block.h"

namespace torch_offload {

void write_back_gradients(const WritebackArrays& arrays, WritebackSum* sums, InstructionSet set) noexcept {
    switch (set) {
        case InstructionSet::portable:
            writeback_portable(arrays, sums);
            return;
        case InstructionSet::avx2:
            writeback_avx2(arrays, sums);
            return;
        case InstructionSet::avx512:
            writeback_avx512(arrays, sums);
            return;
    }
}

WritebackSum total_writeback(const WritebackSum* sums, std::size_t chunk_count) noexcept {
    WritebackShared shared;
    WritebackSum total;
    total_chunks(HostTeam{}, sums, chunk_count, shared, &total);
    return total;
}

}  // namespace torch_offload
