// Decoding of RANS4 for any processor.
#include <array>

#include "codec/little_endian.h"
#include "codec/rans4.h"

namespace torch_offload {
namespace {

constexpr auto kQuadBytes = [] {
    std::array<std::uint32_t, 256> bytes{};
    for (std::uint32_t code = 0; code < bytes.size(); ++code) bytes[code] = quad_bytes(code);
    return bytes;
}();

}  // namespace

bool rans4_rows_portable(const RansColumns<RansSlots>& columns, RansStream& stream, std::size_t lanes,
                         const TernaryRows& to) noexcept {
    std::size_t quad = 0;
    for (std::size_t i = 0; i < columns.classes.size(); ++i) {
        const std::uint32_t* const slots = columns.tables[i].data();
        for (const std::size_t end = columns.end_quad(i); quad < end; ++quad) {
            for (std::size_t lane = 0; lane < lanes; ++lane) {
                const std::uint32_t slot = slots[stream.states[lane] % kFrequencyTotal];
                std::uint32_t state = (slot >> 8 & 4095) * (stream.states[lane] >> kFrequencyBits) + (slot >> 20);
                if (state < kRansFloor) {
                    if (stream.word == stream.end) return false;
                    state = state << 16 | load_number<std::uint16_t>(stream.word);
                    stream.word += sizeof(std::uint16_t);
                }
                stream.states[lane] = state;
                std::memcpy(to.row(lane) + quad * kQuad, &kQuadBytes[slot & 255], kQuad);
            }
        }
    }
    return true;
}

}  // namespace torch_offload
