#include "codec/token_columns.h"

#include <cstring>
#include <new>

namespace torch_offload {
namespace {

constexpr std::align_val_t kColumnAlignment{64};
constexpr unsigned kPlanesOf32Bits = 3;  // with room for many of them in a sum

/// `to`: one integer in every `lanes`.
template <typename Integer>
void set_lane(Integer* to, std::size_t lanes, std::size_t count, unsigned plane_count, const std::int8_t* planes,
              std::size_t stride) noexcept {
    for (std::size_t i = 0; i < count; ++i) {
        std::int32_t integer = 0;
        for (unsigned plane = plane_count; plane-- > 0;) integer = integer * 256 + planes[plane * stride + i];
        to[i * lanes] = integer;
    }
}

}  // namespace

TokenColumns::TokenColumns(std::size_t tokens, unsigned planes, std::size_t width)
    : planes_(planes),
      is_wide_(planes > kPlanesOf32Bits),
      lanes_(is_wide_ || tokens <= kMaxLanes / 2 ? kMaxLanes / 2 : kMaxLanes),
      width_(width) {
    const std::size_t groups = (tokens + lanes_ - 1) / lanes_;
    const std::size_t size_bytes = groups * width * lanes_ * (is_wide_ ? 8 : 4);
    bytes_.reset(static_cast<std::byte*>(operator new[](size_bytes, kColumnAlignment)));
    std::memset(bytes_.get(), 0, size_bytes);
}

void TokenColumns::set(std::size_t token, std::size_t first_column, std::size_t count, const std::int8_t* planes,
                       std::size_t stride) noexcept {
    std::byte* const to = bytes_.get() + (column(token / lanes_, first_column) - bytes_.get());
    const std::size_t lane = token % lanes_;
    if (is_wide_) return set_lane(reinterpret_cast<std::int64_t*>(to) + lane, lanes_, count, planes_, planes, stride);
    set_lane(reinterpret_cast<std::int32_t*>(to) + lane, lanes_, count, planes_, planes, stride);
}

void TokenColumns::Free::operator()(std::byte* bytes) const noexcept { operator delete[](bytes, kColumnAlignment); }

}  // namespace torch_offload
