// Tables of TUN12 that several extents share. Layer codec: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "codec/tun12.h"

namespace torch_offload {

/// The tables that were last asked for. Extents of the same odds get the same ones, and keep what they have when it is
/// dropped here. Encoders round odds (`odds_of`) so that those of alike matrices are equal. RANS4 needs none of this:
/// its tables are made faster than found.
/// Units:   a table has 128 KiB, or 256 KiB where words are long.
/// Threads: any. Nobody waits while a table is made; if two make the same one, the first is kept.
class CoderTables {
public:
    /// At most that many tables.
    explicit CoderTables(std::size_t most_tables = 64) : most_tables_(most_tables) {}

    SharedTunstallWords words_of(const TunstallClass& coded);

    /// How often there was no such table.
    std::size_t made_count() const;
    std::size_t table_count() const;

private:
    struct Entry {
        TunstallClass coded;
        SharedTunstallWords words;
        std::uint64_t last_use;
    };
    /// Null if there is none. Pre: the lock is held; so below.
    SharedTunstallWords find(const TunstallClass& coded);
    void keep(const TunstallClass& coded, SharedTunstallWords words);

    std::size_t most_tables_;
    mutable std::mutex mutex_;
    std::vector<Entry> entries_;
    std::uint64_t use_count_ = 0;
    std::size_t made_count_ = 0;
};

}  // namespace torch_offload
