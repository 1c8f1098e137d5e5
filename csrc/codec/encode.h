// Coding of a ternary matrix into an extent. Layer codec: includes base only.
#pragma once

#include <cstddef>

#include "base/instruction_set.h"
#include "codec/column_class.h"
#include "codec/column_order.h"
#include "codec/extent.h"
#include "codec/ternary.h"

namespace torch_offload {

/// Which coder the tiles get. `smallest`: each tile that of TUN12 and RANS4 that codes it in fewer bytes, TUN12 if both
/// do.
enum class CoderChoice { tun12, rans4, qmoe, smallest };

struct EncodeOptions {
    CoderChoice coder = CoderChoice::smallest;
    /// 0: as equal as possible, 512 at most, multiples of 64.
    std::size_t rows_per_tile = 0;
    ColumnClasses classes = {{0}};
    /// Which columns are in which class; by default they lie in `classes` already.
    ColumnOrder order = {};
    /// Tiles are coded by that many threads, which does not change a bit of the extent.
    std::size_t thread_count = 1;
    /// Which kernels code, which does not change a bit either.
    InstructionSet set = best_instruction_set();
};

/// Codes `matrix`, with the odds and frequencies that its own values have in each class.
/// Throws: InvalidArgument if a value is not -1, 0 or +1, if there are no rows or columns or too many (kMaxRows,
///         kMaxColumns), or if the classes are no cut of the columns, or the order does not fit them.
ExtentBuffer encode(const TernaryView& matrix, const EncodeOptions& options = {});

/// The same with columns sorted into up to `most_classes` classes by their odds, or with `options.classes` if that
/// takes no more bytes. The coder of QMoE knows no classes. Throws: as encode(); InvalidArgument unless 1 <=
/// most_classes <= kMaxClasses.
ExtentBuffer encode_sorted(const TernaryView& matrix, std::size_t most_classes, const EncodeOptions& options = {});

}  // namespace torch_offload
