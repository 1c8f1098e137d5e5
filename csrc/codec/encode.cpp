#include "codec/encode.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "codec/coded_matrix.h"

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

/// What is known of the columns of a class. Of eight values at once, as one number.
class ClassCounter {
public:
    void add_values(const std::int8_t* row, std::size_t begin, std::size_t end) noexcept {
        for (std::size_t column = begin; column < end;) {
            Eights eights;
            const std::size_t stop = std::min(end, column + 8 * Eights::kMost);
            for (; column + 8 <= stop; column += 8) eights.add(load(row + column, 8));
            if (column < stop) eights.add(load(row + column, stop - column));
            column = stop;
            nonzeros_ += sum_of_bytes(eights.nonzeros);
            minuses_ += sum_of_bytes(eights.minuses);
            differing_ |= eights.differing;
            even_negative_ |= eights.even_negative;
        }
        total_ += end - begin;
    }
    /// Quads of the class: those that begin in it. Four counters, because equal neighbours would wait for each other.
    void add_quads(const std::int8_t* row, std::size_t begin, std::size_t end, std::size_t columns) noexcept {
        std::size_t column = (begin + kQuad - 1) / kQuad * kQuad;
        for (; column + 16 <= end; column += 16) {
            const std::uint64_t first = load(row + column, 8);
            const std::uint64_t second = load(row + column + 8, 8);
            ++quads_[0][quad_code(static_cast<std::uint32_t>(first))];
            ++quads_[1][quad_code(static_cast<std::uint32_t>(first >> 32))];
            ++quads_[2][quad_code(static_cast<std::uint32_t>(second))];
            ++quads_[3][quad_code(static_cast<std::uint32_t>(second >> 32))];
        }
        for (; column < end; column += kQuad) ++quads_[0][quad_at(row, column, columns)];
    }

    /// Bits 1 to 7 of -1, 0 and +1 are equal, and bit 0 is set where they are.
    bool is_ternary() const noexcept {
        return (differing_ & 0x7E7E7E7E7E7E7E7E) == 0 && (even_negative_ & kLowest) == 0;
    }
    TernaryCounts values() const noexcept { return {total_ - nonzeros_, nonzeros_ - minuses_, total_}; }
    CodeCounts quads() const noexcept {
        CodeCounts sum{};
        for (const CodeCounts& part : quads_) {
            for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
        }
        return sum;
    }
    void add(const ClassCounter& other) noexcept {
        const CodeCounts counts = other.quads();
        for (std::size_t i = 0; i < counts.size(); ++i) quads_[0][i] += counts[i];
        total_ += other.total_;
        nonzeros_ += other.nonzeros_;
        minuses_ += other.minuses_;
        differing_ |= other.differing_;
        even_negative_ |= other.even_negative_;
    }

private:
    static std::uint64_t load(const std::int8_t* values, std::size_t count) noexcept {
        std::uint64_t eight = 0;
        std::memcpy(&eight, values, count);
        return eight;
    }
    static std::uint64_t sum_of_bytes(std::uint64_t bytes) noexcept { return bytes * kLowest >> 56; }

    static constexpr std::uint64_t kLowest = 0x0101010101010101;

    /// Of some eights, by byte.
    struct Eights {
        static constexpr std::size_t kMost = 31;  // so that the sum of all bytes fits one
        std::uint64_t nonzeros = 0;
        std::uint64_t minuses = 0;
        std::uint64_t differing = 0;
        std::uint64_t even_negative = 0;

        void add(std::uint64_t eight) noexcept {
            nonzeros += eight & kLowest;
            minuses += eight >> 7 & kLowest;
            differing |= eight ^ eight >> 1;
            even_negative |= eight >> 7 & ~eight;
        }
    };

    CodeCounts quads_[4] = {};
    std::uint64_t total_ = 0;
    std::uint64_t nonzeros_ = 0;
    std::uint64_t minuses_ = 0;
    std::uint64_t differing_ = 0;
    std::uint64_t even_negative_ = 0;
};

/// Counts of each class, of quads only where they are asked for.
/// Throws: InvalidArgument if a value is not ternary.
std::vector<ClassCounter> count_classes(const TernaryView& matrix, const EncodeOptions& options, bool has_quads) {
    std::vector<ClassCounter> sums(options.classes.size());
    std::mutex sums_mutex;
    const std::size_t chunk_count = (matrix.rows + kTileRows - 1) / kTileRows;
    run_parallel(chunk_count, options.thread_count, [&](std::size_t chunk) {
        std::vector<ClassCounter> counters(options.classes.size());
        for (std::size_t row = chunk * kTileRows; row < std::min(matrix.rows, (chunk + 1) * kTileRows); ++row) {
            for (std::size_t i = 0; i < counters.size(); ++i) {
                const std::size_t begin = options.classes[i].first_column;
                const std::size_t end = end_column(options.classes, i, matrix.columns);
                counters[i].add_values(matrix.row(row), begin, end);
                if (has_quads) counters[i].add_quads(matrix.row(row), begin, end, matrix.columns);
            }
        }
        const std::lock_guard lock(sums_mutex);
        for (std::size_t i = 0; i < sums.size(); ++i) sums[i].add(counters[i]);
    });
    for (const ClassCounter& sum : sums) {
        OFFLOAD_CHECK(sum.is_ternary(), InvalidArgument, "a matrix to be coded has values that are not -1, 0 or +1");
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

/// A header that announces only the tables that some tile needs.
void drop_unused_tables(ExtentHeader& header) {
    const auto uses = [&](Coder coder) {
        return std::any_of(header.tiles.begin(), header.tiles.end(),
                           [&](const CodedTile& tile) { return tile.coder == coder; });
    };
    if (!uses(Coder::tun12)) header.tunstall.clear();
    if (!uses(Coder::rans4)) header.frequencies.clear();
}

}  // namespace

ExtentBuffer encode(const TernaryView& matrix, const EncodeOptions& options) {
    check_shape(matrix, options);
    ExtentHeader header;
    header.rows = matrix.rows;
    header.columns = matrix.columns;
    header.rows_per_tile = options.rows_per_tile > 0 ? options.rows_per_tile : rows_per_tile(matrix.rows);
    header.classes = options.classes;
    const std::vector<Coder> choices = coders_of(options.coder);
    const bool has_tun12 = std::ranges::find(choices, Coder::tun12) != choices.end();
    const bool has_rans4 = std::ranges::find(choices, Coder::rans4) != choices.end();
    for (const ClassCounter& counter : count_classes(matrix, options, has_rans4)) {
        const TernaryOdds odds = odds_of(counter.values());
        if (has_tun12) header.tunstall.push_back({odds, best_limit(odds)});
        if (has_rans4) header.frequencies.push_back(frequencies_of(counter.quads()));
    }
    const ExtentCoders coders(header, choices);
    const std::size_t tile_count = (matrix.rows + header.rows_per_tile - 1) / header.rows_per_tile;
    header.tiles.resize(tile_count);
    std::vector<std::vector<std::byte>> tiles(tile_count);
    run_parallel(tile_count, options.thread_count, [&](std::size_t i) {
        const std::size_t first = i * header.rows_per_tile;
        const TernaryView rows = matrix.rows_from(first, std::min(header.rows_per_tile, matrix.rows - first));
        for (const Coder coder : choices) {
            std::vector<std::byte> bytes = coders.of(coder).encode(rows);
            if (!tiles[i].empty() && bytes.size() >= tiles[i].size()) continue;
            tiles[i] = std::move(bytes);
            header.tiles[i].coder = coder;
        }
    });
    drop_unused_tables(header);
    return build_extent(std::move(header), tiles);
}

}  // namespace torch_offload
