#include "codec/extent.h"

#include <xxhash.h>

#include <algorithm>
#include <new>

#include "base/check.h"
#include "codec/little_endian.h"

namespace torch_offload {
namespace {

constexpr std::uint64_t kMagic = 0x314E5245544F54;  // "TOTERN1" and a zero byte
constexpr std::size_t kChecksumOffset = 8;
constexpr std::size_t kHashedFrom = 16;
constexpr std::size_t kTileAlignment = 8;

std::uint64_t extent_checksum(std::span<const std::byte> extent) noexcept {
    return XXH3_64bits(extent.data() + kHashedFrom, extent.size() - kHashedFrom);
}

constexpr std::size_t rounded_up(std::size_t size, std::size_t unit) noexcept {
    return (size + unit - 1) / unit * unit;
}

// What the header has of each coder, so that a reader knows what follows.
constexpr std::uint8_t kHasTunstall = 1;
constexpr std::uint8_t kHasFrequencies = 2;

std::vector<std::byte> header_bytes(const ExtentHeader& header, std::uint32_t header_size) {
    std::vector<std::byte> to;
    append_number(to, kMagic);
    append_number(to, std::uint64_t{0});  // the checksum
    append_number(to, kExtentVersion);
    append_number(to, header_size);
    append_number(to, static_cast<std::uint64_t>(header.extent_bytes));
    append_number(to, static_cast<std::uint64_t>(header.coded_bytes));
    append_number(to, static_cast<std::uint32_t>(header.rows));
    append_number(to, static_cast<std::uint32_t>(header.columns));
    append_number(to, static_cast<std::uint32_t>(header.rows_per_tile));
    append_number(to, static_cast<std::uint16_t>(header.classes.size()));
    append_number(to, static_cast<std::uint8_t>((header.tunstall.empty() ? 0 : kHasTunstall) |
                                                (header.frequencies.empty() ? 0 : kHasFrequencies)));
    append_number(to, static_cast<std::uint8_t>(header.order.bits));
    for (const ColumnClass& one : header.classes) append_number(to, static_cast<std::uint32_t>(one.first_column));
    to.insert(to.end(), header.order.packed.begin(), header.order.packed.end());
    for (const TunstallClass& one : header.tunstall) {
        append_number(to, one.odds.zero);
        append_number(to, one.odds.plus);
        append_number(to, static_cast<std::uint16_t>(one.limit));
    }
    for (const SymbolFrequencies& one : header.frequencies) {
        for (const std::uint16_t frequency : one) append_number(to, frequency);
    }
    for (const CodedTile& tile : header.tiles) {
        append_number(to, static_cast<std::uint64_t>(tile.size_bytes) << 8 | static_cast<std::uint64_t>(tile.coder));
    }
    to.resize(rounded_up(to.size(), kTileAlignment));
    return to;
}

ColumnClasses take_classes(NumberReader& numbers, std::size_t count, std::size_t columns) {
    OFFLOAD_CHECK(count >= 1 && count <= kMaxClasses, CorruptPage, "a coded extent says it has ", count,
                  " classes of columns, of at most ", kMaxClasses);
    ColumnClasses classes;
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t first = numbers.take<std::uint32_t>();
        OFFLOAD_CHECK(i == 0 ? first == 0 : first > classes.back().first_column && first < columns, CorruptPage,
                      "class ", i, " of a coded extent of ", columns, " columns begins at column ", first);
        classes.push_back({first});
    }
    return classes;
}

ColumnOrder take_order(NumberReader& numbers, unsigned bits, const ColumnClasses& classes, std::size_t columns) {
    ColumnOrder order{bits, {}};
    const std::span<const std::byte> packed = numbers.take_bytes(ColumnOrder::packed_bytes(columns, bits));
    order.packed.assign(packed.begin(), packed.end());
    const std::size_t unused_bits = packed.size() * 8 - columns * bits;
    OFFLOAD_CHECK(fits(order, classes, columns) &&
                      (packed.empty() || std::to_integer<unsigned>(packed.back()) >> (8 - unused_bits) == 0),
                  CorruptPage, "a coded extent's columns are not in the classes that it says it has, by ", bits,
                  " bits for each");
    return order;
}

std::vector<TunstallClass> take_tunstall(NumberReader& numbers, std::size_t count) {
    std::vector<TunstallClass> classes(count);
    for (TunstallClass& one : classes) {
        one.odds.zero = numbers.take<std::uint16_t>();
        one.odds.plus = numbers.take<std::uint16_t>();
        const auto limit = numbers.take<std::uint16_t>();
        one.limit = static_cast<WordLimit>(limit);
        OFFLOAD_CHECK(is_valid(one.odds) && (limit == 31 || limit == 63), CorruptPage, "a coded extent has odds of ",
                      one.odds.zero, " and ", one.odds.plus, " in 65536 and words of ", limit, " values");
    }
    return classes;
}

std::vector<SymbolFrequencies> take_frequencies(NumberReader& numbers, std::size_t count) {
    std::vector<SymbolFrequencies> classes(count);
    for (SymbolFrequencies& one : classes) {
        for (std::uint16_t& frequency : one) frequency = numbers.take<std::uint16_t>();
        OFFLOAD_CHECK(is_valid(one), CorruptPage, "frequencies of a coded extent do not add up to ", kFrequencyTotal);
    }
    return classes;
}

/// The tiles lie one behind the other from the header's end to that of what is coded.
void take_tiles(NumberReader& numbers, std::size_t header_size, ExtentHeader& header) {
    const std::size_t tile_count = (header.rows + header.rows_per_tile - 1) / header.rows_per_tile;
    const std::size_t max_tiles = header.coded_bytes / (2 * kTileAlignment);  // in the header and a word of the tile
    OFFLOAD_CHECK(tile_count <= max_tiles, CorruptPage, "a coded extent of ", header.coded_bytes, " bytes cannot have ",
                  tile_count, " tiles");
    header.tiles.reserve(tile_count);
    std::size_t offset = header_size;
    for (std::size_t row = 0; row < header.rows; row += header.rows_per_tile) {
        const auto packed = numbers.take<std::uint64_t>();
        CodedTile tile{static_cast<Coder>(packed & 0xFF), static_cast<std::uint32_t>(row),
                       static_cast<std::uint32_t>(std::min(header.rows_per_tile, header.rows - row)), offset,
                       static_cast<std::size_t>(packed >> 8)};
        OFFLOAD_CHECK(tile.coder == Coder::qmoe || (tile.coder == Coder::tun12 && !header.tunstall.empty()) ||
                          (tile.coder == Coder::rans4 && !header.frequencies.empty()),
                      CorruptPage, "a tile of a coded extent has the unknown coder ", packed & 0xFF);
        OFFLOAD_CHECK(offset <= header.coded_bytes && tile.size_bytes <= header.coded_bytes - offset, CorruptPage,
                      "the tile at row ", row, " of a coded extent is said to have ", tile.size_bytes, " bytes of ",
                      header.coded_bytes);
        offset += rounded_up(tile.size_bytes, kTileAlignment);
        header.tiles.push_back(tile);
    }
    OFFLOAD_CHECK(offset == header.coded_bytes, CorruptPage, "the tiles of a coded extent end at byte ", offset,
                  ", not at ", header.coded_bytes);
}

}  // namespace

ExtentBuffer::ExtentBuffer(std::size_t size_bytes)
    : bytes_(static_cast<std::byte*>(operator new[](size_bytes, std::align_val_t{kExtentAlignment}))),
      size_bytes_(size_bytes) {
    std::fill_n(bytes_.get(), size_bytes, std::byte{0});
}

void ExtentBuffer::Free::operator()(std::byte* bytes) const noexcept {
    operator delete[](bytes, std::align_val_t{kExtentAlignment});
}

ExtentBuffer build_extent(ExtentHeader header, const std::vector<std::vector<std::byte>>& tiles) {
    const std::size_t header_size = header_bytes(header, 0).size();
    std::size_t offset = header_size;
    for (std::size_t i = 0; i < tiles.size(); ++i) {
        header.tiles[i].offset_bytes = offset;
        header.tiles[i].size_bytes = tiles[i].size();
        offset += rounded_up(tiles[i].size(), kTileAlignment);
    }
    header.coded_bytes = offset;
    header.extent_bytes = rounded_up(offset + kTileSlackBytes, kExtentAlignment);
    ExtentBuffer buffer(header.extent_bytes);
    const auto write = [&](std::size_t at, std::span<const std::byte> from) {
        std::copy(from.begin(), from.end(), buffer.bytes().begin() + static_cast<std::ptrdiff_t>(at));
    };
    write(0, header_bytes(header, static_cast<std::uint32_t>(header_size)));
    for (std::size_t i = 0; i < tiles.size(); ++i) write(header.tiles[i].offset_bytes, tiles[i]);
    const std::uint64_t checksum = extent_checksum(buffer.bytes());
    write(kChecksumOffset, std::as_bytes(std::span(&checksum, 1)));
    return buffer;
}

ExtentHeader read_header(std::span<const std::byte> extent) {
    NumberReader numbers(extent);
    const auto magic = numbers.take<std::uint64_t>();
    OFFLOAD_CHECK(magic == kMagic, CorruptPage, "these ", extent.size(), " bytes do not begin a coded extent");
    const auto checksum = numbers.take<std::uint64_t>();
    const auto version = numbers.take<std::uint32_t>();
    OFFLOAD_CHECK(version == kExtentVersion, CorruptPage, "a coded extent has format ", version,
                  ", this program reads ", kExtentVersion, ": code it again, or use the program that wrote it");
    const std::size_t header_size = numbers.take<std::uint32_t>();
    ExtentHeader header;
    header.extent_bytes = numbers.take<std::uint64_t>();
    OFFLOAD_CHECK(header.extent_bytes == extent.size() && extent.size() % kExtentAlignment == 0, CorruptPage,
                  "a coded extent of ", header.extent_bytes, " bytes is here with ", extent.size());
    OFFLOAD_CHECK(extent_checksum(extent) == checksum, CorruptPage, "a coded extent of ", extent.size(),
                  " bytes does not have the checksum it was written with");
    header.coded_bytes = numbers.take<std::uint64_t>();
    header.rows = numbers.take<std::uint32_t>();
    header.columns = numbers.take<std::uint32_t>();
    header.rows_per_tile = numbers.take<std::uint32_t>();
    const std::size_t class_count = numbers.take<std::uint16_t>();
    const auto tables = numbers.take<std::uint8_t>();
    const unsigned order_bits = numbers.take<std::uint8_t>();
    OFFLOAD_CHECK(header.rows >= 1 && header.rows <= kMaxRows && header.columns >= 1 && header.columns <= kMaxColumns &&
                      header.rows_per_tile >= 1,
                  CorruptPage, "a coded extent has ", header.rows, " rows in tiles of ", header.rows_per_tile, " and ",
                  header.columns, " columns");
    OFFLOAD_CHECK(header.coded_bytes <= extent.size() && extent.size() - header.coded_bytes >= kTileSlackBytes &&
                      header_size <= header.coded_bytes && tables <= (kHasTunstall | kHasFrequencies),
                  CorruptPage, "a coded extent's header of ", header_size, " bytes says ", header.coded_bytes, " of ",
                  extent.size(), " bytes are coded");
    header.classes = take_classes(numbers, class_count, header.columns);
    header.order = take_order(numbers, order_bits, header.classes, header.columns);
    if (tables & kHasTunstall) header.tunstall = take_tunstall(numbers, class_count);
    if (tables & kHasFrequencies) header.frequencies = take_frequencies(numbers, class_count);
    take_tiles(numbers, header_size, header);
    OFFLOAD_CHECK(rounded_up(numbers.taken_bytes(), kTileAlignment) == header_size, CorruptPage,
                  "a coded extent's header has ", numbers.taken_bytes(), " bytes, not ", header_size);
    return header;
}

std::size_t said_extent_bytes(std::span<const std::byte> bytes) {
    NumberReader numbers(bytes);
    const auto magic = numbers.take<std::uint64_t>();
    OFFLOAD_CHECK(magic == kMagic, CorruptPage, "these ", bytes.size(), " bytes do not begin a coded extent");
    numbers.take<std::uint64_t>();  // checksum
    numbers.take<std::uint64_t>();  // format and size of the header
    const auto size_bytes = numbers.take<std::uint64_t>();
    OFFLOAD_CHECK(size_bytes >= kExtentAlignment && size_bytes % kExtentAlignment == 0 && size_bytes <= bytes.size(),
                  CorruptPage, "a coded extent says it has ", size_bytes, " bytes of the ", bytes.size(), " here");
    return size_bytes;
}

}  // namespace torch_offload
