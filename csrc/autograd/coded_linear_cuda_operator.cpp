// torch_offload::coded_linear, its transpose and decode_ternary for tensors on a GPU. CUDA build only.
#include <ATen/Context.h>
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

/// Tokens multiplied by one round of launches: their panels stay small beside what they come from.
constexpr std::int64_t kTokensAtOnce = 65536;
constexpr std::int64_t kMinTensorCoreTokens = kMmaTokens;

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

/// One side of a product: what its floats are multiplied by, and where they lie in it.
struct Side {
    const at::Tensor& scale;
    const std::uint32_t* order = nullptr;
};

/// What goes into products and what comes out, some tokens at a time. `use(from, to)` queues one round.
template <typename Use>
at::Tensor multiplied(const at::Tensor& from, const Side& before, const Side& after, Use use) {
    const std::int64_t width = after.scale.numel();
    at::Tensor result = at::empty({from.size(0), width}, from.options());
    for (std::int64_t first = 0; first < from.size(0); first += kTokensAtOnce) {
        const auto count = static_cast<std::uint32_t>(std::min(kTokensAtOnce, from.size(0) - first));
        use(ScaledTokens{from.const_data_ptr<float>() + first * from.size(1), before.scale.const_data_ptr<float>(),
                         before.order, count, static_cast<std::uint32_t>(from.size(1))},
            ScaledSums{result.mutable_data_ptr<float>() + first * width, after.scale.const_data_ptr<float>(),
                       after.order, count, static_cast<std::uint32_t>(width)});
    }
    return result;
}

at::Tensor panels_of(const CurrentMatrix& current, const ScaledTokens& from, const TokenGroups& groups) {
    const std::int64_t count = std::int64_t{groups.count} * groups.group_tokens * from.width;
    at::Tensor panels = at::empty({count}, current.options(at::kFloat));
    launch_panels(from, groups, panels.mutable_data_ptr<float>(), current.stream());
    return panels;
}

/// A few tokens by codewords.
void multiply_codewords(const CurrentMatrix& current, const ScaledTokens& x, const ScaledSums& y) {
    const TokenGroups groups = groups_of(x.tokens);
    const at::Tensor panel = panels_of(current, x, groups);
    launch_codeword_product(current.matrix(), panel.const_data_ptr<float>(), groups.group_tokens, y, current.stream());
}

void multiply_decoded(const CurrentMatrix& current, const at::Tensor& decoded, const ScaledTokens& x,
                      const ScaledSums& y) {
    const TokenGroups groups = groups_of(x.tokens);
    const at::Tensor panels = panels_of(current, x, groups);
    launch_product(current.matrix(), CurrentMatrix::quad_rows(decoded), panels.const_data_ptr<float>(), groups, y,
                   current.stream());
}

void multiply_on_tensor_cores(const CurrentMatrix& current, const at::Tensor& decoded, const ScaledTokens& x,
                              const ScaledSums& y) {
    const QuadRows rows = CurrentMatrix::quad_rows(decoded);
    const std::size_t stride = rows.stride * kValuesOfWord;
    const at::Tensor halves =
        at::empty({2, padded_mma_tokens(x.tokens), static_cast<std::int64_t>(stride)}, current.options(at::kShort));
    auto* const high = static_cast<std::uint16_t*>(halves.mutable_data_ptr());
    const SplitPanel panel{high, high + halves.stride(0), stride};
    launch_split(x, panel, current.stream());
    launch_mma_product(current.matrix(), rows, panel, y, current.stream());
}

bool wants_tensor_cores(std::int64_t tokens) {
    // The precision of products on CUDA alone: torch refuses to tell that of all backends where they differ.
    return tokens >= kMinTensorCoreTokens &&
           at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
               at::Float32Precision::TF32;
}

}  // namespace

at::Tensor coded_linear_cuda(const at::Tensor& x, const at::Tensor& page, std::int64_t index,
                             const at::Tensor& row_scale, const at::Tensor& column_scale) {
    return across_torch([&] {
        const SharedGpu gpu("x", x, page, row_scale, column_scale);
        const CurrentMatrix current(page, index);
        const CodedScales scales(current.matrix().rows, current.matrix().columns, row_scale, column_scale);
        const at::Tensor from = coded_tokens("x", x, current.matrix().columns);
        const bool is_few = from.size(0) <= kMaxGroupTokens && current.is_all_tun12();
        const bool is_split = wants_tensor_cores(from.size(0));
        const at::Tensor decoded = is_few && !is_split ? at::Tensor() : current.decoded();
        const at::Tensor y = multiplied(from, {scales.columns, current.matrix().order}, {scales.rows},
                                        [&](const ScaledTokens& in, const ScaledSums& out) {
                                            if (is_split) return multiply_on_tensor_cores(current, decoded, in, out);
                                            if (is_few) return multiply_codewords(current, in, out);
                                            multiply_decoded(current, decoded, in, out);
                                        });
        return tokens_like(x, y);
    });
}

at::Tensor coded_linear_transposed_cuda(const at::Tensor& g, const at::Tensor& page, std::int64_t index,
                                        const at::Tensor& row_scale, const at::Tensor& column_scale) {
    return across_torch([&] {
        const SharedGpu gpu("g", g, page, row_scale, column_scale);
        const CurrentMatrix current(page, index);
        const CodedScales scales(current.matrix().rows, current.matrix().columns, row_scale, column_scale);
        const at::Tensor from = coded_tokens("g", g, current.matrix().rows);
        const at::Tensor decoded = current.decoded();
        const at::Tensor z =
            multiplied(from, {scales.rows}, {scales.columns, current.matrix().order},
                       [&](const ScaledTokens& in, const ScaledSums& out) {
                           const TokenGroups groups = groups_of(in.tokens);
                           const at::Tensor panels = panels_of(current, in, groups);
                           launch_transposed_product(current.matrix(), CurrentMatrix::quad_rows(decoded),
                                                     panels.const_data_ptr<float>(), groups, out, current.stream());
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
