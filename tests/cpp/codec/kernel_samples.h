// What tests of kernels share: a matrix as kernels are told of it, on the processor, and floats whose sums show their
// order.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "codec/encode.h"
#include "codec/kernel_matrix.h"
#include "codec/ternary_samples.h"

namespace torch_offload {

/// A coded matrix with its tables, kept in place.
class KernelSample {
public:
    explicit KernelSample(ExtentBuffer extent) : extent_(std::move(extent)), tables_(extent_.bytes(), coder_tables_) {}
    KernelSample(const KernelSample&) = delete;

    std::span<std::byte> extent() noexcept { return extent_.bytes(); }
    const KernelTables& tables() const noexcept { return tables_; }
    KernelMatrix matrix() const noexcept { return tables_.placed(extent_.bytes().data(), tables_.bytes().data()); }

private:
    ExtentBuffer extent_;
    CoderTables coder_tables_;
    KernelTables tables_;
};

/// Of many magnitudes, so that every other order of a sum gives other bits.
inline std::vector<float> uneven_floats(std::size_t count, std::uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) value = normal(random) * std::ldexp(1.0F, static_cast<int>(random() % 20) - 10);
    return values;
}

}  // namespace torch_offload
