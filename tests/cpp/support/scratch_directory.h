// A directory on the disk of the build folder, gone after the test.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>

namespace torch_offload::test {

class ScratchDirectory {
public:
    ScratchDirectory() : path_(std::string(OFFLOAD_TEST_DIRECTORY) + "/scratch_XXXXXX") {
        if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error("mkdtemp failed: " + path_);
    }
    ~ScratchDirectory() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    ScratchDirectory(const ScratchDirectory&) = delete;
    ScratchDirectory& operator=(const ScratchDirectory&) = delete;

    const std::string& path() const noexcept { return path_; }
    bool is_empty() const { return std::filesystem::is_empty(path_); }

private:
    std::string path_;
};

}  // namespace torch_offload::test
