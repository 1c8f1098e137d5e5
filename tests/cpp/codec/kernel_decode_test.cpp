#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"
#include "codec/host_kernels.h"
#include "codec/kernel_samples.h"
#include "support/sanitized.h"

namespace torch_offload {
namespace {

/// Words of QuadRows, with everything behind the last column, as values; 99 where bits are of no value or of no column.
std::vector<std::int8_t> values_of(const std::vector<std::uint32_t>& words, const KernelMatrix& matrix) {
    const std::size_t stride = quad_row_words(matrix.columns);
    std::vector<std::int8_t> values;
    for (std::size_t row = 0; row < matrix.rows; ++row) {
        for (std::size_t column = 0; column < stride * kValuesOfWord; ++column) {
            const std::uint32_t word = words[row * stride + column / kValuesOfWord];
            const std::uint32_t two = word >> (2 * (column % kValuesOfWord)) & 3;
            if (two == 2 || (column >= matrix.columns && two != 0)) return {99};
            if (column < matrix.columns) values.push_back(static_cast<std::int8_t>(two == 3 ? -1 : two));
        }
    }
    return values;
}

/// Values of a matrix as its rows have them decoded.
std::vector<std::int8_t> in_places(std::vector<std::int8_t> values, const CodedMatrix& coded) {
    const std::vector<std::uint32_t> order = coded.column_order();
    const std::vector<std::int8_t> from = values;
    for (std::size_t i = 0; !order.empty() && i < values.size(); ++i) {
        values[i] = from[i / coded.columns() * coded.columns() + order[i % coded.columns()]];
    }
    return values;
}

class KernelDecode : public testing::TestWithParam<CoderChoice> {
protected:
    void expect_same(const Matrix& matrix, const EncodeOptions& options, const std::string& what) const {
        KernelSample sample(encode(matrix.view(), options));
        const CodedMatrix portable(sample.extent());
        const std::vector<std::int8_t> expected = in_places(decoded(portable, InstructionSet::portable), portable);
        for (const unsigned stride : {1U, 7U}) {
            const auto words = quad_words_of(sample.matrix(), HostWarp{stride});
            ASSERT_TRUE(values_of(words, sample.matrix()) == expected) << what << ", lanes by " << stride;
        }
    }
};

// What a warp decodes is what the portable decoder does, value for value, and zero behind the last column. Method: 600
// random matrices per coder (fewer under a sanitizer) of random shape, odds, signs, tile height and classes,
// given or found; lanes in two orders.
TEST_P(KernelDecode, HasTheValuesOfThePortableDecoder) {
    std::mt19937_64 random(11 + static_cast<std::uint64_t>(GetParam()));
    const auto up_to = [&](std::size_t most) { return 1 + random() % most; };
    for (int i = 0; i < repetitions(600); ++i) {
        const std::size_t rows = up_to(i % 10 == 0 ? 200 : 12);
        const std::size_t columns = up_to(i % 3 == 0 ? 1500 : 150);
        const double zero = std::uniform_real_distribution<>(0.3, 1)(random);
        const double plus = i % 4 == 0 ? std::uniform_real_distribution<>(0, 1)(random) : 0.5;
        EncodeOptions options{.coder = GetParam()};
        if (i % 2 == 0) options.rows_per_tile = up_to(rows + 1);
        while (options.classes.size() < 5 && i % 5 < 2) {
            const std::size_t first = options.classes.back().first_column + up_to(i % 7 == 0 ? 3 : 90);
            if (first >= columns) break;
            options.classes.push_back({first});
        }
        Matrix matrix = random_matrix(rows, columns, zero, random(), plus);
        if (i % 5 == 3) {
            matrix = uneven_columns(rows, columns, random());
            sort_columns(matrix, up_to(kMaxClasses), options);
        }
        expect_same(matrix, options, std::to_string(i) + ": " + std::to_string(rows) + " x " + std::to_string(columns));
    }
}

// Long words and codewords that stand for the rest of a row are decoded like others. Method: nearly empty matrices,
// whose words have up to 63 values, with a value at the very end or nowhere; all ones; wide rows.
TEST_P(KernelDecode, OfHardMatrices) {
    for (const std::size_t columns : {1, 15, 16, 17, 63, 64, 65, 1023, 1024, 1025, 5000}) {
        Matrix last = filled_matrix(5, columns, 0);
        for (std::size_t row = 0; row < 5; row += 2) last.values[(row + 1) * columns - 1] = -1;
        const std::string what = std::to_string(columns) + " columns";
        expect_same(last, {.coder = GetParam()}, what + ", the last");
        expect_same(filled_matrix(3, columns, 0), {.coder = GetParam()}, what + ", zeros");
        expect_same(filled_matrix(67, columns, 1), {.coder = GetParam()}, what + ", ones");
        expect_same(random_matrix(130, columns, 0.99, columns), {.coder = GetParam(), .rows_per_tile = 65}, what);
    }
}

// Bytes that change behind a check are decoded to some values of T, inside the result. Method: every tile's bytes
// replaced by random ones after the tables were made (a sanitizer sees reads and writes beside them).
TEST_P(KernelDecode, StaysInsideWhateverTheBytes) {
    std::mt19937_64 random(3);
    for (int i = 0; i < repetitions(200); ++i) {
        const std::size_t columns = 1 + random() % 400;
        EncodeOptions options{.coder = GetParam(), .rows_per_tile = 1 + random() % 80};
        if (columns > 30) options.classes.push_back({1 + random() % (columns - 1)});
        KernelSample sample(encode(random_matrix(1 + random() % 90, columns, 0.8, random()).view(), options));
        const KernelMatrix matrix = sample.matrix();
        for (std::uint32_t tile = 0; tile < matrix.tile_count; ++tile) {
            for (std::uint32_t byte = 0; byte < matrix.tiles[tile].size_bytes; ++byte) {
                sample.extent()[matrix.tiles[tile].offset_bytes + byte] = static_cast<std::byte>(random());
            }
        }
        EXPECT_EQ(values_of(quad_words_of(matrix), matrix).size(), std::size_t{matrix.rows} * matrix.columns);
    }
}

// An extent that is not to the byte what was written has no tables. Method: a bit of each seventh byte of an extent.
TEST_P(KernelDecode, RefusesWhatTheProcessorRefuses) {
    ExtentBuffer extent = encode(random_matrix(9, 40, 0.7, 2).view(), {.coder = GetParam(), .rows_per_tile = 4});
    CoderTables tables;
    EXPECT_NO_THROW(KernelTables(extent.bytes(), tables));
    for (std::size_t i = 0; i < extent.bytes().size(); i += 7) {
        extent.bytes()[i] ^= std::byte{4};
        EXPECT_THROW(KernelTables(extent.bytes(), tables), CorruptPage) << i;
        extent.bytes()[i] ^= std::byte{4};
    }
}

INSTANTIATE_TEST_SUITE_P(Coders, KernelDecode,
                         testing::Values(CoderChoice::tun12, CoderChoice::rans4, CoderChoice::smallest),
                         [](const auto& choice) { return name_of(choice.param); });

/// One tile that has eight rows and is said to have others, sealed with the right checksum by building the extent from
/// such a header.
ExtentBuffer tile_of_other_rows(CoderChoice choice, std::size_t rows) {
    const ExtentBuffer extent = encode(random_matrix(8, 50, 0.7, 4).view(), {.coder = choice, .rows_per_tile = 8});
    ExtentHeader header = read_header(extent.bytes());
    const auto tile = extent.bytes().subspan(header.tiles[0].offset_bytes, header.tiles[0].size_bytes);
    header.rows = header.rows_per_tile = rows;
    header.tiles[0].row_count = static_cast<std::uint32_t>(rows);
    return build_extent(header, {{tile.begin(), tile.end()}});
}

// Tiles whose rows end too early or too late are refused before any kernel sees them. Method: a header that says tiles
// have one row more or less than their bytes.
TEST(KernelTables, RefusesTilesOfOtherRows) {
    for (const CoderChoice choice : {CoderChoice::tun12, CoderChoice::rans4}) {
        for (const std::size_t rows : {7, 9}) {
            const ExtentBuffer sealed = tile_of_other_rows(choice, rows);
            CoderTables tables;
            EXPECT_NO_THROW(read_header(sealed.bytes()));
            EXPECT_THROW(KernelTables(sealed.bytes(), tables), CorruptPage) << name_of(choice) << " " << rows;
        }
    }
}

/// From here on this process may have that much memory beside what it has.
bool allows_itself(std::size_t more_bytes) {
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlim_t all_bytes = pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) + more_bytes;
    const rlimit limit{all_bytes, all_bytes};
    return pages > 0 && ::setrlimit(RLIMIT_AS, &limit) == 0;
}

// Rows that a tile's codewords cannot be are refused before there is room for them. Method: 4 KiB that are said to have
// 2^23 rows, for which tables have 64 MiB, in a child that may take 16 MiB more than it has.
TEST(KernelTables, HaveNoRoomForRowsThatAreNotThere) {
    const ExtentBuffer sealed = tile_of_other_rows(CoderChoice::tun12, std::size_t{1} << 23);
    ASSERT_EQ(sealed.bytes().size(), 4096U);
    const pid_t child = ::fork();
    if (child == 0) {
        if (!allows_itself(std::size_t{16} << 20)) ::_exit(2);
        try {
            CoderTables tables;
            const KernelTables made(sealed.bytes(), tables);
        } catch (const CorruptPage&) {
            ::_exit(0);
        } catch (const std::bad_alloc&) {
            ::_exit(3);
        }
        ::_exit(4);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
}

// Matrices of equal odds share the tables of their words, and what each has of its own does not grow with its classes'
// tables. Method: two coders, one class and four; a row, so that what rows take is small.
TEST(KernelTables, OfAMatrixAreSmall) {
    for (const CoderChoice choice : {CoderChoice::tun12, CoderChoice::rans4}) {
        const EncodeOptions options{.coder = choice, .classes = {{0}, {64}, {128}, {192}}};
        const KernelSample one(encode(random_matrix(1, 256, 0.8, 1).view(), options));
        const KernelSample same(encode(random_matrix(1, 256, 0.8, 1).view(), options));
        EXPECT_LT(one.tables().bytes().size(), 2048U) << name_of(choice);
        EXPECT_TRUE(std::ranges::equal(one.tables().word_classes(), same.tables().word_classes()));
        EXPECT_EQ(one.tables().word_classes().size(), choice == CoderChoice::tun12 ? 4U : 0U);
    }
}

// The baseline's coder has no kernel, and says so. Method: an extent of it.
TEST(KernelTables, RefusesTheDictionaryOfQmoe) {
    const ExtentBuffer extent = encode(random_matrix(4, 50, 0.8, 1).view(), {.coder = CoderChoice::qmoe});
    CoderTables tables;
    EXPECT_THROW(KernelTables(extent.bytes(), tables), InvalidArgument);
}

}  // namespace
}  // namespace torch_offload
