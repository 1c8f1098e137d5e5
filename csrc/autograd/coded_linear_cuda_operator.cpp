// torch_offload::coded_linear, its transpose and decode_ternary for tensors on a GPU. CUDA build only.
#include <ATen/core/Formatting.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <memory>

#include "autograd/coded_arguments.h"
#include "autograd/coded_linear.h"
#include "autograd/error_bridge.h"
#include "autograd/opened_pages.h"
#include "codec/coded_kernels.cuh"

namespace torch_offload {
namespace {

/// Tokens multiplied by one round of launches: their planes stay small beside a GPU's memory.
constexpr std::int64_t kTokensAtOnce = 16384;
/// Up to so many T is not written to memory: with more, reading its codewords once is no longer what takes long.
constexpr std::int64_t kMaxCodewordTokens = 128;

/// The process's own, as on the CPU. Never destroyed: when a process ends, its GPU may be gone before.
OpenedPages& opened_pages() {
    static OpenedPages& pages = *new OpenedPages;
    return pages;
}

/// Makes the GPU of `tokens` the current one while it lives. Throws: c10::Error unless all are there.
class SharedGpu {
public:
    SharedGpu(const char* name, const at::Tensor& tokens, const at::Tensor& page, const at::Tensor& row_scale,
              const at::Tensor& column_scale) {
        TORCH_CHECK_VALUE(tokens.is_cuda() && page.device() == tokens.device() &&
                              row_scale.device() == tokens.device() && column_scale.device() == tokens.device(),
                          "coded_linear: ", name, ", page, row_scale and column_scale must be on one device, got ",
                          tokens.device(), ", ", page.device(), ", ", row_scale.device(), " and ",
                          column_scale.device());
        guard_.set_device(tokens.device());
    }

private:
    c10::cuda::OptionalCUDAGuard guard_;
};

/// One matrix of a page, used on the current stream of the page's device.
class CurrentMatrix {
public:
    CurrentMatrix(const at::Tensor& page, std::int64_t index)
        : page_(opened_pages().opened(page)),
          stream_(c10::cuda::getCurrentCUDAStream(page.device().index())),
          bytes_(page.options()) {
        TORCH_CHECK_INDEX(index >= 0 && static_cast<std::size_t>(index) < page_->size(), "a coded page of ",
                          page_->size(), " matrices has none of number ", index);
        one_ = &(*page_)[static_cast<std::size_t>(index)];
        one_->tables.record_stream(stream_.unwrap());  // it may outlive its page by what is queued here
        for (const SharedTable& words : one_->words) words->record_stream(stream_.unwrap());
    }

    const KernelMatrix& matrix() const noexcept { return one_->matrix; }
    bool is_all_tun12() const noexcept { return !one_->has_rans4; }
    cudaStream_t stream() const noexcept { return stream_; }
    at::TensorOptions options(at::ScalarType type) const { return bytes_.dtype(type); }

    /// T with two bits for each value, int32 [rows, quad_row_words(columns)].
    at::Tensor decoded() const {
        const auto words = static_cast<std::int64_t>(quad_row_words(matrix().columns));
        const at::Tensor to = at::empty({static_cast<std::int64_t>(matrix().rows), words}, options(at::kInt));
        if (one_->has_tun12) launch_tun12_decode(matrix(), quad_rows(to), stream_);
        if (one_->has_rans4) launch_rans4_decode(matrix(), quad_rows(to), stream_);
        return to;
    }
    static QuadRows quad_rows(const at::Tensor& decoded) {
        return {static_cast<std::uint32_t*>(decoded.mutable_data_ptr()), static_cast<std::size_t>(decoded.size(1))};
    }

private:
    std::shared_ptr<const OpenedPage> page_;
    const OpenedMatrix* one_ = nullptr;
    c10::cuda::CUDAStream stream_;
    at::TensorOptions bytes_;
};

TokenType token_type(const at::Tensor& tokens) {
    if (tokens.scalar_type() == at::kBFloat16) return TokenType::bfloat16;
    return tokens.scalar_type() == at::kHalf ? TokenType::float16 : TokenType::float32;
}

/// One side of a product: what its values are multiplied by, and where they lie in it.
struct Side {
    const at::Tensor& scale;
    const std::uint32_t* order = nullptr;
};

/// What a round of launches works on: planes of its tokens, and where it puts its sums.
class Round {
public:
    /// `sums_of(planes)`: how its sums are cut.
    template <typename SumsOf>
    Round(const CurrentMatrix& current, const ScaledTokens& from, SumsOf sums_of, const ScaledSums& to)
        : planes_(plane_blocks_for(from.tokens, from.width, from.type)), partial_(sums_of(planes_)), to_(to) {
        const std::size_t tokens = std::size_t{planes_.groups} * kGroupTokens;
        const std::size_t sums = partial_.sum_count(planes_.groups, to.width);
        bytes_ = room(current, planes_.size_bytes());
        sums_ = room(current, sums * sizeof(*partial_.sums));
        counts_ = room(current, (tokens + partial_.counter_count) * sizeof(std::uint32_t));
        planes_.bytes = static_cast<std::byte*>(bytes_.mutable_data_ptr());
        planes_.most_bits = static_cast<std::uint32_t*>(counts_.mutable_data_ptr());
        partial_.sums = static_cast<unsigned long long*>(sums_.mutable_data_ptr());
        partial_.counters = planes_.most_bits + tokens;
        launch_planes(from, planes_, partial_, to.width, current.stream());
    }
    const PlaneBlocks& planes() const noexcept { return planes_; }
    const PartialSums& partial() const noexcept { return partial_; }
    const ScaledSums& to() const noexcept { return to_; }

private:
    static at::Tensor room(const CurrentMatrix& current, std::size_t size_bytes) {
        return at::empty({static_cast<std::int64_t>(size_bytes)}, current.options(at::kByte));
    }
    PlaneBlocks planes_;
    PartialSums partial_;
    ScaledSums to_;
    at::Tensor bytes_, sums_, counts_;
};

/// Multiplies tokens of `from`, [tokens, width], some at a time: `use(round)` queues the product of each round, whose
/// sums are cut as `sums_of(planes)` says.
template <typename SumsOf, typename Use>
at::Tensor multiplied(const CurrentMatrix& current, const at::Tensor& from, const Side& before, const Side& after,
                      SumsOf sums_of, Use use) {
    const std::int64_t width = after.scale.numel();
    at::Tensor result = at::empty({from.size(0), width}, from.options());
    const std::int64_t size_bytes = from.element_size();
    for (std::int64_t first = 0; first < from.size(0); first += kTokensAtOnce) {
        const auto count = static_cast<std::uint32_t>(std::min(kTokensAtOnce, from.size(0) - first));
        const auto* const values = static_cast<const std::byte*>(from.const_data_ptr());
        auto* const sums = static_cast<std::byte*>(result.mutable_data_ptr());
        const ScaledTokens in{values + first * from.size(1) * size_bytes,
                              token_type(from),
                              before.scale.const_data_ptr<float>(),
                              before.order,
                              count,
                              static_cast<std::uint32_t>(from.size(1))};
        const ScaledSums out{sums + first * width * size_bytes,
                             token_type(from),
                             after.scale.const_data_ptr<float>(),
                             after.order,
                             count,
                             static_cast<std::uint32_t>(width)};
        use(Round(current, in, sums_of, out));
    }
    return result;
}

/// By codewords, unless T has been decoded.
void multiply(const CurrentMatrix& current, const at::Tensor& decoded, const Round& round) {
    if (!decoded.defined()) {
        return launch_codeword_product(current.matrix(), round.planes(), round.partial(), round.to(), current.stream());
    }
    launch_product(current.matrix(), CurrentMatrix::quad_rows(decoded), round.planes(), round.partial(), round.to(),
                   current.stream());
}

}  // namespace

at::Tensor coded_linear_cuda(const at::Tensor& x, const at::Tensor& page, std::int64_t index,
                             const at::Tensor& row_scale, const at::Tensor& column_scale) {
    return across_torch([&] {
        const SharedGpu gpu("x", x, page, row_scale, column_scale);
        const CurrentMatrix current(page, index);
        const KernelMatrix& matrix = current.matrix();
        const CodedScales scales(matrix.rows, matrix.columns, row_scale, column_scale);
        const at::Tensor from = token_rows("x", x, matrix.columns);
        const bool is_direct = from.size(0) <= kMaxCodewordTokens && current.is_all_tun12();
        const at::Tensor decoded = is_direct ? at::Tensor() : current.decoded();
        const auto sums_of = [&](const PlaneBlocks& planes) {
            return is_direct ? codeword_product_sums(matrix) : product_sums(matrix, planes);
        };
        const at::Tensor y = multiplied(current, from, {scales.columns, matrix.order}, {scales.rows}, sums_of,
                                        [&](const Round& round) { multiply(current, decoded, round); });
        return tokens_like(x, y);
    });
}

at::Tensor coded_linear_transposed_cuda(const at::Tensor& g, const at::Tensor& page, std::int64_t index,
                                        const at::Tensor& row_scale, const at::Tensor& column_scale) {
    return across_torch([&] {
        const SharedGpu gpu("g", g, page, row_scale, column_scale);
        const CurrentMatrix current(page, index);
        const KernelMatrix& matrix = current.matrix();
        const CodedScales scales(matrix.rows, matrix.columns, row_scale, column_scale);
        const at::Tensor from = token_rows("g", g, matrix.rows);
        const at::Tensor decoded = current.decoded();
        const at::Tensor z = multiplied(
            current, from, {scales.rows}, {scales.columns, matrix.order},
            [&](const PlaneBlocks& planes) { return transposed_product_sums(matrix, planes); },
            [&](const Round& round) {
                launch_transposed_product(matrix, CurrentMatrix::quad_rows(decoded), round.planes(), round.partial(),
                                          round.to(), current.stream());
            });
        return tokens_like(g, z);
    });
}

at::Tensor decode_ternary_cuda(const at::Tensor& page, std::int64_t index) {
    return across_torch([&] {
        const c10::cuda::CUDAGuard guard(page.device());
        const CurrentMatrix current(page, index);
        const at::Tensor decoded = current.decoded();
        at::Tensor values = at::empty(
            {static_cast<std::int64_t>(current.matrix().rows), static_cast<std::int64_t>(current.matrix().columns)},
            current.options(at::kChar));
        launch_expand(current.matrix(), CurrentMatrix::quad_rows(decoded), values.mutable_data_ptr<std::int8_t>(),
                      current.stream());
        return values;
    });
}

}  // namespace torch_offload
