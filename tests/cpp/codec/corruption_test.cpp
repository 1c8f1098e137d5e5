#include <gtest/gtest.h>
#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"
#include "codec/outcomes.h"
#include "support/sanitized.h"

namespace torch_offload {
namespace {

// Offsets of FORMAT.md.
constexpr std::size_t kChecksumAt = 8;
constexpr std::size_t kVersionAt = 16;
constexpr std::size_t kHeaderSizeAt = 20;
constexpr std::size_t kExtentSizeAt = 24;
constexpr std::size_t kCodedSizeAt = 32;
constexpr std::size_t kRowsAt = 40;
constexpr std::size_t kColumnsAt = 44;
constexpr std::size_t kTileRowsAt = 48;
constexpr std::size_t kClassCountAt = 52;
constexpr std::size_t kTablesAt = 54;
constexpr std::size_t kOrderBitsAt = 55;
constexpr std::size_t kClassesAt = 56;

/// A copy of an extent that a test changes. Its memory ends where the extent does, so that a sanitizer sees reads
/// behind it.
class Changed {
public:
    explicit Changed(const ExtentBuffer& extent) : buffer_(extent.bytes().size()) {
        std::ranges::copy(extent.bytes(), buffer_.bytes().begin());
    }
    std::span<std::byte> bytes() noexcept { return buffer_.bytes(); }

    template <typename Number>
    Changed& put(std::size_t offset, Number number) {
        std::memcpy(bytes().data() + offset, &number, sizeof(number));
        return *this;
    }
    /// As one who wants to deceive would: the checksum is right again.
    Changed& seal() { return put(kChecksumAt, std::uint64_t{XXH3_64bits(bytes().data() + 16, bytes().size() - 16)}); }

private:
    ExtentBuffer buffer_;
};

class Corruption : public testing::TestWithParam<CoderChoice> {
protected:
    /// Of two tiles.
    ExtentBuffer extent(std::size_t columns = 90) const {
        return encode(random_matrix(70, columns, 0.8, 2).view(),
                      {.coder = GetParam(), .rows_per_tile = 66, .classes = {{0}, {33}}});
    }
    /// Of two tiles, its columns sorted into four classes.
    ExtentBuffer sorted_extent() const {
        const Matrix matrix = uneven_columns(70, 90, 2);
        EncodeOptions options{.coder = GetParam(), .rows_per_tile = 66};
        sort_columns(matrix, 4, options);
        return encode(matrix.view(), options);
    }
    /// Where its header says where tiles are.
    static std::size_t directory_of(const ExtentBuffer& extent) {
        const ExtentHeader header = read_header(extent.bytes());
        const auto tables = std::to_integer<unsigned>(extent.bytes()[kTablesAt]);
        return kClassesAt + header.classes.size() * (4 + (tables & 1 ? 6 : 0) + (tables & 2 ? 162 : 0)) +
               header.order.packed.size();
    }
    void expect_the_same_end_everywhere(const ExtentBuffer& whole, int count);
};

// A flipped bit is found, wherever it is. Method: one bit of every byte of an extent, one after the other.
TEST_P(Corruption, OfAnyByteIsFound) {
    Changed changed(extent());
    ASSERT_NO_THROW(CodedMatrix(changed.bytes()));
    for (std::size_t i = 0; i < changed.bytes().size(); ++i) {
        const auto bit = std::byte{1} << (i % 8);
        changed.bytes()[i] ^= bit;
        EXPECT_THROW(CodedMatrix(changed.bytes()), CorruptPage) << i;
        changed.bytes()[i] ^= bit;
    }
}

// An extent that has been cut is refused before a byte behind its end is read. Method: every length, in memory that
// ends there.
TEST_P(Corruption, OfTheLengthIsFound) {
    const ExtentBuffer whole = extent();
    for (std::size_t size = 0; size < whole.bytes().size(); ++size) {
        const std::vector<std::byte> cut(whole.bytes().begin(),
                                         whole.bytes().begin() + static_cast<std::ptrdiff_t>(size));
        EXPECT_THROW(CodedMatrix{cut}, CorruptPage) << size;
    }
    std::vector<std::byte> longer(whole.bytes().begin(), whole.bytes().end());
    longer.resize(longer.size() + 4096);
    EXPECT_THROW(CodedMatrix{longer}, CorruptPage);
}

// Numbers in a header that cannot be are refused, even with the right checksum. Method: each of them in turn.
TEST_P(Corruption, OfTheHeaderIsFound) {
    const ExtentBuffer whole = extent();
    const auto expect_refused = [&](const char* what, std::size_t offset, auto number) {
        Changed changed(whole);
        changed.put(offset, number).seal();
        EXPECT_THROW(CodedMatrix(changed.bytes()), CorruptPage) << what << " " << std::uint64_t{number};
    };
    ASSERT_NO_THROW(CodedMatrix(Changed(whole).seal().bytes()));
    for (const std::uint32_t version : {0U, 2U, UINT32_MAX}) expect_refused("version", kVersionAt, version);
    for (const std::uint32_t size : {0U, 64U, 4096U, UINT32_MAX}) expect_refused("header", kHeaderSizeAt, size);
    for (const std::uint64_t size : {0UL, 1UL << 20, UINT64_MAX}) expect_refused("extent", kExtentSizeAt, size);
    for (const std::uint64_t size : {0UL, 200UL, 4095UL, 4096UL, UINT64_MAX})
        expect_refused("coded", kCodedSizeAt, size);
    for (const std::uint32_t rows : {0U, 66U, 133U, (1U << 30) + 1, UINT32_MAX}) expect_refused("rows", kRowsAt, rows);
    for (const std::uint32_t columns : {0U, 33U, (1U << 24) + 1, UINT32_MAX}) {
        expect_refused("columns", kColumnsAt, columns);
    }
    for (const std::uint32_t rows : {0U, 1U, 70U}) expect_refused("rows of a tile", kTileRowsAt, rows);
    for (const std::uint16_t count : {0, 1, 3, 17, 65535}) expect_refused("classes", kClassCountAt, count);
    for (const std::uint8_t tables : {4, 255}) expect_refused("tables", kTablesAt, tables);
    for (const std::uint8_t bits : {1, 2, 3, 4, 8, 255}) expect_refused("bits per column", kOrderBitsAt, bits);
    expect_refused("first class", kClassesAt, std::uint32_t{1});
    for (const std::uint32_t first : {0U, 90U, UINT32_MAX}) expect_refused("second class", kClassesAt + 4, first);
    const bool has_tables = GetParam() != CoderChoice::qmoe;
    if (has_tables) expect_refused("table", kClassesAt + 8, std::uint16_t{0xFFFF});
    const std::size_t directory = directory_of(whole);
    expect_refused("coder", directory, std::uint8_t{0});
    expect_refused("size of a tile", directory + 1, std::uint8_t{0xFF});
    expect_refused("size of a tile", directory + 7, std::uint8_t{0x80});
}

// Classes of columns that are not as wide as the header says are refused, even with the right checksum. Method: each
// bit of them in turn, those behind the last column included.
TEST_P(Corruption, OfSortedColumnsIsFound) {
    constexpr std::size_t kColumns = 90;
    for (const std::size_t most_classes : {2, 3, 4, 9}) {
        const Matrix matrix = uneven_columns(70, kColumns, 3);
        EncodeOptions options{.coder = GetParam()};
        sort_columns(matrix, most_classes, options);
        const ExtentBuffer whole = encode(matrix.view(), options);
        const ExtentHeader header = read_header(whole.bytes());
        ASSERT_EQ(header.classes.size(), most_classes);
        const std::size_t first = kClassesAt + 4 * most_classes;
        for (std::size_t bit = 0; bit < 8 * ColumnOrder::packed_bytes(kColumns, header.order.bits); ++bit) {
            Changed changed(whole);
            changed.bytes()[first + bit / 8] ^= std::byte{1} << bit % 8;
            changed.seal();
            EXPECT_THROW(CodedMatrix(changed.bytes()), CorruptPage) << most_classes << " classes, bit " << bit;
        }
    }
}

// Tiles leave room behind them for whole vectors. Method: the last tile is said to reach nearly to the extent's end,
// and everything else agrees with that.
TEST_P(Corruption, OfTheRoomBehindTilesIsFound) {
    const ExtentBuffer whole = extent();
    const ExtentHeader header = CodedMatrix(whole.bytes()).header();
    const std::size_t directory = directory_of(whole);
    for (const std::size_t room : {kTileSlackBytes, kTileSlackBytes - 8, std::size_t{0}}) {
        const std::uint64_t coded_bytes = header.extent_bytes - room;
        const std::uint64_t tile_bytes = coded_bytes - header.tiles[1].offset_bytes;
        Changed changed(whole);
        changed.put(kCodedSizeAt, coded_bytes);
        changed.put(directory + 8, tile_bytes << 8 | static_cast<std::uint64_t>(header.tiles[1].coder)).seal();
        if (room < kTileSlackBytes) {
            EXPECT_THROW(CodedMatrix(changed.bytes()), CorruptPage) << room;
        } else {
            EXPECT_NO_THROW(CodedMatrix(changed.bytes()));
        }
    }
}

// More tiles than the bytes have room for are refused before room is made for them. Method: a directory that is long
// enough, whose tiles are empty.
TEST(CorruptSizes, OfNothingAreFound) {
    const ExtentBuffer whole =
        encode(random_matrix(512, 2, 0.8, 2).view(), {.coder = CoderChoice::qmoe, .rows_per_tile = 1});
    Changed changed(whole);
    const std::uint64_t directory_end = kClassesAt + 4 + 4 + 8 * 512;
    for (std::size_t i = 0; i < 512; ++i) changed.put(kClassesAt + 4 + 8 * i, std::uint64_t{3});
    changed.put(kHeaderSizeAt, static_cast<std::uint32_t>(directory_end)).put(kCodedSizeAt, directory_end).seal();
    EXPECT_THROW(CodedMatrix(changed.bytes()), CorruptPage);
}

// Sizes of tiles may not wrap around. Method: 512 tiles, each larger by 2^55 bytes, which is 2^64 together.
TEST(CorruptSizes, ThatAddUpToTheRightSumAreFound) {
    const ExtentBuffer whole =
        encode(random_matrix(512, 20, 0.8, 2).view(), {.coder = CoderChoice::qmoe, .rows_per_tile = 1});
    Changed changed(whole);
    for (std::size_t i = 0; i < 512; ++i) changed.bytes()[kClassesAt + 4 + 8 * i + 7] = std::byte{0x80};
    changed.seal();
    EXPECT_THROW(CodedMatrix(changed.bytes()), CorruptPage);
}

/// What one who wants to deceive does with an extent: each kind changes other bytes, most of them so that the header
/// still agrees with itself and the decoders are reached.
class Deceiver {
public:
    Deceiver(const ExtentBuffer& whole, std::size_t directory, std::uint64_t seed)
        : whole_(whole), header_(CodedMatrix(whole.bytes()).header()), directory_(directory), random_(seed) {}

    static constexpr std::size_t kKinds = 10;

    Changed deceive(std::size_t kind) {
        Changed changed(whole_);
        switch (kind % kKinds) {
            case 0:
                change_bytes(changed, sizeof(std::uint64_t) * 2);
                break;
            case 1:
                change_bytes(changed, header_.tiles[0].offset_bytes);
                break;
            case 2:
                changed.bytes()[byte_of_a_tile()] ^= std::byte{1} << below(8);
                break;
            case 3:
                fill(changed);
                break;
            case 4:
                change_table(changed, below(header_.classes.size()));
                break;
            case 5:
                move_length(changed);
                break;
            case 6:
                change_shape(changed);
                break;
            case 7:
                change_classes(changed);
                break;
            case 8:
                swap_pieces(changed);
                break;
            default:
                changed.put(directory_ + 8 * below(2), static_cast<std::uint8_t>(1 + below(3)));  // the coder
        }
        changed.seal();
        return changed;
    }

private:
    std::size_t below(std::size_t end) { return random_() % end; }
    std::size_t byte_of_a_tile() {
        const std::size_t first = header_.tiles[0].offset_bytes;
        return first + below(header_.coded_bytes - first);
    }
    void change_bytes(Changed& changed, std::size_t first) {
        for (std::size_t k = 0; k <= below(8); ++k) {
            const std::size_t at = first + below(header_.coded_bytes - first);
            changed.bytes()[at] = static_cast<std::byte>(below(3) ? random_() : (below(2) ? 0 : 255));
        }
    }
    /// Up to 64 bytes of a tile, which are codewords of zeros, or of the rest of a row.
    void fill(Changed& changed) {
        const std::size_t first = byte_of_a_tile();
        const std::size_t count = std::min(1 + below(64), header_.coded_bytes - first);
        std::ranges::fill(changed.bytes().subspan(first, count), below(2) ? std::byte{0} : std::byte{255});
    }
    /// Other odds or frequencies that may be.
    void change_table(Changed& changed, std::size_t of_class) {
        std::size_t table = kClassesAt + 4 * header_.classes.size() + header_.order.packed.size();
        if (!header_.tunstall.empty()) {
            const std::size_t zero = 1 + below(65533);
            changed.put(table + 6 * of_class, static_cast<std::uint16_t>(zero));
            changed.put(table + 6 * of_class + 2, static_cast<std::uint16_t>(1 + below(65535 - zero)));
            changed.put(table + 6 * of_class + 4, static_cast<std::uint16_t>(below(2) ? 31 : 63));
            table += 6 * header_.classes.size();
        }
        if (!header_.frequencies.empty()) {
            const SymbolFrequencies& frequencies = header_.frequencies[of_class];
            const std::size_t from = below(frequencies.size());
            const std::size_t to = (from + 1 + below(frequencies.size() - 1)) % frequencies.size();
            const auto moved = static_cast<std::uint16_t>(below(frequencies[from] + 1U));
            table += 162 * of_class;
            changed.put(table + 2 * from, static_cast<std::uint16_t>(frequencies[from] - moved));
            changed.put(table + 2 * to, static_cast<std::uint16_t>(frequencies[to] + moved));
        }
    }
    /// Bytes that were one tile's become the other's.
    void move_length(Changed& changed) {
        const auto coder = [&](std::size_t tile) { return static_cast<std::uint64_t>(header_.tiles[tile].coder); };
        const std::size_t first = header_.tiles[1].offset_bytes - header_.tiles[0].offset_bytes;
        const std::size_t both = header_.coded_bytes - header_.tiles[0].offset_bytes;
        const std::size_t cut = below(2) ? 8 * below(both / 8 + 1) : first - 32 + 8 * below(9);
        const std::uint64_t sizes[] = {cut, both - cut};
        for (const std::size_t tile : {0, 1}) changed.put(directory_ + 8 * tile, sizes[tile] << 8 | coder(tile));
    }
    /// Others that need as many tiles.
    void change_shape(Changed& changed) {
        const auto tile_rows = static_cast<std::uint32_t>(1 + below(2 * header_.rows_per_tile));
        changed.put(kTileRowsAt, tile_rows);
        changed.put(kRowsAt, static_cast<std::uint32_t>(tile_rows + 1 + below(tile_rows)));
        const std::size_t least = header_.classes.back().first_column + 1;
        if (below(2)) changed.put(kColumnsAt, static_cast<std::uint32_t>(least + below(2 * header_.columns)));
    }
    /// Where the second begins; of sorted columns, two trade their classes, which stay as wide as they are.
    void change_classes(Changed& changed) {
        const unsigned bits = header_.order.bits;
        if (bits == 0) {
            changed.put(kClassesAt + 4, static_cast<std::uint32_t>(1 + below(header_.columns - 1)));
            return;
        }
        const std::size_t columns[] = {below(header_.columns), below(header_.columns)};
        const std::size_t traded = header_.order.class_of(columns[0]) ^ header_.order.class_of(columns[1]);
        for (const std::size_t column : columns) {
            const std::size_t at = kClassesAt + 4 * header_.classes.size() + column * bits / 8;
            changed.bytes()[at] ^= static_cast<std::byte>(traded << column * bits % 8);
        }
    }
    void swap_pieces(Changed& changed) {
        for (int k = 0; k < 16; ++k) std::swap(changed.bytes()[byte_of_a_tile()], changed.bytes()[byte_of_a_tile()]);
    }

    const ExtentBuffer& whole_;
    ExtentHeader header_;
    std::size_t directory_;
    std::mt19937_64 random_;
};

/// Every set of kernels comes to the same: the same error by decoding and both products, or T and the documented sums.
void expect_one_outcome(const CodedMatrix& coded, const Outcome& expected, const Inputs& inputs,
                        const std::string& what) {
    for (const InstructionSet set : available_sets()) {
        ASSERT_TRUE(outcome_by(set, coded, inputs) == expected)
            << what << ", instruction set " << static_cast<int>(set);
    }
    if (expected.error.empty()) {
        const Matrix matrix{coded.rows(), coded.columns(), expected.values};
        ASSERT_TRUE(expected == outcome_of(matrix, inputs)) << what;
    } else {
        ASSERT_EQ(expected.error, expected.error_of_sums) << what;
        ASSERT_EQ(expected.error, expected.error_of_transposed_sums) << what;
    }
}

/// Of that many changed extents that get past the header.
void Corruption::expect_the_same_end_everywhere(const ExtentBuffer& whole, int count) {
    Deceiver deceiver(whole, directory_of(whole), 5 + static_cast<std::uint64_t>(GetParam()));
    int refused_by_header = 0;
    int refused = 0;
    int accepted = 0;
    for (int i = 0; refused + accepted < count && i < 4 * count; ++i) {
        Changed changed = deceiver.deceive(static_cast<std::size_t>(i));
        std::optional<CodedMatrix> coded;
        try {
            coded.emplace(changed.bytes());
        } catch (const CorruptPage&) {
            ++refused_by_header;
            continue;
        }
        if (coded->rows() > (1U << 18) / coded->columns()) continue;
        const Inputs inputs(coded->rows(), coded->columns(), 1 + i % 3, static_cast<std::uint32_t>(i));
        const Outcome expected = outcome_by(InstructionSet::portable, *coded, inputs);
        expect_one_outcome(*coded, expected, inputs, std::to_string(i));
        if (HasFatalFailure()) return;
        ++(expected.error.empty() ? accepted : refused);
    }
    RecordProperty("refused_by_header", refused_by_header);
    RecordProperty("refused", refused);
    RecordProperty("accepted", accepted);
    EXPECT_EQ(refused + accepted, count);
    EXPECT_GT(refused_by_header, 0);
    EXPECT_GT(refused, count / 15);
    EXPECT_TRUE(accepted > 0 || GetParam() != CoderChoice::tun12);
}

// Whatever the bytes are, decoding and products end with values or CorruptPage and touch nothing else (a sanitizer
// would tell), and every set of kernels comes to the same. Method: 500 extents per coder that get past the header, so
// that the two have 1,000 (a tenth under a sanitizer); ten kinds of changes to tiles, tables, lengths, shape and
// classes, each with the checksum made right again.
TEST_P(Corruption, OfAnythingEndsTheSameEverywhere) { expect_the_same_end_everywhere(extent(), repetitions(500)); }

// So does everything where columns are sorted. Method: the same changes, two columns that trade their classes among
// them, to 250 extents per coder.
TEST_P(Corruption, OfAnythingSortedEndsTheSameEverywhere) {
    expect_the_same_end_everywhere(sorted_extent(), repetitions(250));
}

// A tile that has lost its end, or has one too many, is refused, and nothing behind it is read but its slack (a
// sanitizer would tell: a row is longer than that). Method: tiles of each coder cut and lengthened, read by every
// instruction set.
TEST_P(Corruption, OfATilesLengthIsFound) {
    const ExtentBuffer whole = extent(2000);
    const CodedMatrix coded(whole.bytes());
    const CodedTile& tile = coded.tiles()[0];
    CoderTables tables;
    const ExtentDecoders decoders(coded.header(), tables);
    for (std::size_t size = 0; size <= tile.size_bytes + 64; size += size % 500 < 20 ? 1 : 61) {
        if (size == tile.size_bytes) continue;
        std::vector<std::byte> bytes(size + kTileSlackBytes);
        std::memcpy(bytes.data(), whole.bytes().data() + tile.offset_bytes, std::min(size, tile.size_bytes));
        for (const InstructionSet set : available_sets()) {
            const auto read_all = [&] {
                const auto reader = decoders.of(tile.coder).open({bytes.data(), size}, tile.row_count, set);
                const RowPanel panel(reader->rows_at_once(), coded.columns());
                for (std::size_t row = 0; row < tile.row_count; row += reader->rows_at_once()) {
                    reader->read(std::min<std::size_t>(reader->rows_at_once(), tile.row_count - row), panel.rows());
                }
            };
            EXPECT_THROW(read_all(), CorruptPage) << size << " of " << tile.size_bytes << " bytes";
        }
    }
}

INSTANTIATE_TEST_SUITE_P(All, Corruption, testing::ValuesIn(kChoices),
                         [](const auto& choice) { return name_of(choice.param); });

}  // namespace
}  // namespace torch_offload
