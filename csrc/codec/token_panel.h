// Floats of several tokens as products take and give them. Layer codec: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace torch_offload {

inline constexpr std::size_t kPanelWidth = 64;  // tokens begin on a multiple of this many values

/// Floats of several tokens, each token's aligned and filled up with zeros to a multiple of kPanelWidth. Move-only.
class TokenPanel {
public:
    /// Zeros. `width` floats per token.
    TokenPanel(std::size_t tokens, std::size_t width);

    std::size_t tokens() const noexcept { return tokens_; }
    std::size_t width() const noexcept { return width_; }
    std::size_t stride() const noexcept { return stride_; }  // floats from one token to the next
    float* token(std::size_t index) noexcept { return values_.get() + index * stride_; }
    const float* token(std::size_t index) const noexcept { return values_.get() + index * stride_; }
    /// `from`: [tokens, width]. `scale`: [width] factors, folded in as T's columns need them, or nullptr. `order`: as
    /// CodedMatrix::column_order has it; position i gets value order[i] of a token.
    void fill(const float* from, const float* scale = nullptr, std::span<const std::uint32_t> order = {}) noexcept;
    /// The other way: `to` [tokens, width] gets what the panel has, times `scale`.
    void write(float* to, const float* scale, std::span<const std::uint32_t> order = {}) const noexcept;

private:
    struct Free {
        void operator()(float* values) const noexcept;
    };
    std::size_t tokens_;
    std::size_t width_;
    std::size_t stride_;
    std::unique_ptr<float[], Free> values_;
};

}  // namespace torch_offload
