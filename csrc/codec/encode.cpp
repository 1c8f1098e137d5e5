#include "codec/encode.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "codec/class_counter.h"
#include "codec/column_order.h"
#include "codec/qmoe.h"
#include "codec/rans4.h"
#include "codec/tun12.h"

namespace torch_offload {
namespace {

constexpr std::size_t kTileRows = 512;

void check_shape(const TernaryView& matrix, const EncodeOptions& options) {
    OFFLOAD_CHECK(matrix.rows >= 1 && matrix.rows <= kMaxRows && matrix.columns >= 1 && matrix.columns <= kMaxColumns,
                  InvalidArgument, "a coded matrix has 1 to ", kMaxRows, " rows and 1 to ", kMaxColumns,
                  " columns, not ", matrix.rows, " and ", matrix.columns);
    const ColumnClasses& classes = options.classes;
    bool is_cut = !classes.empty() && classes.size() <= kMaxClasses && classes[0].first_column == 0 &&
                  classes.back().first_column < matrix.columns;
    for (std::size_t i = 1; i < classes.size(); ++i) {
        is_cut = is_cut && classes[i].first_column > classes[i - 1].first_column;
    }
    OFFLOAD_CHECK(is_cut, InvalidArgument, "classes of columns begin at 0 and then each further right, at most ",
                  kMaxClasses, " of them and inside ", matrix.columns, " columns");
    OFFLOAD_CHECK(fits(options.order, classes, matrix.columns), InvalidArgument,
                  "an order of columns has 0, 1, 2 or 4 bits for each, not ", options.order.bits,
                  ", and puts as many into each class as it has");
    OFFLOAD_CHECK(options.rows_per_tile <= kMaxRows, InvalidArgument, "a tile has at most ", kMaxRows, " rows, not ",
                  options.rows_per_tile);
}

/// Equal tiles, so that threads have equal work.
std::size_t rows_per_tile(std::size_t rows) noexcept {
    const std::size_t tile_count = (rows + kTileRows - 1) / kTileRows;
    const std::size_t equal = (rows + tile_count - 1) / tile_count;
    return (equal + kRansLanes - 1) / kRansLanes * kRansLanes;
}

/// Runs `work(0)` to `work(count - 1)` on several threads. The first error is thrown when all have ended.
template <typename Work>
void run_parallel(std::size_t count, std::size_t thread_count, Work work) {
    std::atomic<std::size_t> next{0};
    std::exception_ptr error;
    std::mutex error_mutex;
    const auto take_turns = [&] {
        for (std::size_t i = next++; i < count; i = next++) {
            try {
                work(i);
            } catch (...) {
                const std::lock_guard lock(error_mutex);
                if (!error) error = std::current_exception();
            }
        }
    };
    {
        std::vector<std::jthread> threads;
        for (std::size_t i = 1; i < std::min(thread_count, count); ++i) threads.emplace_back(take_turns);
        take_turns();
    }
    if (error) std::rethrow_exception(error);
}

/// Counts of each class, of quads only where they are asked for.
/// Throws: InvalidArgument if a value is not ternary.
std::vector<ClassCounts> count_classes(const TernaryView& matrix, const EncodeOptions& options, bool has_quads) {
    std::vector<ClassCounts> sums(options.classes.size());
    std::mutex sums_mutex;
    const std::size_t chunk_count = (matrix.rows + kTileRows - 1) / kTileRows;
    run_parallel(chunk_count, options.thread_count, [&](std::size_t chunk) {
        std::vector<ClassCounter> counters(options.classes.size());
        for (std::size_t row = chunk * kTileRows; row < std::min(matrix.rows, (chunk + 1) * kTileRows); ++row) {
            for (std::size_t i = 0; i < counters.size(); ++i) {
                const std::size_t begin = options.classes[i].first_column;
                const std::size_t end = end_column(options.classes, i, matrix.columns);
                if (has_quads) {
                    counters[i].add_quads(matrix.row(row), begin, end, matrix.columns);
                } else {
                    counters[i].add_values(matrix.row(row), begin, end);
                }
            }
        }
        const std::lock_guard lock(sums_mutex);
        for (std::size_t i = 0; i < sums.size(); ++i) counters[i].add_to(sums[i]);
    });
    for (const ClassCounts& sum : sums) {
        OFFLOAD_CHECK(sum.is_ternary, InvalidArgument, "a matrix to be coded has values that are not -1, 0 or +1");
    }
    return sums;
}

std::vector<Coder> coders_of(CoderChoice choice) {
    switch (choice) {
        case CoderChoice::tun12:
            return {Coder::tun12};
        case CoderChoice::rans4:
            return {Coder::rans4};
        case CoderChoice::qmoe:
            return {Coder::qmoe};
        case CoderChoice::smallest:
            return {Coder::tun12, Coder::rans4};
    }
    return {};
}

/// One per choice, with the tables of the header.
std::vector<std::unique_ptr<TileEncoder>> encoders_of(const std::vector<Coder>& choices, const ExtentHeader& header) {
    std::vector<std::unique_ptr<TileEncoder>> encoders;
    for (const Coder coder : choices) {
        switch (coder) {
            case Coder::tun12:
                encoders.push_back(std::make_unique<Tun12Encoder>(header.columns, header.classes, header.tunstall));
                break;
            case Coder::rans4:
                encoders.push_back(std::make_unique<Rans4Encoder>(header.columns, header.classes, header.frequencies));
                break;
            case Coder::qmoe:
                encoders.push_back(std::make_unique<QmoeCoder>(header.columns));
                break;
        }
    }
    return encoders;
}

/// A header that announces only the tables that some tile needs.
void drop_unused_tables(ExtentHeader& header) {
    const auto uses = [&](Coder coder) {
        return std::any_of(header.tiles.begin(), header.tiles.end(),
                           [&](const CodedTile& tile) { return tile.coder == coder; });
    };
    if (!uses(Coder::tun12)) header.tunstall.clear();
    if (!uses(Coder::rans4)) header.frequencies.clear();
}

/// Of each row the columns in another order. [rows, columns]
std::vector<std::int8_t> reordered(const TernaryView& matrix, const std::vector<std::uint32_t>& order) {
    std::vector<std::int8_t> values(matrix.rows * matrix.columns);
    for (std::size_t row = 0; row < matrix.rows; ++row) {
        std::int8_t* const to = values.data() + row * matrix.columns;
        for (std::size_t position = 0; position < matrix.columns; ++position)
            to[position] = matrix.row(row)[order[position]];
    }
    return values;
}

}  // namespace

ExtentBuffer encode(const TernaryView& unordered, const EncodeOptions& options) {
    check_shape(unordered, options);
    TernaryView matrix = unordered;
    std::vector<std::int8_t> values;
    if (options.order.bits != 0) {
        values = reordered(unordered, columns_in_order(options.order, options.classes, unordered.columns));
        matrix.values = values.data();
    }
    ExtentHeader header;
    header.order = options.order;
    header.rows = matrix.rows;
    header.columns = matrix.columns;
    header.rows_per_tile = options.rows_per_tile > 0 ? options.rows_per_tile : rows_per_tile(matrix.rows);
    header.classes = options.classes;
    const std::vector<Coder> choices = coders_of(options.coder);
    const bool has_tun12 = std::ranges::find(choices, Coder::tun12) != choices.end();
    const bool has_rans4 = std::ranges::find(choices, Coder::rans4) != choices.end();
    for (const ClassCounts& counts : count_classes(matrix, options, has_rans4)) {
        const TernaryOdds odds = odds_of(counts.values);
        if (has_tun12) header.tunstall.push_back({odds, best_limit(odds)});
        if (has_rans4) header.frequencies.push_back(frequencies_of(counts.quads));
    }
    const auto encoders = encoders_of(choices, header);
    const std::size_t tile_count = (matrix.rows + header.rows_per_tile - 1) / header.rows_per_tile;
    header.tiles.resize(tile_count);
    std::vector<std::vector<std::byte>> tiles(tile_count);
    run_parallel(tile_count, options.thread_count, [&](std::size_t i) {
        const std::size_t first = i * header.rows_per_tile;
        const TernaryView rows = matrix.rows_from(first, std::min(header.rows_per_tile, matrix.rows - first));
        for (std::size_t k = 0; k < choices.size(); ++k) {
            std::vector<std::byte> bytes = encoders[k]->encode(rows, options.set);
            if (k > 0 && bytes.size() >= tiles[i].size()) continue;
            tiles[i] = std::move(bytes);
            header.tiles[i].coder = choices[k];
        }
    });
    drop_unused_tables(header);
    return build_extent(std::move(header), tiles);
}

ExtentBuffer encode_sorted(const TernaryView& matrix, std::size_t most_classes, const EncodeOptions& options) {
    OFFLOAD_CHECK(most_classes >= 1 && most_classes <= kMaxClasses, InvalidArgument, "columns are sorted into 1 to ",
                  kMaxClasses, " classes, not ", most_classes);
    ExtentBuffer plain = encode(matrix, options);
    if (most_classes == 1 || options.coder == CoderChoice::qmoe) return plain;
    SortedColumns columns = sorted_columns(matrix, most_classes);
    EncodeOptions by_odds = options;
    by_odds.classes = std::move(columns.classes);
    by_odds.order = std::move(columns.order);
    ExtentBuffer sorted = encode(matrix, by_odds);
    const auto coded_bytes = [](const ExtentBuffer& extent) { return read_header(extent.bytes()).coded_bytes; };
    return coded_bytes(sorted) < coded_bytes(plain) ? std::move(sorted) : std::move(plain);
}

}  // namespace torch_offload
