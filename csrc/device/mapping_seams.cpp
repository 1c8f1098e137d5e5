#include "device/mapping_seams.h"

namespace torch_offload {

void MappingSeams::add(std::span<const std::byte> range) {
    forget(range);
    add_ends(range);
}

void MappingSeams::add_ends(std::span<const std::byte> range) {
    seams_.insert(range.data());
    seams_.insert(range.data() + range.size());
}

void MappingSeams::add_moved(std::span<const std::byte> from, const std::byte* to) {
    add({to, from.size()});
    for (auto seam = seams_.upper_bound(from.data()); seam != seams_.end() && *seam < from.data() + from.size();
         ++seam) {
        seams_.insert(to + (*seam - from.data()));
    }
}

void MappingSeams::forget(std::span<const std::byte> range) noexcept {
    seams_.erase(seams_.lower_bound(range.data()), seams_.upper_bound(range.data() + range.size()));
}

std::vector<std::span<std::byte>> MappingSeams::pieces_of(std::span<std::byte> range) const {
    std::vector<std::span<std::byte>> pieces;
    const std::byte* const end = range.data() + range.size();
    for (auto seam = seams_.upper_bound(range.data()); seam != seams_.end() && *seam < end; ++seam) {
        const auto piece_bytes = static_cast<std::size_t>(*seam - range.data());
        pieces.push_back(range.first(piece_bytes));
        range = range.subspan(piece_bytes);
    }
    pieces.push_back(range);
    return pieces;
}

}  // namespace torch_offload
