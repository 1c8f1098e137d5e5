// Points in the streams of a GPU, reused. Layer device: includes base only.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "device/cuda_driver.h"
#include "device/stream.h"

namespace torch_offload {

/// Events of the driver that wait for their next recording. Threads: any.
class CudaEventPool : public std::enable_shared_from_this<CudaEventPool> {
public:
    /// The context outlives the pool and its events.
    static std::shared_ptr<CudaEventPool> make(const CudaContext& context);
    ~CudaEventPool();
    CudaEventPool(const CudaEventPool&) = delete;
    CudaEventPool& operator=(const CudaEventPool&) = delete;

    /// The point behind all that is queued on `stream`. Throws: what CudaContext::check() throws; InvalidArgument while
    /// the stream is captured into a graph: nothing is given to it then.
    std::shared_ptr<const Event> record(CuStream stream);
    /// A point at or behind that, recorded by who asks for it or waits, once record() succeeds; it has not passed
    /// before. Pre: the stream stays.
    std::shared_ptr<const Event> record_later(CuStream stream);
    /// What `stream` is given from now on waits for the event, one of these. Throws: as Event::wait().
    void order(CuStream stream, const Event& event) const;
    /// Waits for all that is queued. False: it may still run.
    bool wait_for(CuStream stream) noexcept;

private:
    friend class CudaEvent;
    friend class LateCudaEvent;
    explicit CudaEventPool(const CudaContext& context) : context_(context) {}
    CuEvent take();
    void give_back(CuEvent event) noexcept;

    const CudaContext& context_;
    std::mutex mutex_;  // guards the next
    std::vector<CuEvent> idle_;
};

}  // namespace torch_offload
