#include <gtest/gtest.h>
#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"
#include "codec/coded_matrix.h"
#include "codec/encode.h"
#include "codec/outcomes.h"
#include "support/sanitized.h"

namespace torch_offload {
namespace {

class RoundTrip : public testing::TestWithParam<CoderChoice> {
protected:
    EncodeOptions options() const {
        EncodeOptions options;
        options.coder = GetParam();
        return options;
    }
    /// By every set of kernels: T, and its products bit for bit.
    void expect_returns(const Matrix& matrix, const EncodeOptions& options, const std::string& what) {
        const ExtentBuffer extent = encode(matrix.view(), options);
        const CodedMatrix coded(extent.bytes());
        ASSERT_EQ(coded.rows(), matrix.rows) << what;
        ASSERT_EQ(coded.columns(), matrix.columns) << what;
        const Inputs inputs(matrix.rows, matrix.columns, 1 + returned_ % 3, static_cast<std::uint32_t>(returned_));
        const Outcome expected = outcome_of(matrix, inputs);
        for (const InstructionSet set : available_sets()) {
            ASSERT_TRUE(outcome_by(set, coded, inputs) == expected)
                << what << ", instruction set " << static_cast<int>(set);
        }
        ++returned_;
        sorted_ += coded.header().order.bits != 0;
    }
    /// Of that many at least a tenth had their columns sorted.
    void expect_returned(int count) {
        RecordProperty("matrices", returned_);
        RecordProperty("sorted", sorted_);
        EXPECT_GE(sorted_, count / 10);
        RecordProperty("instruction_sets", static_cast<int>(available_sets().size()));
        EXPECT_EQ(returned_, count);
    }

private:
    int returned_ = 0;  // matrices that came back
    int sorted_ = 0;    // of them, those whose columns were sorted
};

/// Ones that a coder meets: zeros of any share from none to all, signs that balance or do not, columns of unlike odds,
/// or runs.
Matrix any_matrix(std::size_t kind, std::size_t rows, std::size_t columns, std::mt19937_64& random) {
    if (kind % 5 == 3) return uneven_columns(rows, columns, random());
    if (kind % 7 == 0) return matrix_of_runs(rows, columns, 1 + random() % 60, random());
    const double least = kind % 2 ? 0.3 : 0;
    const double zero = std::uniform_real_distribution<>(least, 1)(random);
    const double plus = kind % 4 == 0 ? std::uniform_real_distribution<>(0, 1)(random) : 0.5;
    return random_matrix(rows, columns, zero, random(), plus);
}

// Every random matrix comes back, and so do its products, by every set of kernels. Method: 5,000 per coder, so that the
// two have 10,000 (a tenth under a sanitizer), of random shape, odds, signs, runs, tile height and classes, given or
// found; products against the documented order of sums.
TEST_P(RoundTrip, OfRandomMatrices) {
    std::mt19937_64 random(7 + static_cast<std::uint64_t>(GetParam()));
    const auto up_to = [&](std::size_t most) { return 1 + random() % most; };
    const auto count = static_cast<std::size_t>(repetitions(5000));
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t rows = i % 11 == 0 ? 1 : up_to(i % 10 == 0 ? 200 : 12);
        const std::size_t columns = i % 13 == 0 ? 1 : up_to(i % 3 == 0 ? 700 : 150);
        EncodeOptions chosen = options();
        if (i % 2 == 0) chosen.rows_per_tile = up_to(rows + 1);
        while (chosen.classes.size() < 4 && i % 5 < 2) {
            const std::size_t first = chosen.classes.back().first_column + up_to(80);
            if (first >= columns) break;
            chosen.classes.push_back({first});
        }
        const Matrix matrix = any_matrix(i, rows, columns, random);
        if (i % 5 == 3) sort_columns(matrix, up_to(kMaxClasses), chosen);
        expect_returns(matrix, chosen,
                       std::to_string(i) + ": " + std::to_string(rows) + " x " + std::to_string(columns));
        if (HasFatalFailure()) return;
    }
    expect_returned(repetitions(5000));
}

Matrix hard_matrix(std::size_t kind, std::size_t rows, std::size_t columns, std::mt19937_64& random) {
    switch (kind) {
        case 0:
            return filled_matrix(rows, columns, 0);
        case 1:
            return filled_matrix(rows, columns, 1);
        case 2:
            return filled_matrix(rows, columns, -1);
        case 3:  // no -1
            return random_matrix(rows, columns, 0.9, random(), 1);
        case 4: {  // one value in all
            Matrix matrix = filled_matrix(rows, columns, 0);
            matrix.values[random() % matrix.values.size()] = random() % 2 ? 1 : -1;
            return matrix;
        }
        case 5: {  // the last value of every row only
            Matrix matrix = filled_matrix(rows, columns, 0);
            for (std::size_t i = 0; i < rows; ++i) matrix.values[(i + 1) * columns - 1] = -1;
            return matrix;
        }
        case 6: {  // a coder that has learned the odds of the first rows is wrong about the others
            Matrix matrix = random_matrix(rows, columns, 0.99, random());
            for (std::size_t i = matrix.values.size() / 2; i < matrix.values.size(); ++i) {
                matrix.values[i] = static_cast<std::int8_t>(static_cast<int>(i % 3) - 1);
            }
            return matrix;
        }
        default:
            return matrix_of_runs(rows, columns, 40, random());
    }
}

// So does every hard one. Method: 250 per coder, 1,000 in all: nothing but zeros, ones or minus ones, no -1, one value,
// last values, odds that change, runs; a single row, a single column, widths around what words, quads and vectors hold.
TEST_P(RoundTrip, OfHardMatrices) {
    std::mt19937_64 random(11);
    constexpr std::size_t kWidths[] = {1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 255, 257, 2047};
    constexpr std::size_t kHeights[] = {1, 2, 3, 63, 64, 65, 130};
    for (std::size_t i = 0; i < 250; ++i) {
        const std::size_t columns = kWidths[i % std::size(kWidths)];
        const std::size_t rows = kHeights[i / 5 % std::size(kHeights)];
        EncodeOptions chosen = options();
        if (i % 3 == 0) chosen.rows_per_tile = 1 + random() % (2 * rows);
        if (i % 4 == 1 && columns > 1) chosen.classes.push_back({1 + random() % (columns - 1)});
        const Matrix matrix = hard_matrix(i % 8, rows, columns, random);
        if (i % 4 == 2) sort_columns(matrix, 2 + random() % (kMaxClasses - 1), chosen);
        expect_returns(matrix, chosen,
                       std::to_string(i) + ": " + std::to_string(rows) + " x " + std::to_string(columns));
        if (HasFatalFailure()) return;
    }
    expect_returned(250);
}

// Behind a row's last column there are zeros up to the next multiple of 64, which products count on, whatever was there
// before. Method: rows of several widths read into room full of sevens.
TEST_P(RoundTrip, LeavesZerosBehindRows) {
    for (const std::size_t columns : {1, 3, 4, 5, 17, 63, 64, 65, 130}) {
        const ExtentBuffer extent = encode(random_matrix(65, columns, 0.6, 1).view(), options());
        const CodedMatrix coded(extent.bytes());
        const CodedTile& tile = coded.tiles()[0];
        const std::size_t padded = (columns + 63) / 64 * 64;
        for (const InstructionSet set : available_sets()) {
            const auto reader = coded.read(tile, set);
            const std::size_t stride = padded + kRowSlack;
            std::vector<std::int8_t> values(reader->rows_at_once() * stride, 7);
            reader->read(reader->rows_at_once(), {values.data(), stride});
            for (std::size_t row = 0; row < reader->rows_at_once(); ++row) {
                const auto* const from = values.data() + row * stride;
                ASSERT_TRUE(std::all_of(from + columns, from + padded, [](std::int8_t value) { return value == 0; }))
                    << row << " of " << columns << " columns, instruction set " << static_cast<int>(set);
            }
        }
    }
}

// The bytes depend on the values only. Method: one to five threads, the same extent each time.
TEST_P(RoundTrip, HasTheSameBytesForEveryNumberOfThreads) {
    const Matrix matrix = random_matrix(700, 333, 0.9, 3);
    EncodeOptions chosen = options();
    chosen.rows_per_tile = 64;
    chosen.classes = {{0}, {100}};
    const ExtentBuffer expected = encode(matrix.view(), chosen);
    for (std::size_t threads = 2; threads <= 5; ++threads) {
        chosen.thread_count = threads;
        const ExtentBuffer actual = encode(matrix.view(), chosen);
        EXPECT_TRUE(std::ranges::equal(actual.bytes(), expected.bytes())) << threads;
    }
}

std::uint64_t hash_of(const ExtentBuffer& extent) { return XXH3_64bits(extent.bytes().data(), extent.bytes().size()); }

// What is written depends on neither machine nor compiler, and changes only on purpose. Method: the hashes of an extent
// of two tiles and two classes, and of one whose columns are sorted into seven.
TEST_P(RoundTrip, WritesKnownBytes) {
    constexpr std::uint64_t kHashes[] = {0x96bf44be6f5027df, 0xa71c9aec0bc973f2, 0x2cae731999b878d1,
                                         0x96bf44be6f5027df};
    constexpr std::uint64_t kSortedHashes[] = {0x62b4dc62ddb6bac1, 0x23513dfdc8c4d16e, 0x3860b7eb01dce6d9,
                                               0x62b4dc62ddb6bac1};
    const auto choice = static_cast<std::size_t>(GetParam());
    EXPECT_EQ(hash_of(encode(random_matrix(130, 257, 0.8, 9).view(),
                             {.coder = GetParam(), .rows_per_tile = 66, .classes = {{0}, {99}}})),
              kHashes[choice]);
    const Matrix uneven = uneven_columns(130, 257, 9);
    EncodeOptions sorted{.coder = GetParam(), .rows_per_tile = 66};
    sort_columns(uneven, 7, sorted);
    EXPECT_EQ(hash_of(encode(uneven.view(), sorted)), kSortedHashes[choice]);
}

// The classes of columns are packed as FORMAT.md says, that of the most zeros being the first. Method: five columns of
// 0 to 4 zeros in four classes, of which the last has two; the bytes by hand.
TEST_P(RoundTrip, PacksTheClassesOfColumns) {
    // By values that are not zero: 4, 0, 3, 1 and 2. So the classes are 3, 0, 3, 1 and 2.
    const Matrix matrix{4, 5, {1, 0, 1, 1, 1, 1, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0}};
    EncodeOptions sorted = options();
    sort_columns(matrix, 4, sorted);
    const ExtentBuffer extent = encode(matrix.view(), sorted);
    constexpr std::size_t kBitsAt = 55;
    constexpr std::size_t kPackedAt = 56 + 4 * 4;
    EXPECT_EQ(std::to_integer<int>(extent.bytes()[kBitsAt]), 2);
    EXPECT_EQ(std::to_integer<int>(extent.bytes()[kPackedAt]), 0b01'11'00'11);
    EXPECT_EQ(std::to_integer<int>(extent.bytes()[kPackedAt + 1]), 0b10);
}

// What is not a ternary matrix is refused. Method: each argument wrong in turn.
TEST_P(RoundTrip, RefusesWhatItCannotCode) {
    Matrix matrix = random_matrix(3, 50, 0.8, 1);
    EncodeOptions chosen = options();
    EXPECT_THROW(encode({matrix.values.data(), 0, 5}, chosen), InvalidArgument);
    EXPECT_THROW(encode({matrix.values.data(), 5, 0}, chosen), InvalidArgument);
    for (const ColumnClasses& classes : {ColumnClasses{}, {{1}}, {{0}, {50}}, {{0}, {9}, {9}}, {{0}, {9}, {8}}}) {
        chosen.classes = classes;
        EXPECT_THROW(encode(matrix.view(), chosen), InvalidArgument);
    }
    chosen = options();
    for (const unsigned bits : {3, 5, 8, 64}) {
        chosen.order = {bits, std::vector<std::byte>(ColumnOrder::packed_bytes(matrix.columns, bits))};
        EXPECT_THROW(encode(matrix.view(), chosen), InvalidArgument) << bits;
    }
    for (const std::size_t most_classes : {std::size_t{0}, kMaxClasses + 1}) {
        EXPECT_THROW(encode_sorted(matrix.view(), most_classes, options()), InvalidArgument) << most_classes;
    }
    for (const int value : {2, -2, 4, 127, -128}) {
        matrix.values[77] = static_cast<std::int8_t>(value);
        EXPECT_THROW(encode(matrix.view(), options()), InvalidArgument) << value;
    }
}

INSTANTIATE_TEST_SUITE_P(All, RoundTrip, testing::ValuesIn(kChoices),
                         [](const auto& choice) { return name_of(choice.param); });

}  // namespace
}  // namespace torch_offload
