// Counting of the values and quads of a class of columns, from which its odds and frequencies follow. Layer codec:
// includes base only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/rans_model.h"
#include "codec/ternary.h"

namespace torch_offload {

/// What is known of a class.
struct ClassCounts {
    TernaryCounts values;
    CodeCounts quads{};  // of those that begin in the class
    bool is_ternary = true;
};

/// Goes over some rows of a class: fewer than 2^32 quads in all. Counts are right where all values are ternary.
class ClassCounter {
public:
    /// Values [begin, end) of a row.
    void add_values(const std::int8_t* row, std::size_t begin, std::size_t end) noexcept;
    /// The same, and the quads that begin there; the last one may end in the next class.
    void add_quads(const std::int8_t* row, std::size_t begin, std::size_t end, std::size_t columns) noexcept;

    void add_to(ClassCounts& sum) const noexcept;

private:
    void add_whole_quads(const std::int8_t* values, std::size_t quads) noexcept;

    /// Several counters, because equal neighbours would wait for each other.
    static constexpr std::size_t kParts = 8;

    std::uint32_t quads_[kParts][256] = {};  // whose values are all of this class
    std::uint32_t last_quads_[256] = {};     // whose last values are of the next one
    TernaryCounts values_;                   // of no whole quad
    bool is_ternary_ = true;
};

}  // namespace torch_offload
