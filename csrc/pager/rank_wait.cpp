#include "pager/rank_wait.h"

#include "pager/pager_guards.h"
#include "pager/pager_impl.h"
#include "pager/service_thread.h"

namespace torch_offload {

RankWait::RankWait(Pager& pager) : service_(*pager.impl_->service) {
    service_.begin_rank_wait();
    wait_ = std::make_unique<ProgramWait>(*pager.impl_, StallCause::network);
    pager.impl_->store->kick();
}

RankWait::~RankWait() {
    wait_.reset();
    service_.end_rank_wait();
}

}  // namespace torch_offload
