// Writes the inputs that fuzzers start with into a folder: small extents of every coder, each as FuzzedExtent takes it.
//   write_seeds FOLDER
#include <filesystem>
#include <fstream>

#include "codec/ternary_samples.h"
#include "fuzz/fuzzed_extent.h"

namespace torch_offload {
namespace {

void write_seed(const std::filesystem::path& path, const ExtentBuffer& extent, std::size_t coded_bytes) {
    std::ofstream file(path, std::ios::binary);
    file.put(static_cast<char>(kRepairsChecksum | kRepairsSizes));
    // What fills the last 4 KiB comes back by itself, as long as it does not begin another.
    const std::size_t end = std::max(coded_bytes + kTileSlackBytes, extent.bytes().size() - kExtentAlignment + 2) - 1;
    file.write(reinterpret_cast<const char*>(extent.bytes().data()), static_cast<std::streamsize>(end));
}

void write_seeds(const std::filesystem::path& folder) {
    std::filesystem::create_directories(folder);
    constexpr std::size_t kShapes[][2] = {{1, 1}, {3, 40}, {70, 33}, {64, 64}, {10, 300}, {400, 1}};
    for (const CoderChoice coder : kChoices) {
        for (const auto& [rows, columns] : kShapes) {
            for (const double zero : {0.4, 0.9, 1.0}) {
                EncodeOptions options{.coder = coder, .rows_per_tile = columns == 1 ? 1 : (rows + 1) / 2};
                if (columns > 20) options.classes = {{0}, {17}};
                Matrix matrix = random_matrix(rows, columns, zero, 1);
                if (zero == 0.4) {
                    matrix = uneven_columns(rows, columns, 1);
                    sort_columns(matrix, columns % 5 + 1, options);
                }
                const ExtentBuffer extent = encode(matrix.view(), options);
                const std::string name = name_of(coder) + "-" + std::to_string(rows) + "x" + std::to_string(columns) +
                                         "-" + std::to_string(static_cast<int>(100 * zero));
                write_seed(folder / name, extent, CodedMatrix(extent.bytes()).header().coded_bytes);
            }
        }
    }
}

}  // namespace
}  // namespace torch_offload

int main(int argument_count, char** arguments) {
    if (argument_count != 2) return 2;
    torch_offload::write_seeds(arguments[1]);
}
