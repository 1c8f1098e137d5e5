// Whatever the bytes are, read_header ends with a header that agrees with itself or with CorruptPage, and asks for no
// more memory than twice the file.
#include "base/check.h"
#include "fuzz/fuzzed_extent.h"

namespace torch_offload {
namespace {

void read_and_check(std::span<const std::byte> extent) {
    const AllocationLimit limit(most_bytes_of_header(extent));
    const ExtentHeader header = read_header(extent);
    std::size_t row = 0;
    for (const CodedTile& tile : header.tiles) {
        require(tile.first_row == row, "tiles have all rows in order");
        require(tile.offset_bytes <= extent.size() && tile.size_bytes <= extent.size() - tile.offset_bytes &&
                    extent.size() - tile.offset_bytes - tile.size_bytes >= kTileSlackBytes,
                "tiles lie inside the extent with room behind them");
        row += tile.row_count;
    }
    require(row == header.rows, "tiles have all rows");
}

}  // namespace
}  // namespace torch_offload

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
    const torch_offload::FuzzedExtent extent({bytes, size});
    try {
        torch_offload::read_and_check(extent.bytes());
    } catch (const torch_offload::CorruptPage&) {
    }
    return 0;
}
