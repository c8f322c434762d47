//! Tests of ranks on GPUs: whether they run here, two ranks in threads, and the errors of calls.

use super::gpu_ranks::{GpuRanks, Gpus};
use flash_sampling::distributed::{Loopback, Transport};
use flash_sampling::{CudaRank, CudaRankOptions, GpuExchange};
use flash_sampling_conformance::SamplerFactory;
use flash_sampling_conformance::suite::runs;
use flash_sampling_core::{Head, Plan, SampleError};
use flash_sampling_cuda::CudaError;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Shards on GPUs that copy their weight and hidden states from host memory.
pub(crate) const fn ranks(exchange: GpuExchange, gpus: Gpus, equal: Option<u32>) -> GpuRanks {
    GpuRanks { exchange, gpus, equal, in_place: false }
}

/// Shards whose weight and hidden states are in device memory of the caller.
pub(crate) const fn ranks_in_place(exchange: GpuExchange, gpus: Gpus, equal: Option<u32>) -> GpuRanks {
    GpuRanks { in_place: true, ..ranks(exchange, gpus, equal) }
}

impl GpuRanks {
    /// Returns a lock on the GPUs if a test of these ranks runs here, and else counts one skipped test. Waits of ranks
    /// have a timeout, so the tests run one at a time.
    pub(crate) fn alone(self) -> Option<MutexGuard<'static, ()>> {
        static ALONE: Mutex<()> = Mutex::new(());
        runs(&self.name(), self.unavailable(), 1).then(|| ALONE.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Calls a test with these ranks, if it runs here, under the lock of [`GpuRanks::alone`].
    pub(crate) fn run(self, test: impl FnOnce(GpuRanks)) {
        if let Some(_alone) = self.alone() {
            test(self);
        }
    }
}

/// Returns the error of the CUDA backend in a call's error.
pub(crate) fn of_cuda(error: SampleError) -> CudaError {
    let SampleError::Backend { source, .. } = error else { panic!("{error}") };
    source.downcast_ref::<CudaError>().cloned().unwrap_or_else(|| panic!("{source}"))
}

/// Builds two ranks in threads, with shards from tokens 0 and 500, and calls `of` with each rank.
pub(crate) fn two_ranks<'w>(
    head: Head<'w>,
    plan: Plan,
    limit: Duration,
    gpus: Gpus,
    options: CudaRankOptions,
    of: impl Fn(usize, CudaRank<'w, Loopback>) + Sync,
) {
    thread::scope(|scope| {
        for (shard, transport) in head.split(&[0, 500]).into_iter().zip(Loopback::group(2)) {
            let of = &of;
            scope.spawn(move || {
                let rank = transport.rank();
                let options = CudaRankOptions { device: gpus.device(rank), ..options };
                of(rank, CudaRank::new(shard, plan, transport.with_time_limit(limit), &options).unwrap());
            });
        }
    });
}
