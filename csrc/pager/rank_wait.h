// Waits of the program for other processes. Layer pager.
#pragma once

#include <memory>

namespace torch_offload {

class Pager;
class ProgramWait;
class ServiceThread;

/// While it lives, the calling thread waits for other ranks: timed as `StallCause::network`, listed, and its cores are
/// offered to deferred work, as in a wait for the pager. What deferred work needs is read for it, also long before it
/// would have to be.
/// Threads: made and destroyed by the same one.
class RankWait {
public:
    explicit RankWait(Pager& pager);
    ~RankWait();
    RankWait(const RankWait&) = delete;
    RankWait& operator=(const RankWait&) = delete;

private:
    ServiceThread& service_;
    std::unique_ptr<ProgramWait> wait_;
};

}  // namespace torch_offload
