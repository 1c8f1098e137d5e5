// What tests of kernels share: a matrix as kernels are told of it, on the processor.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

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

}  // namespace torch_offload
