// Integers of several tokens side by side, column by column: for products that pass over the zeros of T. Layer codec:
// includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace torch_offload {

/// Tokens in groups of lanes(); of each column the integers of a group's tokens, aligned to their size. Move-only.
class TokenColumns {
public:
    static constexpr std::size_t kMaxLanes = 16;

    /// None.
    TokenColumns() noexcept = default;
    /// Zeros. Integers of up to three planes have 32 bits, others 64.
    TokenColumns(std::size_t tokens, unsigned planes, std::size_t width);

    bool is_empty() const noexcept { return bytes_ == nullptr; }
    bool is_wide() const noexcept { return is_wide_; }
    std::size_t lanes() const noexcept { return lanes_; }
    /// Takes some of a token's integers from their planes, [planes, stride].
    void set(std::size_t token, std::size_t first_column, std::size_t count, const std::int8_t* planes,
             std::size_t stride) noexcept;
    /// A group's integers from a column on: [columns, lanes()].
    const std::byte* column(std::size_t group, std::size_t index) const noexcept {
        return bytes_.get() + (group * width_ + index) * lanes_ * (is_wide_ ? 8 : 4);
    }

private:
    struct Free {
        void operator()(std::byte* bytes) const noexcept;
    };
    unsigned planes_ = 0;
    bool is_wide_ = false;
    std::size_t lanes_ = 0;
    std::size_t width_ = 0;
    std::unique_ptr<std::byte[], Free> bytes_;
};

}  // namespace torch_offload
