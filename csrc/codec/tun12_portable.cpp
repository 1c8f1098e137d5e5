// Decoding of TUN12 for any processor.
#include "codec/tun12_loops.h"

namespace torch_offload {

bool tun12_row_portable(const TunstallColumns& columns, Tun12Stream& stream, std::int8_t* row) noexcept {
    return decode_row(columns, stream, row);
}

}  // namespace torch_offload
