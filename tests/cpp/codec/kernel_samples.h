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

/// A coded matrix with its tables, kept in place.
class KernelSample {
public:
    explicit KernelSample(ExtentBuffer extent) : extent_(std::move(extent)), tables_(extent_.bytes(), coder_tables_) {
        for (const TunstallClass& one : tables_.word_classes()) {
            const std::vector<std::byte> table = word_table_of(one, coder_tables_);
            words_.insert(words_.end(), table.begin(), table.end());
        }
    }
    KernelSample(const KernelSample&) = delete;

    std::span<std::byte> extent() noexcept { return extent_.bytes(); }
    const KernelTables& tables() const noexcept { return tables_; }
    /// The word tables of all classes, one behind the other, and where each is if they begin at `begin`.
    const std::vector<std::byte>& words() const noexcept { return words_; }
    WordTables words_at(const std::byte* begin) const noexcept {
        WordTables at{};
        for (std::size_t i = 0; i < tables_.word_classes().size(); ++i) {
            at[i] = begin;
            begin += word_table_bytes(tables_.word_classes()[i].limit != WordLimit::w31);
        }
        return at;
    }
    KernelMatrix matrix() const noexcept {
        return tables_.placed(extent_.bytes().data(), tables_.bytes().data(), words_at(words_.data()));
    }

private:
    ExtentBuffer extent_;
    CoderTables coder_tables_;
    KernelTables tables_;
    std::vector<std::byte> words_;
};

}  // namespace torch_offload
