// AdamW over plain arrays: unscale, clip, decay, moments, step and cast in one pass over the memory, for bf16 weights
// with an fp32 master. One kernel per instruction set, all with the same bits. Layer optim, without torch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/instruction_set.h"

namespace torch_offload {

struct AdamWOptions {
    double lr = 1e-3;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double eps = 1e-8;
    double weight_decay = 0;
    bool maximize = false;
};

/// The factors of one step, rounded to fp32 once, from doubles.
struct AdamWFactors {
    float decay;              // 1 - lr weight_decay
    float average_weight;     // 1 - beta1
    float square_keep;        // beta2
    float square_weight;      // 1 - beta2
    float square_correction;  // sqrt(1 - beta2^step)
    float eps;
    float negative_step;  // -lr / (1 - beta1^step)
    bool is_maximizing;
};
/// `step` counts from 1.
AdamWFactors adamw_factors(const AdamWOptions& options, double step) noexcept;

/// How a gradient becomes the one that the step uses: g / scale, then g clip, rounded to the gradient's own type as
/// an operator that scales gradients in place would.
struct GradientScaling {
    bool has_scale = false;
    bool has_clip = false;
    float scale = 1;
    float clip = 1;
};

enum class GradientType : std::uint8_t { bf16, f32 };

/// `count` elements of everything that belongs to one parameter. No two arrays overlap.
/// The master is `low` with `weights`, or `masters`; without weights, `masters` is the parameter itself.
struct AdamWArrays {
    std::size_t count = 0;
    std::uint16_t* weights = nullptr;  // [count] bf16
    std::int16_t* low = nullptr;       // [count] of split_master.h, or nullptr
    float* masters = nullptr;          // [count], or nullptr
    const void* gradients = nullptr;   // [count] of gradient_type
    GradientType gradient_type = GradientType::bf16;
    float* exp_avg = nullptr;                   // [count], or nullptr: packed
    float* exp_avg_sq = nullptr;                // [count], or nullptr: packed
    float* max_exp_avg_sq = nullptr;            // [count], or nullptr: not AMSGrad
    std::uint8_t* packed_exp_avg = nullptr;     // [packed_size(count)] of packed_moments.h, or nullptr
    std::uint8_t* packed_exp_avg_sq = nullptr;  // [packed_size(count)], or nullptr
};

/// One step of decoupled weight decay Adam in fp32, each operation rounded by itself:
///
///     g = g / scale * clip
///     p = p (1 - lr weight_decay)
///     m = m + (1 - beta1) (g - m)
///     v = beta2 v + (1 - beta2) g g
///     p = p - (lr / (1 - beta1^t)) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
///
/// Elements do not depend on one another, so a run may be cut anywhere; with packed moments, between blocks.
/// Not-a-numbers are stored as kCanonicalNan.
/// Source: Loshchilov and Hutter, arXiv 1711.05101; the order of operations is that of torch's fused kernel.
void adamw_update(const AdamWArrays& arrays, const AdamWFactors& factors, const GradientScaling& scaling,
                  InstructionSet set = best_instruction_set()) noexcept;

/// The kernels themselves, one per source file. Pre: the set is available.
using AdamWKernel = void(const AdamWArrays&, const AdamWFactors&, const GradientScaling&) noexcept;
AdamWKernel adamw_portable;
AdamWKernel adamw_avx2;
AdamWKernel adamw_avx512;

}  // namespace torch_offload
