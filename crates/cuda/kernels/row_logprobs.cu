// The entry points of log-probabilities and kept tokens of calls that do not wait. The calls have stored their logits.
//
//   request_summaries  writes the requests of row_summary.cu for the rows of a launch
//   row_logprobs       writes the log-probabilities of each row, with one block per row
//   write_kept         writes the tokens that filters keep, with one block per row
#include "flash_sampling/row_summary/call.cuh"
#include "flash_sampling/selection/row_logprobs.cuh"

using namespace flash_sampling;

// For the host's launch: bytes of dynamic shared memory, threads per block.
extern "C" {
__constant__ u32 row_logprobs_launch[2] = {sizeof(RowLogprobs::Shared), RowLogprobs::THREADS};
__constant__ u32 write_kept_launch[2] = {sizeof(KeptRow::Shared), KeptRow::THREADS};
}

extern "C" __global__ void __launch_bounds__(256)
    request_summaries(const __grid_constant__ FilterCall call, const __grid_constant__ RowSummaries summaries, SummaryRequest* requests) {
    const u32 i = threadIdx.x;
    requests[i] = RowLogprobs::request(call, i, summaries.top_stride);
    summaries.listed_counts[i] = 0;
    if (summaries.before) summaries.before[i] = 0;
}

extern "C" __global__ void __launch_bounds__(RowLogprobs::THREADS, 2) row_logprobs(const __grid_constant__ LogprobCall call) {
    extern __shared__ __align__(16) u8 memory[];
    RowLogprobs::run(call, *reinterpret_cast<RowLogprobs::Shared*>(memory));
}

extern "C" __global__ void __launch_bounds__(KeptRow::THREADS, 2) write_kept(const __grid_constant__ KeptCall call) {
    extern __shared__ __align__(16) u8 memory[];
    KeptRow::run(call, *reinterpret_cast<KeptRow::Shared*>(memory));
}
