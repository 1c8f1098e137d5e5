// Numbers in bytes, least significant first. Layer codec: includes base only.
#pragma once

#include <bit>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "base/check.h"

namespace torch_offload {

static_assert(std::endian::native == std::endian::little, "extents are read as they lie in memory");

template <typename Number>
inline Number load_number(const std::byte* from) noexcept {
    Number number;
    std::memcpy(&number, from, sizeof(Number));
    return number;
}

template <typename Number>
void append_number(std::vector<std::byte>& to, Number number) {
    const std::size_t size = to.size();
    to.resize(size + sizeof(Number));
    std::memcpy(to.data() + size, &number, sizeof(Number));
}

/// Takes numbers off the front of bytes that somebody else wrote.
class NumberReader {
public:
    explicit NumberReader(std::span<const std::byte> bytes) noexcept : bytes_(bytes) {}

    /// Throws: CorruptPage if there are not enough bytes left.
    template <typename Number>
    Number take() {
        return load_number<Number>(take_bytes(sizeof(Number)).data());
    }
    /// Throws: as take().
    std::span<const std::byte> take_bytes(std::size_t count) {
        OFFLOAD_CHECK(count <= bytes_.size() - taken_, CorruptPage, "a coded extent's header ends after ",
                      bytes_.size(), " bytes, inside the ", count, " at ", taken_);
        taken_ += count;
        return bytes_.subspan(taken_ - count, count);
    }
    std::size_t taken_bytes() const noexcept { return taken_; }

private:
    std::span<const std::byte> bytes_;
    std::size_t taken_ = 0;
};

}  // namespace torch_offload
