// The contracts that every coder keeps: tiles of rows to bytes and back. Layer codec: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/instruction_set.h"
#include "codec/ternary.h"

namespace torch_offload {

enum class Coder : std::uint8_t { tun12 = 1, rans4 = 2, qmoe = 3 };

/// Bytes behind a tile that may be read, whatever they are: decoders load whole vectors.
inline constexpr std::size_t kTileSlackBytes = 128;

/// Reads the rows of one tile in order. Does not outlive its coder or its bytes.
class TileReader {
public:
    virtual ~TileReader() = default;

    /// How many rows are read at once: reads begin at multiples of it.
    virtual std::size_t rows_at_once() const noexcept = 0;
    /// The next `count` rows: rows_at_once() of them, or those that are left. The rest of each row up to the next
    /// multiple of 64 columns is zero; what is behind that is undefined.
    /// Throws: CorruptPage where the bytes are not those of such rows.
    virtual void read(std::size_t count, const TernaryRows& to) = 0;
};

/// Codes tiles: some rows, all columns.
/// Threads: any; an encoder does not change.
class TileEncoder {
public:
    virtual ~TileEncoder() = default;

    /// The same bytes for the same rows, on every machine, by every set.
    virtual std::vector<std::byte> encode(const TernaryView& tile, InstructionSet set) const = 0;
};

/// Opens coded tiles. What it knows beside a tile's bytes (its tables) is in the extent's header.
/// Threads: any; a decoder does not change.
class TileDecoder {
public:
    virtual ~TileDecoder() = default;

    /// Pre: kTileSlackBytes behind `bytes` may be read.
    /// Throws: CorruptPage if that many rows cannot be in there.
    virtual std::unique_ptr<TileReader> open(std::span<const std::byte> bytes, std::size_t rows,
                                             InstructionSet set) const = 0;
};

}  // namespace torch_offload
