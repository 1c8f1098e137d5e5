#include "codec/token_planes.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/check.h"
#include "codec/product_kernels.h"

namespace torch_offload {
namespace {

constexpr std::align_val_t kPlaneAlignment{64};
/// Behind the last plane: kernels read the bytes of four rows at once.
constexpr std::size_t kSlackBytes = 64;
constexpr std::size_t kColumnsAtOnce = 64;  // of all tokens, while they are in the first cache

}  // namespace

TokenPlanes::TokenPlanes(const TokenPanel& panel, unsigned planes, InstructionSet set)
    : width_(panel.width()), stride_(panel.stride()), planes_(planes) {
    OFFLOAD_CHECK(planes >= 1 && planes <= kMaxPlanes, InvalidArgument, "a token has 1 to ", kMaxPlanes,
                  " planes, not ", planes);
    const std::size_t size_bytes = panel.tokens() * planes * stride_ + kSlackBytes;
    bytes_.reset(static_cast<std::int8_t*>(operator new[](size_bytes, kPlaneAlignment)));
    std::memset(bytes_.get(), 0, size_bytes);
    planed_.reserve(panel.tokens());
    const ProductKernels& kernels = product_kernels(set);
    for (std::size_t i = 0; i < panel.tokens(); ++i) {
        planed_.push_back(kernels.write_planes(panel.token(i), stride_, planes, bytes_.get() + i * planes * stride_));
    }
    if (tokens() < kernels.fewest_by_column) return;
    columns_ = TokenColumns(tokens(), planes, width_);
    for (std::size_t column = 0; column < width_; column += kColumnsAtOnce) {
        const std::size_t count = std::min(kColumnsAtOnce, width_ - column);
        for (std::size_t i = 0; i < tokens(); ++i) columns_.set(i, column, count, plane(i) + column, stride_);
    }
}

void TokenPlanes::Free::operator()(std::int8_t* bytes) const noexcept { operator delete[](bytes, kPlaneAlignment); }

}  // namespace torch_offload
