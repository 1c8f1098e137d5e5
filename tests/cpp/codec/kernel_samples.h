// What tests of kernels share: a matrix as kernels are told of it, on the processor.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "codec/encode.h"
#include "codec/kernel_matrix.h"
#include "codec/ternary_samples.h"

namespace torch_offload {

/// The word tables of a matrix's classes, one behind the other.
class SampleWordTables {
public:
    SampleWordTables(const KernelTables& tables, CoderTables& coder_tables) {
        for (const TunstallClass& one : tables.word_classes()) {
            offsets_.push_back(bytes_.size());
            const std::vector<std::byte> table = word_table_of(one, coder_tables);
            bytes_.insert(bytes_.end(), table.begin(), table.end());
        }
    }

    const std::vector<std::byte>& bytes() const noexcept { return bytes_; }
    /// Where each is if they begin at `begin`.
    WordTables at(const std::byte* begin) const noexcept {
        WordTables at{};
        for (std::size_t i = 0; i < offsets_.size(); ++i) at[i] = begin + offsets_[i];
        return at;
    }

private:
    std::vector<std::size_t> offsets_;  // of each class
    std::vector<std::byte> bytes_;
};

/// A coded matrix with its tables, kept in place.
class KernelSample {
public:
    explicit KernelSample(ExtentBuffer extent)
        : extent_(std::move(extent)), tables_(extent_.bytes(), coder_tables_), words_(tables_, coder_tables_) {}
    KernelSample(const KernelSample&) = delete;

    std::span<std::byte> extent() noexcept { return extent_.bytes(); }
    const KernelTables& tables() const noexcept { return tables_; }
    const SampleWordTables& words() const noexcept { return words_; }
    KernelMatrix matrix() const noexcept {
        return tables_.placed(extent_.bytes().data(), tables_.bytes().data(), words_.at(words_.bytes().data()));
    }

private:
    ExtentBuffer extent_;
    CoderTables coder_tables_;
    KernelTables tables_;
    SampleWordTables words_;
};

}  // namespace torch_offload
