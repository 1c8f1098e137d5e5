#include "optim/packed_moments.h"

#include <algorithm>

#include "optim/packed_loops.h"

namespace torch_offload {

void pack_moment(Moment moment, const float* values, std::size_t count, std::uint8_t* packed) noexcept {
    const auto pack = moment == Moment::first ? &pack_block<Moment::first> : &pack_block<Moment::second>;
    for (std::size_t begin = 0; begin < count; begin += kPackedBlock) {
        pack(values + begin, std::min(kPackedBlock, count - begin), packed + begin);
    }
}

void unpack_moment(Moment moment, const std::uint8_t* packed, std::size_t count, float* values) noexcept {
    const auto unpack = moment == Moment::first ? &unpack_block<Moment::first> : &unpack_block<Moment::second>;
    for (std::size_t begin = 0; begin < count; begin += kPackedBlock) {
        unpack(packed + begin, std::min(kPackedBlock, count - begin), values + begin);
    }
}

}  // namespace torch_offload
