// Tokens as the integers of fixed_point.h, their bytes in planes, as the kernels of products take them. Layer codec:
// includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/instruction_set.h"
#include "codec/fixed_point.h"
#include "codec/token_columns.h"
#include "codec/token_panel.h"

namespace torch_offload {

/// How a token became integers, and their sum.
struct PlanedToken {
    FixedPoint point;
    std::int64_t total;
};

/// The planes of several tokens, each filled up with zeros. A token that is not finite has zeros alone. Move-only.
class TokenPlanes {
public:
    /// `planes`: kPlanesOfHalf or kPlanesOfFloat, or any number up to kMaxPlanes.
    /// Throws: InvalidArgument if there are none, or more.
    TokenPlanes(const TokenPanel& panel, unsigned planes, InstructionSet set = best_instruction_set());

    std::size_t tokens() const noexcept { return planed_.size(); }
    std::size_t width() const noexcept { return width_; }
    std::size_t stride() const noexcept { return stride_; }  // bytes from one plane to the next
    unsigned planes() const noexcept { return planes_; }
    /// Plane `plane` of a token; the token's other planes lie around it.
    const std::int8_t* plane(std::size_t token, unsigned plane = 0) const noexcept {
        return bytes_.get() + (token * planes_ + plane) * stride_;
    }
    const PlanedToken& token(std::size_t index) const noexcept { return planed_[index]; }
    /// The same integers by column, if there are tokens enough to make use of them.
    const TokenColumns& columns() const noexcept { return columns_; }

private:
    struct Free {
        void operator()(std::int8_t* bytes) const noexcept;
    };
    std::size_t width_;
    std::size_t stride_;
    unsigned planes_;
    std::unique_ptr<std::int8_t[], Free> bytes_;
    std::vector<PlanedToken> planed_;
    TokenColumns columns_;
};

}  // namespace torch_offload
