#include "codec/token_panel.h"

#include <algorithm>
#include <new>

namespace torch_offload {
namespace {

constexpr std::align_val_t kPanelAlignment{64};

}  // namespace

TokenPanel::TokenPanel(std::size_t tokens, std::size_t width)
    : tokens_(tokens), width_(width), stride_((width + kPanelWidth - 1) / kPanelWidth * kPanelWidth) {
    const std::size_t count = tokens_ * stride_;
    values_.reset(static_cast<float*>(operator new[](count * sizeof(float), kPanelAlignment)));
    std::fill_n(values_.get(), count, 0.0F);
}

void TokenPanel::Free::operator()(float* values) const noexcept { operator delete[](values, kPanelAlignment); }

void TokenPanel::fill(const float* from, const float* scale, std::span<const std::uint32_t> order) noexcept {
    for (std::size_t i = 0; i < tokens_; ++i) {
        for (std::size_t position = 0; position < width_; ++position) {
            const std::size_t j = order.empty() ? position : order[position];
            const float value = from[i * width_ + j];
            token(i)[position] = scale ? value * scale[j] : value;
        }
    }
}

void TokenPanel::write(float* to, const float* scale, std::span<const std::uint32_t> order) const noexcept {
    for (std::size_t i = 0; i < tokens_; ++i) {
        for (std::size_t position = 0; position < width_; ++position) {
            const std::size_t j = order.empty() ? position : order[position];
            to[i * width_ + j] = token(i)[position] * scale[j];
        }
    }
}

}  // namespace torch_offload
